"""The guide is found wherever dpscope runs from, says what it has to, and takes measured numbers in."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from dpscope.commands import ncu
from dpscope.reports.report import compare_results
from dpscope.reports.traffic.data import by_size
from dpscope.results.store import ResultStore
from tests import ROOT
from tests.unit.reports.traffic_results import results_for


@pytest.fixture(scope="module")
def filling():
    """benchmarks/fill_ncu_guide.py as a module."""
    spec = importlib.util.spec_from_file_location("fill_ncu_guide", ROOT / "benchmarks" / "fill_ncu_guide.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_guide_is_the_page_in_docs():
    assert ncu.guide_text() == (ROOT / "docs" / "ncu-guide.md").read_text(encoding="utf-8")


def test_an_installed_package_reads_the_copy_beside_the_module(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "dpscope" / "commands"
    package.mkdir(parents=True)
    (package / ncu.GUIDE).write_text("the copy in the wheel")
    monkeypatch.setattr(ncu, "__file__", str(package / "ncu.py"))
    assert ncu.guide_text() == "the copy in the wheel"


def test_the_wheel_takes_the_guide_along():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    built = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    carried = built["targets"]["wheel"]["force-include"]
    assert carried["docs/ncu-guide.md"] == f"dpscope/commands/{ncu.GUIDE}"


@pytest.mark.parametrize(
    "name",
    [
        *("dram_read_throughput", "dram_write_throughput", "l2_read_throughput", "l2_write_throughput"),
        *("gld_throughput", "gst_throughput", "dram__bytes_read.sum", "app-range", "ncu-ui", "Add Baseline", "TMA"),
        *("NVreg_RestrictProfilingToAdminUsers=0", "ERR_NVGPUCTRPERM", "--page raw --csv"),
    ],
)
def test_the_guide_answers_what_people_ask(name):
    assert name in ncu.guide_text()


def test_links_of_the_guide_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", ncu.guide_text()):
        assert (ROOT / "docs" / target).is_file(), target


def test_measured_numbers_go_between_the_markers_and_replace_earlier_ones(filling):
    traffics = by_size(compare_results(results_for("standard", "flat")))
    text = ncu.guide_text()
    once = filling.fill(text, traffics, "2026-11-15", "dpscope ncu")
    assert "| `flat` | 4 | 256 | 2.19 GB | 1.96 GB | 1.93× | 4.05 MB | 26 |" in once
    assert "NVIDIA H200 (torch 2.11.0, Opacus 1.6.0, ncu 2025.3.1, 2026-11-15)" in once
    assert "flat moves 1.93× the DRAM bytes of standard" in once
    assert filling.fill(once, traffics, "2026-11-15", "dpscope ncu") == once
    assert once.split(filling.BEGIN)[0] == text.split(filling.BEGIN)[0]
    assert once.split(filling.END)[1] == text.split(filling.END)[1]


def test_an_estimate_does_not_get_into_the_guide(filling, tmp_path, monkeypatch):
    store = ResultStore(tmp_path)
    store.create()
    for number, result in enumerate(results_for("standard", measured=False)):
        store.write(f"{number}.json", result)
    page = tmp_path / "page.md"
    page.write_text(f"{filling.BEGIN}{filling.END}")
    arguments = ["fill", str(tmp_path), "--date", "2026-11-15", "--command", "dpscope ncu", "--guide", str(page)]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit, match="measurements only"):
        filling.main()
    assert page.read_text() == f"{filling.BEGIN}{filling.END}"


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "-m", "dpscope", "ncu", "--guide"],
        [sys.executable, ROOT / "scripts" / "profiling_script_ncu.py", "--guide"],
        ["bash", ROOT / "scripts" / "run_profiling_ncu.sh", "--guide"],
    ],
    ids=["dpscope", "script", "shell"],
)
def test_every_door_prints_the_guide_and_measures_nothing(command, tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "NCU": "/nowhere/ncu"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == ncu.guide_text()
    assert list(tmp_path.iterdir()) == []
