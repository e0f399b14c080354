"""ncu as it fails in the field: refused metrics and options, no permission, hanging, and a program that dies."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from dpscope.instruments.ncu.metrics import KERNEL_METRICS, L2_RED, LSU_STORE, RANGE_METRICS, TENSOR_OPS
from dpscope.instruments.ncu.running import one_pass_metrics, range_command, take_report, try_counters, why_no_counts
from dpscope.instruments.processes import LIFELINE, run_limited
from tests.fake_tools.ncu import COUNTED, NO_PERMISSION


def take(ncu, report, program=("true",), limit=30.0, **options):
    return take_report(
        lambda names: range_command(str(ncu.path), program, report, names),
        RANGE_METRICS,
        report,
        limit=limit,
        **options,
    )


@pytest.fixture
def report(tmp_path):
    return tmp_path / "step.ncu-rep"


def test_a_report_is_left_and_nothing_is_refused(fake_ncu, ncu_captures, report):
    lines = []
    taken = take(fake_ncu(reports={"range": str(ncu_captures["range"])}), report, on_line=lines.append)
    assert (taken.failure, taken.refused) == (None, [])
    assert report.read_bytes() == ncu_captures["range"].read_bytes()
    assert "".join(lines) == taken.output == COUNTED


def test_metrics_and_options_that_are_not_known_are_dropped_and_named(fake_ncu, ncu_captures, report):
    plan = {"unknown_metrics": [L2_RED, LSU_STORE], "unknown_options": ["--disable-extra-suffixes"]}
    ncu = fake_ncu(**plan, reports={"range": str(ncu_captures["range"])})
    taken = take(ncu, report)
    assert taken.failure is None
    assert sorted(taken.refused) == sorted([L2_RED, LSU_STORE, "--disable-extra-suffixes"])
    asked = next(part for part in taken.command if part.startswith("--metrics="))
    assert L2_RED not in asked
    assert RANGE_METRICS[1] in asked
    assert len(ncu.calls) == 4


def test_an_old_report_is_not_taken_for_a_new_one(fake_ncu, report):
    report.write_bytes(b"of yesterday")
    taken = take(fake_ncu(says={"range": NO_PERMISSION}), report)
    assert not report.exists()
    assert "ERR_NVGPUCTRPERM" in taken.failure


def test_without_permission_the_remedy_is_spelled_out(fake_ncu, report):
    taken = take(fake_ncu(says={"range": NO_PERMISSION}), report)
    for part in ("NVreg_RestrictProfilingToAdminUsers=0", "/etc/modprobe.d/", "SYS_ADMIN", "root"):
        assert part in taken.failure


def test_a_hanging_ncu_is_ended_with_all_it_has_started(fake_ncu, report, alive, wait_until):
    ncu = fake_ncu(hangs=True)
    taken = take(ncu, report, limit=1.5)
    assert "within 2 s and was ended" in taken.failure
    assert "--timeout" in taken.failure
    pids = [int(pid) for pid in ncu.pids_file.read_text().split()]
    assert len(pids) == 2
    wait_until(lambda: not any(map(alive, pids)), "ncu and its program are gone", seconds=10)


def test_a_program_that_fails_under_ncu_is_said_to_have_failed(fake_ncu, report):
    program = (sys.executable, "-c", "raise SystemExit(7)")
    taken = take(fake_ncu(runs_program=True, says={"range": ""}), report, program)
    assert "The application returned an error code (7)" in taken.failure


CUT = """==PROF== Profiling "vectorized_elementwise_kernel" - 338: 0%...
==ERROR== Failed to profile "vectorized_elementwise_kernel" in process 929
==PROF== Trying to shutdown target application
==ERROR== An error occurred while trying to profile.
"""


@pytest.mark.parametrize("may_be_cut", [True, False])
def test_a_report_that_was_cut_short_counts_only_where_that_was_meant(fake_ncu, ncu_captures, report, may_be_cut):
    ncu = fake_ncu(says={"range": CUT}, reports={"range": str(ncu_captures["range"])}, code=1)
    failure = take(ncu, report, may_be_cut=may_be_cut).failure
    assert failure is None if may_be_cut else "error occurred while trying to profile" in failure


def test_an_ncu_that_cannot_be_run_is_a_failure_like_any_other(tmp_path, report):
    taken = take_report(lambda names: [str(tmp_path / "none"), *names], ["m"], report, limit=5.0)
    assert "exit code 127" in taken.failure


def test_a_metric_that_is_refused_alone_is_the_end_of_it(fake_ncu, report):
    ncu = fake_ncu(unknown_metrics=["dram_read_throughput"])
    command = lambda names: range_command(str(ncu.path), ["true"], report, names)  # noqa: E731
    taken = take_report(command, ["dram_read_throughput"], report, limit=30.0)
    assert "Failed to find metric dram_read_throughput" in taken.failure


@pytest.mark.parametrize(
    ("printed", "says"),
    [
        (NO_PERMISSION, "NVreg_RestrictProfilingToAdminUsers=0"),
        (
            "==ERROR== Profiling failed because a driver resource was unavailable. Ensure that no other tool (like "
            "DCGM) is concurrently collecting profiling data.",
            "dcgmi profile --pause",
        ),
        ("==ERROR== Cuda driver is not compatible with Nsight Compute.", "as new as the driver"),
        ("==ERROR== unrecognised option '--replay-mode'. Use --help for further details.", "2023.1 or newer"),
        ("==ERROR== Failed to prepare kernel for profiling\n==ERROR== Unknown Error on device 0.", "Unknown Error"),
        ("==WARNING== No kernels were profiled.", "saw nothing between the start and the stop"),
        ("", "exit code 9"),
    ],
)
def test_each_message_of_ncu_has_its_remedy(printed, says):
    assert says in why_no_counts(printed, 9)


@pytest.mark.parametrize(
    ("says", "trouble"), [("    dram__bytes_read.sum       Mbyte         4.19\n", None), (NO_PERMISSION, "CTRPERM")]
)
def test_counters_are_tried_on_one_kernel(fake_ncu, says, trouble):
    found = try_counters(str(fake_ncu(says={"range": says}).path))
    assert found is None if trouble is None else trouble in found


@pytest.mark.parametrize(
    ("passes", "extras"), [("1 pass", TENSOR_OPS[:1]), ("2 passes", ()), ("no such line", ()), ("11 passes", ())]
)
def test_kernels_are_asked_only_for_what_fits_in_one_pass(fake_ncu, passes, extras):
    says = f'==PROF== Profiling "vectorized_elementwise_kernel" - 0: 0%....50%....100% - {passes}\n'
    found = one_pass_metrics(str(fake_ncu(says={"range": says}).path), TENSOR_OPS[0])
    assert found == (*KERNEL_METRICS, *extras)


def test_a_program_under_ncu_ends_when_its_starter_is_killed(start, tmp_path, alive, wait_until):
    """ncu stands between them; here a shell does."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\nfrom pathlib import Path\n"
        "from dpscope.instruments.processes import end_with_lifeline\n"
        "end_with_lifeline()\nPath(sys.argv[1]).write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    pid_file = tmp_path / "pid"
    inner = f"{shlex.join([sys.executable, str(program), str(pid_file)])}; true"
    script = f"from dpscope.instruments.processes import run_limited; run_limited(['sh', '-c', {inner!r}], limit=500)"
    starter = start("-c", script)
    wait_until(lambda: pid_file.exists() and pid_file.read_text(), "the program has started")
    pid = int(pid_file.read_text())
    assert alive(pid)
    starter.kill()
    wait_until(lambda: not alive(pid), "the program has ended", seconds=10)


def test_a_program_that_was_given_another_pipe_stays(tmp_path):
    """Only the pipe of `run_limited` is a lifeline: someone's `echo | program` is not."""
    script = "import time; from dpscope.instruments.processes import end_with_lifeline as e; e(); time.sleep(0.5)"
    done = run_limited(["sh", "-c", f'{LIFELINE}=1 "{sys.executable}" -c "{script}" < /dev/null'], limit=60)
    assert done.returncode == 0, done.output


def test_lines_come_while_the_command_runs(tmp_path):
    seen: list[str] = []
    flag = Path(tmp_path / "flag")
    script = f"echo first; while [ ! -e {flag} ]; do sleep 0.02; done; echo second"

    def on_line(line: str) -> None:
        seen.append(line)
        flag.touch()

    done = run_limited(["sh", "-c", script], limit=60, on_line=on_line)
    assert seen == ["first\n", "second\n"]
    assert not done.timed_out
