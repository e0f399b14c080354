"""Which ncu is found, and what it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpscope.instruments import processes
from dpscope.instruments.ncu.running import csv_command, find_ncu, kernel_command, ncu_version, range_command


def executable(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """A machine without ncu."""
    monkeypatch.delenv("NCU", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(processes, "ROOT", tmp_path / "root")


@pytest.mark.usefixtures("nowhere")
class TestFinding:
    def test_none(self):
        assert find_ncu() is None

    def test_on_the_path(self, monkeypatch, tmp_path):
        found = executable(tmp_path / "bin" / "ncu")
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        assert find_ncu() == found

    @pytest.mark.parametrize(
        ("versions", "newest"),
        [
            (["cuda-9.2", "cuda-12.4", "cuda-11.8"], "cuda-12.4"),
            (["cuda", "cuda-12", "cuda-12.4", "cuda-12.10"], "cuda-12.10"),
        ],
    )
    def test_the_newest_toolkit_is_the_one_of_the_highest_numbers(self, tmp_path, versions, newest):
        for version in versions:
            executable(tmp_path / "root" / "usr" / "local" / version / "bin" / "ncu")
        assert find_ncu() == str(tmp_path / "root" / "usr" / "local" / newest / "bin" / "ncu")

    def test_an_installation_of_its_own_goes_before_a_toolkit_and_a_patch_release_before_its_release(self, tmp_path):
        executable(tmp_path / "root" / "usr" / "local" / "cuda-12.4" / "bin" / "ncu")
        folder = tmp_path / "root" / "opt" / "nvidia" / "nsight-compute"
        for version in ("2025.1", "2025.1.1", "2024.10.0"):
            executable(folder / version / "ncu")
        assert find_ncu() == str(folder / "2025.1.1" / "ncu")

    def test_the_environment_goes_before_the_path(self, monkeypatch, tmp_path):
        executable(tmp_path / "bin" / "ncu")
        mine = executable(tmp_path / "mine" / "ncu")
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        monkeypatch.setenv("NCU", mine)
        assert find_ncu() == mine

    def test_what_the_environment_names_in_vain_is_not_replaced(self, monkeypatch, tmp_path):
        executable(tmp_path / "bin" / "ncu")
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        monkeypatch.setenv("NCU", str(tmp_path / "gone"))
        assert find_ncu() is None


def test_the_version_is_read_from_what_ncu_prints(fake_ncu):
    assert ncu_version(str(fake_ncu().path)) == "2025.3.1"
    assert ncu_version(str(fake_ncu(version="something else").path)) is None
    assert ncu_version("no-such-ncu") is None


def test_a_range_is_counted_without_touching_clocks_or_caches():
    told = range_command("ncu", ["python", "step.py"], Path("out/50%.ncu-rep"), ["a", "b"])
    assert told[0] == "ncu"
    assert told[-2:] == ["python", "step.py"]
    assert {"--replay-mode=app-range", "--clock-control=none", "--cache-control=none", "--metrics=a,b"} <= set(told)
    assert {"--import-sass=no", "--disable-extra-suffixes", "--target-processes=all", "--force-overwrite"} <= set(told)
    assert "--export=out/50%%.ncu-rep" in told  # ncu would fill in %.
    assert not any("--profile-from-start" in part for part in told)  # ncu refuses it in range modes


def test_kernels_are_counted_from_the_start_of_the_step_with_their_phases():
    told = kernel_command("ncu", ["python"], Path("k.ncu-rep"), ["a"], kernel="gemm|nvjet")
    assert {"--replay-mode=kernel", "--profile-from-start=off", "--nvtx"} <= set(told)
    assert {"--kernel-name=regex:gemm|nvjet", "--kernel-name-base=demangled"} <= set(told)
    assert not any("--kernel-name" in part for part in kernel_command("ncu", ["python"], Path("k"), ["a"]))


def test_a_report_is_imported_in_base_units_with_whole_names():
    assert csv_command("ncu", Path("a b.ncu-rep")) == [
        *("ncu", "--import", "a b.ncu-rep", "--csv", "--page=raw"),
        *("--print-units=base", "--print-kernel-base=demangled"),
    ]
