"""What the doctor says of a tool, from what the real tool prints."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from dpscope.commands import doctor
from dpscope.packages import version_of
from dpscope.runner import diagnosis
from dpscope.runner.diagnosis import ABSENT, BROKEN, PRESENT
from tests.fake_tools import nsys as fake_nsys
from tests.fake_tools.ncu import NO_PERMISSION

# Lines ncu prints around a profiled kernel.
NCU_FIGURES = """==PROF== Connected to process 4711
==PROF== Profiling "vectorized_elementwise_kernel" - 0: 0%....50%....100% - 1 pass
    Section: Command line profiler metrics
    -------------------- ----------- ------------
    Metric Name          Metric Unit Metric Value
    -------------------- ----------- ------------
    dram__bytes_read.sum       Mbyte         4.19
"""


@pytest.fixture
def gpu(monkeypatch):
    """A machine on which torch sees a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (139 * 2**30, 140 * 2**30))


def finding(checked, name):
    return next(found for found in checked if found.name == name)


@pytest.mark.parametrize(
    ("printed", "status", "says"),
    [
        (NCU_FIGURES, PRESENT, "read the DRAM counters"),
        (NO_PERMISSION, BROKEN, "ERR_NVGPUCTRPERM"),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", BROKEN, "does not fit the NVIDIA driver"),
        ("", BROKEN, "without a message"),
    ],
)
def test_counters_are_judged_by_what_ncu_prints(gpu, fake_ncu, printed, status, says):
    ncu = fake_ncu(says={"range": printed})
    checked = diagnosis.check_ncu()
    assert finding(checked, "Nsight Compute").found == f"2025.3.1, {ncu.path}"
    counters = finding(checked, "GPU counters")
    assert counters.status == status
    assert says in counters.found
    if status == BROKEN:
        assert "`dpscope ncu` would estimate" in counters.found
    if "CTRPERM" in printed:
        assert "NVreg_RestrictProfilingToAdminUsers=0" in counters.remedy


def test_missing_tools_come_with_a_remedy(monkeypatch, no_ncu):
    monkeypatch.setattr(diagnosis.shutil, "which", lambda tool: None)
    monkeypatch.setattr(diagnosis, "find_nsys", lambda: None)
    for checked in (diagnosis.check_ncu(), diagnosis.check_nsys()):
        assert [found.status for found in checked] == [ABSENT]
        assert "PATH" in checked[0].remedy


@pytest.mark.parametrize(
    ("package", "required"),
    [("jinja2", True), ("matplotlib", True), ("pandas", False), ("transformers", False), ("peft", False)],
)
def test_a_missing_package_is_named_with_what_it_is_for_and_what_to_type(monkeypatch, package, required):
    monkeypatch.setattr(diagnosis, "version_of", lambda name: None if name == package else version_of(name))
    found = finding(diagnosis.check_packages(), package)
    assert (found.status, found.required) == (ABSENT, required)
    assert found.remedy.endswith(f"install {package}")
    assert [other.status for other in diagnosis.check_packages() if other.name != package] == [PRESENT] * 6


def test_torch_compile_without_a_cpp_compiler_comes_with_a_remedy(monkeypatch):
    monkeypatch.setattr("dpscope.trainers.modes.torch_folder", lambda: "/anywhere")
    (works,) = diagnosis.check_compile()
    assert works.status == PRESENT

    def no_compiler():
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", no_compiler)
    (found,) = diagnosis.check_compile()
    assert (found.status, found.required) == (ABSENT, False)
    assert "no C++ compiler, so `--compile` fails on cpu" in found.found
    assert "install g++" in found.remedy


def test_brackets_in_a_remedy_are_printed(monkeypatch):
    trouble = diagnosis.Diagnosis("a part", ABSENT, "not there", "pip install 'package[extra]'")
    monkeypatch.setattr(diagnosis, "CHECKS", (lambda: [trouble],))
    printed = CliRunner().invoke(doctor.command).output
    assert "pip install 'package[extra]'" in printed


@pytest.mark.parametrize(
    ("importer", "status", "says"),
    [
        ("", PRESENT, "can be turned into reports"),
        (None, ABSENT, "full Nsight Systems"),
        (fake_nsys.NO_LIBDW, BROKEN, "libdw.so.1"),
    ],
)
def test_an_nsys_anywhere_is_named_and_its_importer_tried(monkeypatch, tmp_path, importer, status, says):
    monkeypatch.setenv("NSYS", str(fake_nsys.install(tmp_path, importer=importer)))
    monkeypatch.setattr("dpscope.instruments.processes.ROOT", tmp_path / "nothing installed")
    checked = diagnosis.check_nsys()
    assert finding(checked, "Nsight Systems").found == f"2025.3.1.90, {tmp_path}/host/target-linux-x64/nsys"
    found = finding(checked, "nsys importer")
    assert found.status == status
    assert says in f"{found.found} {found.remedy}"


def test_a_kernel_that_forbids_sampling_is_told_of_beforehand(monkeypatch, tmp_path):
    monkeypatch.setenv("NSYS", str(fake_nsys.install(tmp_path, importer="")))
    monkeypatch.setattr(diagnosis, "sampling_refused", lambda: "perf_event_paranoid is 4 here: lower it")
    found = finding(diagnosis.check_nsys(), "CPU sampling")
    assert (found.status, found.remedy) == (ABSENT, "lower it")


def test_a_gpu_is_named_with_its_memory(gpu):
    checked = diagnosis._check_cuda()
    assert "NVIDIA H200, compute capability 9.0" in finding(checked, "CUDA").found
    assert finding(checked, "GPU memory").found == "139.0 of 140.0 GiB free"
    assert finding(checked, "GPU memory").status == PRESENT


def test_memory_that_others_hold_is_a_trouble(monkeypatch, gpu):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (40 * 2**30, 140 * 2**30))
    busy = finding(diagnosis._check_cuda(), "GPU memory")
    assert busy.status == BROKEN
    assert "nvidia-smi" in busy.remedy


def test_a_path_with_a_space_is_told_where_torch_compile_cannot_link(monkeypatch):

    monkeypatch.setattr(torch, "__path__", ["/home/my user/env/torch"])
    (found,) = [each for each in diagnosis.check_compile() if each.name == "torch.compile"]
    assert found.status == ABSENT and "path with a space" in found.found and "folder without one" in found.remedy
