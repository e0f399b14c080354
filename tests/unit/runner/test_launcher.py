"""Whatever a child does, the sweep gets a row that says so. Real child processes throughout."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from dpscope.endings import outcome_of_exception, outcome_of_exit
from dpscope.errors import UserError
from dpscope.packages import install_command
from dpscope.results.store import ResultStore, read_result
from dpscope.runner import sweep
from dpscope.runner.measure import measure_or_explain
from dpscope.runner.sweep import Limits, launch
from dpscope.vocabulary.statuses import DISK_FULL, FAILED, OK, OOM, SKIPPED, TIMEOUT

# How every fake worker begins: with the request that the parent hands it.
READ_REQUEST = "import json, os, signal, sys, time\nrequest = json.loads(sys.stdin.readline())\n"

WRITE_RESULT = """
from dpscope.results.schema import result_for
from dpscope.results.store import write_atomically
from pathlib import Path
def write_result(**values):
    write_atomically(Path(request["output"]), result_for(request["spec"], **values).to_json())
"""

# The real worker, with the measurement alone replaced.
REAL_WORKER = """
import os, sys, time, types
from pathlib import Path
from dpscope.runner import worker
def measure(spec, progress, files):
    {body}
sys.modules["dpscope.runner.measure"] = types.SimpleNamespace(measure_or_explain=measure)
worker.main()
"""


@pytest.fixture
def store(tmp_path):
    store = ResultStore(tmp_path / "out")
    store.create()
    return store


@pytest.fixture
def spec(make_spec):
    return make_spec()


@pytest.fixture
def run(store, spec):
    """Launch a worker written as a Python script; the result, and the progress that was reported."""

    def run(script, **limits):
        progress = []
        result = launch(
            spec,
            store,
            limits=Limits(**{"timeout": 60, **limits}),
            on_progress=lambda *event: progress.append(event),
            worker=(sys.executable, "-c", script),
        )
        return result, progress

    return run


def members_of_group(group: int) -> list[int]:
    """Processes of a group that still run."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(pgrp) == group and state not in "ZX":
            members.append(int(stat.parent.name))
    return members


def test_a_child_that_writes_its_result_gives_that_result(run, store, spec):
    result, _ = run(READ_REQUEST + WRITE_RESULT + "write_result(avg_time_ms=1.5)")
    assert (result.status, result.avg_time_ms) == (OK, 1.5)
    assert read_result(store.path_of(spec.file_name)) == result


def test_a_full_disk_ends_the_sweep_and_is_no_row(run, store, spec, make_spec, monkeypatch):
    with pytest.raises(UserError, match=r"no room for the files of standard tiny .*: free some space"):
        run(f"raise SystemExit({DISK_FULL})")
    assert not store.path_of(spec.file_name).exists()

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dpscope.runner.measure.measure", full)
    with pytest.raises(OSError, match="No space left"):  # the worker exits with that code
        measure_or_explain(make_spec())


def test_a_child_learns_its_spec_and_its_memory_limit(run, spec):
    script = READ_REQUEST + WRITE_RESULT + "write_result(memory={'limit': request['memory_limit']})"
    result, _ = run(script, memory=123456789)
    assert result.spec == spec.to_dict()
    assert result.memory == {"limit": 123456789}


def test_a_child_that_allocates_until_it_dies_is_an_oom_row(run, store, spec):
    body = "hoard = [bytearray(2**24) for _ in range(2**20)]"
    result, _ = run(REAL_WORKER.format(body=body), memory=2**28)
    assert result.status == OOM
    assert "out of memory" in result.reason
    assert "smaller --batch-size" in result.reason
    assert "MemoryError" in result.details
    assert read_result(store.path_of(spec.file_name)) == result


def test_the_memory_limit_is_the_childs_own(run):
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    run(REAL_WORKER.format(body="raise SystemExit"), memory=2**28)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_child_that_hangs_is_a_timeout_row_and_is_gone_with_all_its_processes(run, tmp_path, wait_until):
    note = tmp_path / "pids"
    script = READ_REQUEST + (
        "import subprocess\n"
        "grandchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        f"open({str(note)!r}, 'w').write(f'{{os.getpid()}} {{grandchild.pid}}')\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "time.sleep(1000)"
    )
    began = time.monotonic()
    result, _ = run(script, timeout=1.5)
    assert time.monotonic() - began < 30
    assert result.status == TIMEOUT
    assert "no result within 2 s: raise --timeout" in result.reason
    child, grandchild = map(int, note.read_text().split())
    assert os.getpgid(0) != child
    wait_until(lambda: not members_of_group(child), f"the group of {child} (with {grandchild}) is gone", seconds=10)


@pytest.mark.parametrize(
    ("last_act", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGABRT)", "ended by SIGABRT"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 1)", f"ended by signal {signal.SIGRTMIN + 1}"),
        ("os._exit(7)", "exited with code 7 without a result"),
        ("sys.exit(0)", "exited with code 0 without a result"),
        ("raise RuntimeError('no such luck')", "exited with code 1 without a result"),
    ],
)
def test_a_child_that_dies_is_a_failed_row_that_says_how(run, store, spec, last_act, reason):
    result, _ = run(READ_REQUEST + "print('last words', file=sys.stderr, flush=True)\n" + last_act)
    assert result.status == FAILED
    assert reason in result.reason
    assert "last words" in result.details
    assert read_result(store.path_of(spec.file_name)) == result


def test_a_child_that_dies_before_it_reads_its_request_is_a_failed_row(run):
    result, _ = run("import os; os.close(0); os._exit(9)")
    assert result.status == FAILED
    assert "code 9" in result.reason


def test_a_half_written_result_counts_as_none(run):
    result, _ = run(READ_REQUEST + "open(request['output'], 'w').write('{\"schema_version\": 1, \"exp')\nos._exit(5)")
    assert result.status == FAILED
    assert "code 5" in result.reason


def test_garbage_on_standard_output_does_not_break_progress(run):
    script = (
        READ_REQUEST
        + WRITE_RESULT
        + (
            "say = sys.stdout.buffer.write\n"
            "event = json.dumps({'stage': 'step', 'done': 1, 'total': 2}).encode() + b'\\n'\n"
            "say(event)\n"
            "say(b'hello\\n42\\nnull\\n[1, 2]\\n{\"stage\": \"step\"}\\n\\xff\\xfe\\x00\\n' + b'[' * 100000 + b'\\n')\n"
            "say(b'x' * 1000000 + b'\\n')\n"  # more than a pipe holds: somebody has to go on reading
            "say(event.replace(b'1', b'2', 1))\n"
            'say(b\'{"stage": "st\')\n'
            "sys.stdout.flush()\n"
            "write_result()"
        )
    )
    result, progress = run(script)
    assert result.status == OK
    assert progress == [("step", 1, 2), ("step", 2, 2)]


def test_a_process_that_left_the_childs_group_does_not_hold_up_the_sweep(run, wait_until, alive, tmp_path):
    note = tmp_path / "pid"
    script = (
        READ_REQUEST
        + WRITE_RESULT
        + (
            "import subprocess\n"
            "sleeper = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
            "daemon = subprocess.Popen(sleeper, start_new_session=True)\n"  # it inherits standard output
            f"open({str(note)!r}, 'w').write(str(daemon.pid))\n"
            "write_result()"
        )
    )
    result, _ = run(script)
    daemon = int(note.read_text())
    assert alive(daemon)  # nobody waited for it
    os.kill(daemon, signal.SIGKILL)
    assert result.status == OK


def test_what_a_workload_prints_goes_to_the_log_and_not_among_the_events(run, store, spec):
    body = "print('from the workload'); os.system('echo from its shell'); progress('step', 1, 1); raise SystemExit"
    result, progress = run(REAL_WORKER.format(body=body))
    assert progress == [("loading", 0, 1), ("step", 1, 1)]
    log = store.log_of(spec.file_name).read_text()
    assert "from the workload" in log
    assert "from its shell" in log
    assert result.status == FAILED


def test_a_worker_whose_parent_dies_ends_by_itself(start, tmp_path, make_spec, wait_until, alive):
    note = tmp_path / "worker-pid"
    body = f"Path({str(note)!r}).write_text(str(os.getpid())); time.sleep(1000)"
    parent = start(
        "-c",
        "import json, sys\n"
        "from pathlib import Path\n"
        "from dpscope.results.store import ResultStore\n"
        "from dpscope.runner.sweep import Limits, launch\n"
        "from dpscope.runner.spec import RunSpec\n"
        "store = ResultStore(Path(sys.argv[1])); store.create()\n"
        "launch(RunSpec.from_dict(json.loads(sys.argv[2])), store, limits=Limits(),\n"
        "       on_progress=lambda *event: None, worker=(sys.executable, '-c', sys.argv[3]))\n",
        tmp_path / "out",
        json.dumps(make_spec().to_dict()),
        REAL_WORKER.format(body=body),
    )
    wait_until(lambda: note.exists() and note.read_text(), "the worker measures")
    worker = int(note.read_text())
    assert alive(worker)
    parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not alive(worker), "the orphaned worker is gone", seconds=10)


def test_a_row_measured_again_replaces_its_result_and_puts_a_foreign_file_aside(run, store, spec):
    place = store.path_of(spec.file_name)
    place.write_text("somebody's notes")
    run(READ_REQUEST + WRITE_RESULT + "write_result(avg_time_ms=1.0)")
    result, _ = run(READ_REQUEST + WRITE_RESULT + "write_result(avg_time_ms=2.0)")
    assert result.avg_time_ms == 2.0
    assert sorted(path.name for path in store.results.iterdir()) == [place.name, place.name + ".unreadable"]
    assert place.with_name(place.name + ".unreadable").read_text() == "somebody's notes"


def test_an_old_result_is_not_taken_for_the_one_of_a_child_that_died(run, store, spec, make_result):
    store.write(spec.file_name, make_result())
    result, _ = run(READ_REQUEST + "os._exit(4)")
    assert result.status == FAILED


@pytest.mark.parametrize("limits", [{"timeout": 0}, {"timeout": -1}, {"timeout": float("nan")}, {"memory": 0}])
def test_a_limit_that_no_child_could_meet_is_refused(limits):
    with pytest.raises(UserError, match=r"--timeout|--memory-limit"):
        Limits(**limits)


def test_a_kill_by_the_kernel_for_memory_is_an_oom_row():
    status, reason = outcome_of_exit(-signal.SIGKILL, "", oom_killed=True)
    assert status == OOM
    assert "killed by the kernel because the machine ran out of memory" in reason
    assert outcome_of_exit(-signal.SIGKILL, "", oom_killed=False)[0] == FAILED
    assert outcome_of_exit(-signal.SIGSEGV, "", oom_killed=True)[0] == FAILED


def test_the_kernels_count_of_kills_is_read_where_it_exists():
    assert sweep._oom_kills() >= 0


def test_an_exception_becomes_a_status_and_a_sentence():
    import torch

    assert outcome_of_exception(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))[0] == OOM
    assert outcome_of_exception(MemoryError())[0] == OOM
    assert outcome_of_exception(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))[0] == OOM
    assert outcome_of_exception(UserError("leave it out")) == (SKIPPED, "leave it out")
    status, reason = outcome_of_exception(ModuleNotFoundError("No module named 'triton'", name="triton"))
    assert (status, reason) == (
        SKIPPED,
        f"not installed in this Python: triton. To install: {install_command('triton')}",
    )
    assert outcome_of_exception(RuntimeError("\n\nfirst line\nsecond")) == (FAILED, "RuntimeError: first line")
    assert outcome_of_exception(RuntimeError()) == (FAILED, "RuntimeError: no message")


@pytest.mark.parametrize(("seconds", "words"), [(0.5, "0.5 s"), (1, "1 s"), (90, "1 min 30 s")])
def test_a_time_limit_is_told_as_it_was_given(seconds, words):
    assert Limits(timeout=seconds).in_words == words
