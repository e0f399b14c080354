"""Data flows one way, and what needs no torch starts without it.

The layers are read off the source, imports within functions and for type checkers included; what is loaded, off fresh
processes.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import dpscope
import dpscope.audit
import dpscope.instruments
import dpscope.reports
import dpscope.results

# From the bottom: a package imports from earlier lines of this table, and from itself.
LAYERS = (
    ("errors", "places", "plain_text", "units"),
    ("batches", "numbers", "packages", "random_states"),
    ("vocabulary",),
    ("endings",),
    ("flash", "workloads", "results"),
    ("privacy_budget",),
    ("accelerate", "lightning"),
    ("transformers",),
    ("instruments",),
    ("trainers",),
    ("audit",),
    ("runner", "exactness"),
    ("forecast",),
    ("reports",),
    ("comparison",),
    ("commands",),
    ("cli",),
    ("__main__",),
)
# The same inside flash.
FLASH_LAYERS = (
    ("combinations",),
    ("torch_side", "oracle"),
    ("kernels",),
    ("gradients",),
    ("ranks",),
    ("padding",),
    ("step",),
    ("sample_rows",),
    ("taps",),
    ("layers", "checkpointing"),
    ("compiled",),
    ("update",),
    ("attachment",),
    ("engine",),
    ("opacus",),
    ("graphed",),
)
ACYCLIC = (
    "vocabulary",
    "workloads",
    "results",
    "instruments",
    "trainers",
    "audit",
    "exactness",
    "runner",
    "flash",
    "forecast",
)

DPSCOPE = str(Path(sys.executable).with_name("dpscope"))

IMPORT_EACH = """
import importlib, json, sys
seen = {}
for name in sys.argv[1:]:
    importlib.import_module(name)
    seen[name] = sorted(sys.modules)
print(json.dumps(seen))
"""


SOURCE = Path(dpscope.__file__).parent


def imports_in(file):
    """Every module of dpscope that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dpscope"):
            for name in node.names:
                inner = SOURCE.joinpath(*node.module.split(".")[1:], name.name)
                is_module = inner.is_dir() or inner.with_suffix(".py").is_file()
                yield f"{node.module}.{name.name}" if is_module else node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("dpscope"))


@cache
def graph():
    """module -> the modules of dpscope that it imports."""
    modules = {}
    for file in SOURCE.rglob("*.py"):
        parts = file.relative_to(SOURCE.parent).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = set(imports_in(file))
    return modules


def package_of(module):
    return module.split(".")[1] if "." in module else module


@pytest.mark.parametrize(("root", "layers"), [("dpscope", LAYERS), ("dpscope.flash", FLASH_LAYERS)])
def test_every_package_has_a_layer_and_imports_from_lower_ones_only(root, layers):
    def part_of(module):
        return module.removeprefix(f"{root}.").split(".")[0]

    level = {name: number for number, names in enumerate(layers) for name in names}
    imports = {
        module: {name for name in names if name.startswith(f"{root}.")}
        for module, names in graph().items()
        if module.startswith(f"{root}.")  # names of the package itself are all lazy
    }
    assert {part_of(module) for module in imports} == set(level)
    upwards = [
        (module, name)
        for module, names in imports.items()
        for name in names
        if part_of(module) != part_of(name) and level[part_of(module)] <= level[part_of(name)]
    ]
    assert upwards == []


# Variations of a step: what their names have in common, their package, and the other files whose code knows of them.
# `combinations.py` (refusals by name), `torch_side/` (torch's own machinery) and `kernels/` do not count, nor do words
# in docstrings and messages, and files that people save.
VARIATIONS = {
    "compiled": (r"compil|dynamo|traced|region", {"attachment.py", "engine.py", "layers/plan.py"}),
    "ranks": (r"fsdp|shard|^dtensor", {"layers/plan.py", "sample_rows/mixing.py"}),
    "checkpointing": (
        r"rerun|recomput|checkpoint(?!_dict)",
        {"compiled/regions.py", "engine.py", "layers/sample_call.py", "sample_rows/forward_passes.py"},
    ),
}
NOT_COUNTED = ("combinations.py", "torch_side", "kernels")
SAVED_FILES = ("opacus/privacy_engine.py", "opacus/training_state.py")


def names_in(file):
    """Every identifier of a file, and the modules that it imports, but for those of torch's own machinery."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        for field in ("id", "attr", "arg", "name", "module"):
            name = getattr(node, field, None)
            if isinstance(name, str) and not name.startswith("dpscope.flash.torch_side"):
                yield name


@pytest.mark.parametrize("package", VARIATIONS)
def test_few_files_know_of_a_variation_of_a_step(package):
    pattern, known = VARIATIONS[package]
    files = {file.relative_to(SOURCE / "flash"): file for file in (SOURCE / "flash").rglob("*.py")}
    found = {
        place.as_posix()
        for place, file in files.items()
        if place.parts[0] not in (package, *NOT_COUNTED)
        and not (package == "checkpointing" and place.as_posix() in SAVED_FILES)
        and any(re.search(pattern, name, re.IGNORECASE) for name in names_in(file))
    }
    assert found == known


def test_commands_reach_instruments_through_the_runner():
    direct = {name for module, names in graph().items() if package_of(module) == "commands" for name in names}
    assert [name for name in direct if package_of(name) == "instruments"] == []


@pytest.mark.parametrize("package", ACYCLIC)
def test_no_module_imports_itself_by_way_of_others(package):
    inner = {
        module: {name for name in names if package_of(name) == package}
        for module, names in graph().items()
        if package_of(module) == package
    }
    try:
        TopologicalSorter(inner).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


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
        *("dpscope.runner.measurements.ncu", "dpscope.runner.measurements.nsys"),  # whose commands can be printed
    ]
    loaded = loaded_after_importing(*names)
    heavy = {"torch", "matplotlib", "pandas"}  # the last two are loaded by the first figure and the first data frame
    assert [name for name in names if loaded[name] & heavy] == []


def test_what_reads_results_imports_torch_in_no_function_either():
    folders = ("results", "reports")
    sources = {file: file.read_text("utf-8") for name in folders for file in (SOURCE / name).rglob("*.py")}
    importing = re.compile(r"^\s*(from|import) torch\b", re.MULTILINE)
    assert [file.name for file, text in sources.items() if importing.search(text)] == []


def test_the_names_of_the_package_are_there_without_torch_until_one_needs_it():
    script = (
        "import sys, dpscope\n"
        "dpscope.compare, dpscope.make_sweep, dpscope.make_config, dpscope.RunSpec, dpscope.Comparison\n"
        "assert 'torch' not in sys.modules\n"
        "assert not hasattr(dpscope, 'no_such_name')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert set(dpscope.__all__) == set(dir(dpscope))


@pytest.mark.parametrize("package", ["dpscope", "dpscope.flash", "dpscope.transformers"])
def test_what_a_package_loads_when_it_is_used_is_what_type_checkers_see(package):
    module = importlib.import_module(package)
    source = ast.parse(Path(module.__file__).read_text("utf-8"))
    typed = next(node for node in source.body if isinstance(node, ast.If))
    homes = {name.asname: imported.module for imported in typed.body for name in imported.names}
    assert set(homes) == set(module.__all__) - {"__version__"} == set(dir(module)) - {"__version__"}
    loaded = {name: getattr(importlib.import_module(home), name) for name, home in homes.items()}
    assert all(getattr(module, name) is each for name, each in loaded.items())


def test_results_know_nothing_of_what_comes_before_and_after_them():
    loaded = loaded_after_importing(*modules_of(dpscope.results))
    others = ("dpscope.runner", "dpscope.reports", "dpscope.trainers", "dpscope.instruments", "dpscope.commands")
    assert [module for module in set.union(*loaded.values()) if module.startswith(others)] == []


def test_reports_measure_nothing():
    """Of workloads they know what there are (`configs`), and build none."""
    loaded = set.union(*loaded_after_importing(*modules_of(dpscope.reports)).values())
    others = ("dpscope.runner", "dpscope.trainers", "dpscope.instruments", "dpscope.workloads.", "dpscope.commands")
    found = {module for module in loaded if module.startswith(others)}
    assert {module for module in found if not module.startswith("dpscope.workloads.configs")} == set()


@pytest.mark.slow
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


@pytest.mark.slow
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
