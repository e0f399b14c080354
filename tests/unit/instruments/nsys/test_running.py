"""Finding nsys, the command it is given, what it leaves, and what is said where it leaves nothing of use."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest

from dpscope.instruments import processes
from dpscope.instruments.nsys import running
from dpscope.instruments.nsys.command import (
    Nsys,
    NsysOptions,
    find_importer,
    find_nsys,
    inspect_nsys,
    interactive_commands,
    needed_variables,
    profile_command,
    shell_line,
)
from dpscope.instruments.nsys.running import take_capture
from tests.fake_tools import nsys as fake_nsys
from tests.fake_tools.nsys_exports import a_step

ANY = Nsys("nsys", "2025.3.1", frozenset())


@pytest.fixture(autouse=True)
def a_bare_machine(monkeypatch, tmp_path):
    """No NVIDIA tool anywhere, until a test installs one."""
    for name in ("NSYS", "NCU"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(processes, "ROOT", tmp_path / "root")


# Finding


def test_nsys_is_the_one_that_was_named_or_on_the_path(monkeypatch, tmp_path):
    assert find_nsys() is None
    on_path = fake_nsys.install(tmp_path / "a")
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert find_nsys() == str(on_path)
    named = fake_nsys.install(tmp_path / "b")
    monkeypatch.setenv("NSYS", str(named))
    assert find_nsys() == str(named)
    monkeypatch.setenv("NSYS", str(tmp_path / "not-there"))
    assert find_nsys() is None  # rather than another one than was asked for


def test_nsys_is_found_beside_ncu(monkeypatch, tmp_path):
    nsys = fake_nsys.install(tmp_path / "opt" / "nsight-compute" / "2025.3.1")
    ncu = tmp_path / "opt" / "nsight-compute" / "2025.3.1" / "ncu"
    ncu.write_text("#!/bin/sh\n")
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(ncu.parent))
    assert find_nsys() == str(nsys)


@pytest.mark.parametrize(
    ("versions", "newest"),
    [
        (["2024.9.1", "2024.10.2", "2023.4.1"], "2024.10.2"),
        (["2025.1", "2025.1.1"], "2025.1.1"),  # the number in "x64", further on, is no part of the version
    ],
)
def test_of_several_installed_versions_the_newest_is_taken(tmp_path, versions, newest):
    installed = tmp_path / "root" / "opt" / "nvidia" / "nsight-compute"
    for version in versions:
        fake_nsys.install(installed / version)
    assert find_nsys() == str(installed / newest / "host" / "target-linux-x64" / "nsys")


def test_a_version_says_which_options_it_has(tmp_path):
    new = inspect_nsys(str(fake_nsys.install(tmp_path / "new")))
    assert new.version == "2025.3.1.90"
    assert new.knows("--capture-range-end")
    assert new.knows("--gpu-metrics-devices")
    assert not new.knows("--gpu-metrics-device")
    assert not new.knows("--pytorch")
    old = inspect_nsys(str(fake_nsys.install(tmp_path / "old", help_text=fake_nsys.OLD_HELP)))
    assert not old.knows("--gpu-metrics-devices")
    broken = inspect_nsys(str(tmp_path / "not-there"))
    assert (broken.version, broken.knows("--capture-range-end")) == (None, True)


def test_the_importer_is_looked_for_in_the_host_folder_of_the_same_installation(tmp_path):
    assert find_importer(str(fake_nsys.install(tmp_path / "without"))) is None
    found = find_importer(str(fake_nsys.install(tmp_path / "with", importer="")))
    assert found == str(tmp_path / "with" / "host" / "linux-desktop-glibc_2_11_3-x64" / "QdstrmImporter")


def test_of_several_importers_the_newest_is_taken(tmp_path):
    nsys = fake_nsys.install(tmp_path / "nsight", importer="")
    (older,) = (tmp_path / "nsight" / "host").glob("linux-desktop-*/QdstrmImporter")
    newer = older.parent.with_name("linux-desktop-glibc_2_28_0-x64") / older.name
    oldest = older.parent.with_name("linux-desktop-glibc_2_9-x64") / older.name
    for path in (newer, oldest):
        path.parent.mkdir()
        path.write_bytes(older.read_bytes())
    assert find_importer(str(nsys)) == str(newer)


# The command


def test_the_command_records_between_start_and_stop_and_nothing_else(tmp_path):
    command = profile_command(ANY, ["python", "train.py"], tmp_path / "report", NsysOptions())
    assert command[:2] == ["nsys", "profile"]
    assert command[-2:] == ["python", "train.py"]
    assert {
        "--trace=cuda,nvtx,osrt,cudnn,cublas",
        *("--sample=none", "--cpuctxsw=none"),  # sampling the host costs time and asks for permission
        *("--capture-range=cudaProfilerApi", "--capture-range-end=stop"),
        f"--output={tmp_path / 'report'}",
    } <= set(command)
    assert not any("gpu-metrics" in part for part in command)


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"--capture-range-end", "--gpu-metrics-devices"}, "--gpu-metrics-devices=all"),
        ({"--capture-range-end", "--gpu-metrics-device"}, "--gpu-metrics-device=all"),
    ],
)
def test_options_are_spelled_as_the_version_has_them(tmp_path, options, asked):
    nsys = Nsys("nsys", None, frozenset(options))
    assert asked in profile_command(nsys, ["true"], tmp_path / "r", NsysOptions(gpu_metrics=True))


def test_an_old_version_gets_its_own_word_for_stopping(tmp_path):
    command = profile_command(Nsys("nsys", None, frozenset({"--trace"})), ["true"], tmp_path / "r", NsysOptions())
    assert "--stop-on-range-end=true" in command
    assert not any("capture-range-end" in part for part in command)


def test_recording_by_hand_is_three_commands_of_one_session():
    launch, start, stop = interactive_commands(ANY, ["train"], NsysOptions(), session="s", environment={"HOME": "/h"})
    assert shlex.split(launch)[:5] == ["env", "-i", "HOME=/h", "nsys", "launch"]
    assert shlex.split(launch)[-1] == "train"
    assert "--session-new=s" in launch
    assert "--session=s" in start
    assert "%h" in start  # the host's name: no machine overwrites another's report
    assert shlex.split(stop) == ["nsys", "stop", "--session=s"]


# What the profiled process sees

SECRETS = {
    "HF_TOKEN": "hf_secret",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "WANDB_API_KEY": "secret",
    "CUDA_DOWNLOAD_TOKEN": "secret",  # of a family that is passed on, but secret by its name
    "LC_PASSWORD": "secret",
    "TORCH_HUB_KEY": "secret",
    "SSH_AUTH_SOCK": "secret",
    "DATABASE_URL": "postgres://me:secret@host",
    "MY_VARIABLE": "secret",
}


def test_only_what_a_step_needs_is_passed_on():
    needed = {"PATH": "/bin", "HOME": "/home/me", "CUDA_VISIBLE_DEVICES": "1", "LD_LIBRARY_PATH": "/lib", "LC_ALL": "C"}
    needed |= {"PYTHONPATH": "src", "OMP_NUM_THREADS": "4", "TMPDIR": "/scratch", "TRITON_CACHE_DIR": "/cache"}
    needed |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert needed_variables({**needed, **SECRETS}) == needed


def test_a_planted_token_is_in_nothing_that_nsys_leaves(monkeypatch, tmp_path):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, f"s3cr3t-{value}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    export = a_step(tmp_path / "step.sqlite").write()
    nsys = inspect_nsys(str(fake_nsys.install(tmp_path / "nsight", export=export)))
    variables = needed_variables(os.environ)
    taken = take_capture(nsys, ["true"], tmp_path / "out", "step", NsysOptions(), environment=variables)
    assert taken.failure is None
    recorded = json.loads(taken.report.read_text())["environment"]
    assert recorded["CUDA_VISIBLE_DEVICES"] == "0"  # the fake does write its environment down, as nsys does
    for path in (tmp_path / "out").iterdir():
        assert b"s3cr3t" not in path.read_bytes()
    assert "s3cr3t" not in shell_line(taken.command, variables)


TAKE = """
import os, sys
from pathlib import Path
from dpscope.instruments.nsys.command import NsysOptions, needed_variables
from dpscope.instruments.nsys.command import inspect_nsys
from dpscope.instruments.nsys.running import take_capture
variables = needed_variables(os.environ)
nsys, folder = inspect_nsys(sys.argv[1]), Path(sys.argv[2])
taken = take_capture(nsys, ["true"], folder, "step", NsysOptions(), environment=variables)
print(taken.failure, taken.foreign_variables)
"""


def has_namespaces():
    try:
        user = [] if os.geteuid() == 0 else ["--user", "--map-current-user"]
        return (
            subprocess.run(["unshare", *user, "--pid", "--fork", "--mount-proc", "true"], check=False).returncode == 0
        )
    except FileNotFoundError:
        return False


@pytest.fixture
def take_in_child(tmp_path):
    """Take a capture in a process that was started with secrets: what it finds of them, and the report."""

    def take(export):
        nsys = fake_nsys.install(tmp_path / "nsight", export=export)
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(sys.path), **SECRETS}
        command = [sys.executable, "-c", TAKE, str(nsys), str(tmp_path / "out")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout, (tmp_path / "out" / "step.nsys-rep").read_text()

    return take


@pytest.mark.skipif(not has_namespaces(), reason="this system has no PID namespaces for us")
def test_nsys_sees_no_process_but_its_own(take_in_child, tmp_path):
    """What a process was started with stands in /proc, and nsys writes down what it finds there."""
    _, report = take_in_child(a_step(tmp_path / "step.sqlite").write())
    seen = json.loads(report)["of other processes"]
    assert f"PATH={SECRETS.get('PATH', '/usr/bin:/bin')}" in seen  # the fake did look
    assert [name for name, value in SECRETS.items() if f"{name}={value}" in seen] == []


def test_variables_of_other_processes_in_an_export_are_named(take_in_child, tmp_path):
    """Where nsys saw them after all, the person is told before the report is shared; by name, not by value."""
    planted = a_step(tmp_path / "step.sqlite")
    planted.string("X=1\0HF_TOKEN=hf_secret\0Y=2")
    printed, _ = take_in_child(planted.write())
    assert "HF_TOKEN" in printed
    assert "hf_secret" not in printed


# What nsys leaves


@pytest.fixture
def run(tmp_path):
    """Take a capture with an nsys that behaves as it is told."""
    export = a_step(tmp_path / "step.sqlite").write()

    def go(program=("true",), **behaviour):
        installed = fake_nsys.install(tmp_path / "nsight", **{"export": export, **behaviour})
        environment = {**os.environ, "PATH": "/usr/bin:/bin"}
        return take_capture(
            inspect_nsys(str(installed)), program, tmp_path / "out", "step", NsysOptions(), environment=environment
        )

    return go


def test_a_report_is_exported(run, tmp_path):
    taken = run()
    assert taken.failure is None
    assert (taken.report, taken.database) == (tmp_path / "out" / "step.nsys-rep", tmp_path / "out" / "step.sqlite")
    assert taken.database.read_bytes() == (tmp_path / "step.sqlite").read_bytes()


def test_a_raw_capture_is_imported_and_then_exported(run, tmp_path):
    taken = run(leaves=".qdstrm", says=fake_nsys.NO_IMPORTER, exit_code=1, importer="")
    assert taken.failure is None
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["step.nsys-rep", "step.sqlite"]


def test_a_raw_capture_left_where_nsys_made_it_is_found(run, tmp_path):
    elsewhere = tmp_path / "nsys-report-1.qdstrm"
    elsewhere.write_text("raw")
    taken = run(leaves=None, says=f"Generating '{elsewhere}'\n", importer="")
    assert taken.failure is None
    assert taken.report.read_text() == "raw"


def test_without_an_importer_the_remedy_is_the_very_command(run, tmp_path):
    taken = run(leaves=".qdstrm", says=fake_nsys.NO_IMPORTER)
    raw = tmp_path / "out" / "step.qdstrm"
    assert taken.report == raw
    assert taken.database is None
    assert f"QdstrmImporter -i {raw} -o {raw.with_suffix('.nsys-rep')}" in taken.failure
    assert raw.exists()


def test_an_importer_that_lacks_a_library_names_it(run):
    taken = run(leaves=".qdstrm", says=fake_nsys.NO_IMPORTER, importer=fake_nsys.NO_LIBDW)
    assert "lacks libdw.so.1" in taken.failure
    assert "LD_LIBRARY_PATH" in taken.failure
    assert "apt install libdw1" in taken.failure


def test_a_report_that_cannot_be_exported_is_kept_and_the_remedy_said(run, tmp_path):
    taken = run(export=None)
    assert taken.report.exists()
    assert taken.database is None
    assert f"nsys export --type=sqlite --output={tmp_path / 'out' / 'step.sqlite'}" in taken.failure
    assert "dpscope nsys --read" in taken.failure
    assert "libdw.so.1" in taken.failure


@pytest.mark.parametrize(
    ("says", "remedy"),
    [
        (fake_nsys.NOTHING_RECORDED, "recorded nothing between the start and the stop"),
        (fake_nsys.METRICS_REFUSED, "leave out --gpu-metrics"),
        ("unrecognised option '--capture-range-end'", "does not know --capture-range-end"),
        ("Subscribe returned 999: CUPTI_ERROR_UNKNOWN", "another profiler"),
        ("write failed: No space left on device", "disk is full"),
        ("something nobody has seen yet", "something nobody has seen yet"),
        ("", "without a message"),
    ],
)
def test_what_nsys_says_becomes_a_sentence_with_a_remedy(run, says, remedy):
    taken = run(leaves=None, says=says, exit_code=1)
    assert taken.report is None
    assert remedy in taken.failure


def test_the_program_runs_and_its_lines_arrive(tmp_path):
    installed = fake_nsys.install(tmp_path / "nsight", runs=True, export=a_step(tmp_path / "s.sqlite").write())
    heard = []
    take_capture(
        inspect_nsys(str(installed)),
        ["/bin/echo", "hello from the program"],
        tmp_path / "out",
        "step",
        NsysOptions(),
        environment={},
        on_line=heard.append,
    )
    assert "hello from the program\n" in heard


def test_an_nsys_that_cannot_be_started_is_a_sentence(tmp_path):
    nsys = Nsys(str(tmp_path / "not-there"), None, frozenset())
    taken = take_capture(nsys, ["true"], tmp_path / "out", "step", NsysOptions(), environment={})
    assert "No such file" in taken.failure


@pytest.mark.parametrize(("level", "root", "refused"), [("4", False, True), ("2", False, False), ("4", True, False)])
def test_sampling_of_the_host_is_refused_before_it_is_tried(monkeypatch, tmp_path, level, root, refused):
    setting = tmp_path / "perf_event_paranoid"
    setting.write_text(level)
    monkeypatch.setattr(running, "PARANOID", setting)
    monkeypatch.setattr(running.os, "geteuid", lambda: 0 if root else 1000)
    said = running.sampling_refused()
    assert (said is not None) == refused
    if refused:
        assert "perf_event_paranoid is 4" in said
        assert "sudo tee" in said


def test_where_the_kernel_says_nothing_sampling_is_tried(monkeypatch, tmp_path):
    monkeypatch.setattr(running, "PARANOID", tmp_path / "not-there")
    assert running.sampling_refused() is None
