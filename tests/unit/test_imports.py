"""Data flows one way, and what needs no torch starts without it. Each look is taken in a fresh process."""

from __future__ import annotations

import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import dpscope
import dpscope.audit
import dpscope.instruments
import dpscope.reports
import dpscope.results

DPSCOPE = str(Path(sys.executable).with_name("dpscope"))

IMPORT_EACH = """
import importlib, json, sys
seen = {}
for name in sys.argv[1:]:
    importlib.import_module(name)
    seen[name] = sorted(sys.modules)
print(json.dumps(seen))
"""


def modules_of(package):
    return [
        package.__name__,
        *(module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")),
    ]


def loaded_after_importing(*names):
    """What is in `sys.modules` of a new process after each import in turn."""
    command = [sys.executable, "-c", IMPORT_EACH, *names]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    return {name: set(modules) for name, modules in json.loads(output).items()}


def test_what_needs_no_torch_imports_none():
    names = [
        *("dpscope", "dpscope.cli", "dpscope.errors", "dpscope.units", "dpscope.comparison"),
        *modules_of(dpscope.reports),
        *modules_of(dpscope.results),
        *("dpscope.vocabulary.methods", "dpscope.workloads.configs", "dpscope.runner.spec", "dpscope.runner.sweep"),
        *("dpscope.runner.worker", "dpscope.commands.compare", "dpscope.commands.report"),
    ]
    loaded = loaded_after_importing(*names)
    heavy = {"torch", "matplotlib", "pandas"}  # the last two are loaded by the first figure and the first data frame
    assert [name for name in names if loaded[name] & heavy] == []


def test_the_names_of_the_package_are_there_without_torch_until_one_needs_it():
    script = (
        "import sys, dpscope\n"
        "dpscope.compare, dpscope.make_sweep, dpscope.make_config, dpscope.RunSpec, dpscope.Comparison\n"
        "assert 'torch' not in sys.modules\n"
        "assert not hasattr(dpscope, 'no_such_name')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert set(dpscope._HOMES) <= set(dpscope.__all__)


def test_results_know_nothing_of_what_comes_before_and_after_them():
    loaded = loaded_after_importing(*modules_of(dpscope.results))
    others = ("dpscope.runner", "dpscope.reports", "dpscope.trainers", "dpscope.instruments", "dpscope.commands")
    assert [module for module in set.union(*loaded.values()) if module.startswith(others)] == []


def test_reports_measure_nothing():
    loaded = loaded_after_importing(*modules_of(dpscope.reports))
    others = ("dpscope.runner", "dpscope.trainers", "dpscope.instruments", "dpscope.workloads", "dpscope.commands")
    assert [module for module in set.union(*loaded.values()) if module.startswith(others)] == []


def test_instruments_know_no_method_and_no_workload_and_start_no_cuda():
    script = (
        "import importlib, json, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "known = sorted(sys.modules)\n"
        "import torch, dpscope.runner.measurements.time, dpscope.trainers.opacus\n"
        "print(json.dumps([known, torch.cuda.is_initialized()]))\n"
    )
    command = [sys.executable, "-c", script, *modules_of(dpscope.instruments)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    known, cuda_started = json.loads(output.splitlines()[-1])
    others = ("dpscope.trainers", "dpscope.workloads", "dpscope.runner", "dpscope.reports", "dpscope.commands")
    assert [module for module in known if module.startswith(others)] == []
    assert not cuda_started


def test_the_audit_runs_nothing_and_reports_nothing():
    loaded = loaded_after_importing(*modules_of(dpscope.audit))
    others = ("dpscope.runner", "dpscope.reports", "dpscope.commands", "dpscope.exactness")
    assert [module for module in set.union(*loaded.values()) if module.startswith(others)] == []


def test_only_checks_import_the_audit():
    """`dpscope.exactness` and the names of the package; `dpscope.commands.check` reaches it through the former."""
    source = Path(dpscope.__file__).parent
    importing = re.compile(r"^\s*(from|import) dpscope\.audit\b", re.MULTILINE)
    files = [path.relative_to(source) for path in source.rglob("*.py") if importing.search(path.read_text("utf-8"))]
    assert {str(file.parent) for file in files} == {".", "audit", "exactness"}
    assert [str(file) for file in files if file.parent == Path()] == ["__init__.py"]


def test_help_takes_a_third_of_a_second_of_the_processor():
    """The best of five, in processor time: what the machine does besides is not the command's fault."""
    times = []
    for _ in range(5):
        before = os.times()
        help_text = subprocess.run([DPSCOPE, "--help"], check=True, capture_output=True, text=True).stdout
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert "compare" in help_text
    assert min(times) < 0.3
