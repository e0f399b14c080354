"""The wheel alone, outside of any clone, does what the clone does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
