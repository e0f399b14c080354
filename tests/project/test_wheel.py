"""The wheel alone, outside of any clone, does what the clone does."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from dpscope.vocabulary.version import __version__
from tests import ROOT


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel's content and nothing else."""
    place = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(place / "dist"), str(ROOT)]
    subprocess.run([*pip, *build], check=True, capture_output=True, text=True)
    (wheel,) = (place / "dist").glob("dpscope-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(place / "site"), str(wheel)], check=True)
    return place / "site"


def run(installed: Path, folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, check=False, cwd=folder, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_measures_and_writes_the_page_outside_of_a_clone(installed, tmp_path, tiny_flags):
    where = run(installed, tmp_path, "-c", "import dpscope; print(dpscope.__file__)")
    assert where.startswith(str(installed))
    printed = run(
        installed,
        tmp_path,
        "-m",
        "dpscope",
        "compare",
        "--methods",
        "standard",
        *tiny_flags,
        "--batch-size",
        "2",
        "--instruments",
        "time",
        "--out",
        "rows",
    )
    assert "Open: rows/report.html" in printed
    assert "echarts" in (tmp_path / "rows" / "report.html").read_text()


def test_the_wheel_holds_the_guide_to_reports_of_nsight_compute(installed, tmp_path):
    assert "Nsight Compute" in run(installed, tmp_path, "-m", "dpscope", "ncu", "--guide")


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(installed):
    source = ROOT / "src" / "dpscope"
    there = {
        path.relative_to(source) for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    held = {path.relative_to(installed / "dpscope") for path in (installed / "dpscope").rglob("*") if path.is_file()}
    held = {path for path in held if "__pycache__" not in path.parts}
    assert held == there | {Path("commands", "ncu-guide.md")}
    assert {path.name.partition("-")[0] for path in installed.iterdir()} == {"bin", "dpscope"}


def test_the_wheel_says_what_it_is_and_what_it_needs_on_each_python(installed):
    (dpscope,) = distributions(path=[str(installed)])
    assert dpscope.version == __version__
    assert [str(entry.value) for entry in dpscope.entry_points if entry.name == "dpscope"] == ["dpscope.__main__:main"]
    assert any(path.name == "LICENSE" for path in dpscope.files or [])
    required = [Requirement(text) for text in dpscope.requires or []]
    with_site = {
        python: {
            each.name
            for each in required
            if each.marker and each.marker.evaluate({"extra": "dev", **python_of(python)})
        }
        for python in ("3.10", "3.12")
    }
    assert "pytest" in with_site["3.10"] and "sphinx" not in with_site["3.10"]
    assert "sphinx" in with_site["3.12"]


def python_of(version: str) -> dict[str, str]:
    return {"python_version": version, "python_full_version": f"{version}.0"}
