"""Opacus's own tests, which its wheel ships, pass against flash clipping, but for those listed with a reason."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests import ROOT

pytestmark = pytest.mark.timeout(900)  # 35 s of one core; a busy machine takes longer
# How many tests of each file run and pass: fewer would be a loss that no failure shows.
FILES = {
    "privacy_engine_test": 80,
    "privacy_engine_validation_test": 5,
    "gradient_accumulation_test": 3,
    "batch_memory_manager_test": 2,
    "randomness_test": 7,
    "grad_samples": 18,
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Counter[tuple[str, str]]:
    """(file, outcome) of every test, from one run in a process of its own: the plugin changes Opacus."""
    folder = tmp_path_factory.mktemp("opacus")
    (folder / "pytest.ini").write_text("[pytest]\n")
    report = folder / "report.xml"
    opacus = importlib.util.find_spec("opacus")
    if opacus is None or opacus.origin is None:
        pytest.skip("Opacus is not installed")
    site_packages = Path(opacus.origin).parents[1]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-p", "tests.frozen_imports", "-p", "tests.opacus_suite.flash_plugin"),
            *("-c", str(folder / "pytest.ini"), f"--rootdir={site_packages}", f"--junitxml={report}"),
            *("--pyargs", *(f"opacus.tests.{name}" for name in FILES)),
        ],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    counted: Counter[tuple[str, str]] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].removeprefix("opacus.tests.").split(".")[0]
        counted[file, case[0].tag if len(case) else "passed"] += 1
    return counted


@pytest.mark.parametrize("name", FILES)
def test_opacuss_own_tests_pass(name: str, outcomes: Counter[tuple[str, str]]) -> None:
    assert outcomes[name, "passed"] >= FILES[name], sorted(outcomes.items())
