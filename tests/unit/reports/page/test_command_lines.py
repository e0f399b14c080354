"""Commands that a page prints are typed into a real shell, read by the real command line and planned by the real
planner: what they would measure is what is missing, to the last setting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner

from dpscope.cli import main
from dpscope.comparison import Comparison
from dpscope.reports.page.render import command_lines, find_missing, products
from dpscope.reports.report import Report
from dpscope.results.schema import result_for, with_paths_from
from dpscope.runner.spec import RunSpec
from dpscope.vocabulary.instruments import INSTRUMENTS
from dpscope.vocabulary.settings import FLAGS, LATER_DEFAULTS
from dpscope.vocabulary.statuses import FAILED, OOM, SKIPPED
from dpscope.workloads.configs import (
    PRESETS,
    HuggingFaceConfig,
    TransformerConfig,
    config_from_file,
    make_config,
    parse_lora,
    with_lora,
    workload_at,
)
from dpscope.workloads.configs.huggingface import OUR_SIZES
from tests import rows_here

METHODS = ("standard", "flat", "ghost", "flash")
WORKLOAD = "import dpscope\n\n\ndef build(batch_size, seq_len=None):\n    raise NotImplementedError\n"
COMMANDS = ("compare", "memory", "trace", "ncu", "nsys")

# What a shell hands to `dpscope`, and the path it sets for it.
SHELL = 'dpscope() { printf "%s\\0" "PYTHONPATH=$PYTHONPATH" "$@"; }\n'


def specs_of(workload="tiny", *, methods=METHODS, sizes=((4, 32),), instruments=("time",), **settings):
    config = PRESETS[workload] if isinstance(workload, str) else workload
    return [
        RunSpec(workload=config, method=method, batch_size=batch, seq_len=length, instrument=instrument, **settings)
        for (batch, length), method, instrument in product(sizes, methods, instruments)
    ]


def results_of(specs, status="ok"):
    return [result_for(spec.to_dict(), status=status, reason=None if status == "ok" else status) for spec in specs]


@pytest.fixture
def plan(monkeypatch, tmp_path):
    """From a printed command to the specs that it would measure, in a folder that is no folder of the workload."""
    planned: list[RunSpec] = []
    for name in COMMANDS:
        __import__(f"dpscope.commands.{name}")
        keep = lambda _, specs, **options: planned.extend(specs) or sys.exit(0)  # noqa: E731
        monkeypatch.setattr(f"dpscope.commands.{name}.follow_sweep", keep)
    monkeypatch.setattr("dpscope.runner.planning.resolve_device", str)  # a GPU's page may be read without one
    monkeypatch.setattr("dpscope.runner.measurements.nsys.require_nsys", lambda spec: None)
    monkeypatch.chdir(tmp_path)

    def read(command: str) -> list[RunSpec]:
        home = {"HOME": os.environ["HOME"]} if "HOME" in os.environ else {}
        words = subprocess.run(["bash", "-c", SHELL + command], capture_output=True, check=True, env=home).stdout
        path, *arguments = words.decode().split("\0")[:-1]
        folders = path.removeprefix("PYTHONPATH=").split(os.pathsep)
        monkeypatch.setattr(sys, "path", [*map(os.path.abspath, filter(None, folders)), *sys.path])  # as Python does
        planned.clear()
        outcome = CliRunner().invoke(main, arguments, catch_exceptions=False)
        assert outcome.exit_code == 0, outcome.output
        return list(planned)

    return read


@pytest.fixture
def config_json(tmp_path):
    settings = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 99}
    path = tmp_path / "config.json"
    extra = {"id2label": {"0": "it's", "1": 'a "b"'}, "rope_scaling": {"a": [1, None, 0.1]}, "hidden_act": "a//b $HOME"}
    named = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    path.write_text(json.dumps({**named, **settings, **extra}))
    return path


@pytest.fixture
def folder_of_mine(tmp_path):
    """A package and a file of the user's own, below a name that a shell would take apart."""
    folder = tmp_path / "it's a $folder; with `quotes\" & more"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "__init__.py").write_text("")
    for file in (folder / "mine.py", folder / "package" / "models.py"):
        file.write_text(WORKLOAD)
    return folder


GRID = tuple(product((2, 4), (16, 32)))
SCATTERED = ((8, 256), (16, 256), (16, 64), (1, 512))  # as a product: nine more, 16 × 512 among them

OPTIONS = {
    "trace": {"modules": True},
    "memory": {"memory_viz": True},
    "ncu": {"per_kernel": True, "kernel": "g|m 'x"},
    "nsys": {"trace": "cuda", "autograd": True},
}
SWEEPS = {
    "one row": lambda: results_of(specs_of(methods=("flash",))),
    "a grid": lambda: results_of(specs_of(sizes=GRID)),
    "sizes that are no product": lambda: results_of(specs_of(sizes=SCATTERED)),
    "some sizes seen by some": lambda: [
        *results_of(specs_of(sizes=SCATTERED)),
        *results_of(specs_of(sizes=SCATTERED[:1], instruments=("memory", "trace"))),
        *results_of(specs_of(sizes=SCATTERED[1:3], instruments=("memory",), methods=("flat", "ghost"))),
    ],
    "images": lambda: results_of(specs_of("resnet-tiny", sizes=((2, None), (4, None)))),
    "images and sequences": lambda: results_of([*specs_of("cnn", sizes=((2, None),)), *specs_of(sizes=((2, 16),))]),
    "a gpu": lambda: results_of(specs_of("1b", sizes=((8, 1024), (1, 16384)), device="cuda", dtype="tf32")),
    "settings with many digits": lambda: results_of(
        specs_of(learning_rate=1.23456789e-05, noise_multiplier=0.1 + 0.2, max_grad_norm=1e7 + 1, seed=2**62, warmup=7)
    ),
    "several settings": lambda: results_of(
        [
            *specs_of(sizes=SCATTERED, optimizer="sgd"),
            *specs_of(sizes=GRID, dtype="bf16", steps=3),
            *specs_of("small", sizes=((2, 8),), methods=("flash", "standard")),
        ]
    ),
    "steps differ by size": lambda: results_of([*specs_of(sizes=GRID, steps=3), *specs_of(sizes=SCATTERED, steps=5)]),
    "timed with several numbers of steps": lambda: results_of([*specs_of(steps=3), *specs_of(steps=5)]),
    "never timed": lambda: results_of(specs_of(instruments=("memory", "ncu"))),
    "looked at with options": lambda: results_of(
        [
            *specs_of(sizes=SCATTERED, device="cuda"),
            *specs_of(device="cuda", instruments=("trace",), options={"schedule": "periodic", "trace_steps": 4}),
            *(
                spec
                for instrument, options in OPTIONS.items()
                for spec in specs_of(device="cuda", sizes=SCATTERED[:1], instruments=(instrument,), options=options)
            ),
        ]
    ),
    "lora": lambda: results_of(
        specs_of(with_lora(make_config("hf:llama-tiny"), parse_lora("r=4,alpha=5,target=q_proj,v_proj")))
    ),
}


def missing_of(results):
    """(spec without instrument and options, instrument): a dumb count of what nobody looked at."""
    return {
        (as_key(result.spec), instrument)
        for result in results
        for instrument in INSTRUMENTS
        if instrument not in {r.instrument for r in results if as_row(r.spec) == as_row(result.spec)}
        and not (INSTRUMENTS[instrument].gpu_only and result.spec["device"] == "cpu")
    }


def as_key(spec):
    return json.dumps({name: value for name, value in spec.items() if name not in ("instrument", "options")})


def as_row(spec):
    return json.dumps({n: v for n, v in spec.items() if n not in ("instrument", "options", "warmup", "steps")})


def commands_of(results):
    gaps = find_missing(Report.of(results)).gaps
    return [command for gap in gaps for command in gap.commands]


@pytest.mark.parametrize("kind", [*SWEEPS, *PRESETS])
def test_printed_commands_measure_exactly_what_is_missing(kind, plan):
    lengths = ((3, None),) if kind in PRESETS and PRESETS[kind].resolve_seq_len(None) is None else ((3, 64),)
    results = SWEEPS[kind]() if kind in SWEEPS else results_of(specs_of(kind, sizes=lengths))
    assert_measures_what_is_missing(results, plan)


def assert_measures_what_is_missing(results, plan):
    there = {(as_key(result.spec), result.instrument) for result in results}
    shown = [with_paths_from(Path.cwd(), result) for result in results]
    planned = [spec.to_dict() for command in commands_of(shown) for spec in plan(command)]
    new = {(as_key(spec), spec["instrument"]) for spec in planned} - there  # --resume keeps the rest
    wanted = missing_of(results)
    rows = {(as_row(json.loads(key)), instrument) for key, instrument in wanted}
    assert {(as_row(json.loads(key)), instrument) for key, instrument in new} == rows
    assert new <= wanted
    assert wanted, "a sweep that every instrument saw is no test"


def test_sizes_that_are_missing_are_not_multiplied(plan):
    results = results_of(specs_of(sizes=SCATTERED, methods=("standard",)))
    commands = [command for command in commands_of(results) if "--instruments memory" in command]
    planned = [plan(command) for command in commands]
    assert sorted((spec.batch_size, spec.seq_len) for specs in planned for spec in specs) == sorted(SCATTERED)
    assert len(commands) < len(SCATTERED), "sizes that are a product share a command"


def test_what_was_looked_at_with_options_is_looked_at_likewise_elsewhere(plan):
    planned = [spec for command in commands_of(SWEEPS["looked at with options"]()) for spec in plan(command)]
    options = {spec.instrument: dict(spec.options) for spec in planned if (spec.batch_size, spec.seq_len) == (1, 512)}
    assert options.pop("time", {}) == {}
    assert options == OPTIONS


def test_nothing_that_needs_a_gpu_is_asked_of_a_cpu():
    here, there = (commands_of(results_of(specs_of(device=device))) for device in ("cpu", "cuda"))
    assert not any("nsys" in command for command in here)
    assert any("nsys" in command for command in there)


@pytest.mark.parametrize("status", [OOM, FAILED, SKIPPED])
def test_a_row_that_cannot_be_trained_is_measured_by_no_other_instrument(status, plan):
    bad = specs_of(methods=("ghost",))
    commands = commands_of([*results_of(specs_of(methods=("standard", "flat"))), *results_of(bad, status)])
    assert commands
    assert {spec.method for command in commands for spec in plan(command)} == {"standard", "flat"}


def test_a_row_that_an_instrument_failed_at_is_still_timed_and_weighed():
    failed = results_of(specs_of(instruments=("ncu",)), FAILED)
    commands = commands_of([*results_of(specs_of(instruments=("time",))), *failed])
    assert any("memory" in command for command in commands)
    assert not any("ncu" in command for command in commands)


def test_a_configuration_of_hugging_face_is_printed_whole(config_json, plan):
    config = config_from_file(config_json)
    assert_measures_what_is_missing(results_of(specs_of(config)), plan)
    config_json.unlink()
    bert = make_config("hf:bert", num_layers=2, num_classes=5)
    assert_measures_what_is_missing(results_of(specs_of(bert)), plan)
    assert_measures_what_is_missing(results_of(specs_of(make_config("hf:gpt2", hidden_dim=96))), plan)


@pytest.mark.parametrize("place", ["mine.py:build", "package.models:build"])
@pytest.mark.parametrize("lora", [None, "r=2,target=q"])
@pytest.mark.parametrize("page", [".", "it's there/too", "mine/package/sweep"])
def test_a_workload_of_the_users_own_is_found_again_from_the_pages_folder(
    place, lora, page, folder_of_mine, plan, monkeypatch
):
    with monkeypatch.context() as here:
        here.chdir(folder_of_mine)
        config = workload_at(place) if lora is None else with_lora(workload_at(place), parse_lora(lora))
    folder = folder_of_mine.parent / page.replace("mine", folder_of_mine.name)
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(folder)
    assert_measures_what_is_missing(results_of(specs_of(config, sizes=((2, None), (2, 8), (4, 8)))), plan)


@pytest.mark.parametrize("place", ["mine.py:build", "package.models:build"])
def test_a_workload_in_ones_home_is_found_again_from_outside_of_it(place, folder_of_mine, plan, monkeypatch, tmp_path):
    with monkeypatch.context() as here:
        here.chdir(folder_of_mine)
        results = results_of(specs_of(workload_at(place)))
    monkeypatch.setenv("HOME", str(folder_of_mine))
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path / "scratch")
    assert_measures_what_is_missing(results, plan)
    shown = [with_paths_from(Path.cwd(), result) for result in results]
    assert not any(folder_of_mine.name in c for c in commands_of(shown))


def test_a_method_of_another_package_is_named(plan, monkeypatch):
    from dpscope.vocabulary import methods as registry

    own = registry.Method("mine-2", "package:Trainer", "from package")
    monkeypatch.setattr(registry, "methods", lambda: {**{m.name: m for m in registry.BUILT_IN}, own.name: own})
    assert_measures_what_is_missing(results_of(specs_of(methods=("standard", "mine-2"))), plan)


MADE_IN_PYTHON = {
    "a size": TransformerConfig(name="mine", vocab_size=9, hidden_dim=8, num_layers=1, num_heads=1, max_seq_len=64),
    "an architecture": HuggingFaceConfig(
        name="mine", model_type="gpt2", architecture="GPT2LMHeadModel", settings={"n_embd": 8, "n_head": 1}
    ),
    "adapters": replace(
        make_config("tiny"), name="tiny+lora-r2", lora=replace(parse_lora("r=2,target=q"), target=("q,v",))
    ),
}


@pytest.mark.parametrize("kind", MADE_IN_PYTHON)
def test_no_command_is_printed_for_what_cannot_be_typed_but_the_gap_is_told(kind):
    gaps = find_missing(Report.of(results_of(specs_of(MADE_IN_PYTHON[kind])))).gaps
    assert [gap.commands for gap in gaps] == [[]] * len(gaps)
    assert all(gap.untyped == "batch 4, sequence 32" for gap in gaps)


@pytest.mark.parametrize("spec", [{"method": "a,b"}, {"workload": {"kind": "x", "name": "$(rm -rf ~)"}}])
def test_nothing_is_printed_for_a_result_that_no_command_made(spec):
    described = {**specs_of()[0].to_dict(), **spec}
    assert command_lines([described]) == []


def test_a_command_names_all_that_a_spec_holds():
    for preset in PRESETS.values():
        if isinstance(preset, HuggingFaceConfig):
            assert set(preset.settings) - set(OUR_SIZES) <= {"tie_word_embeddings"}, preset.name
    listed = {"workload", "method", "batch_size", "seq_len", "instrument", "options"}
    assert set(specs_of()[0].to_dict()) == {*FLAGS, *listed} - set(LATER_DEFAULTS)


@pytest.mark.parametrize(
    ("sizes", "count"),
    [(GRID, 1), (SCATTERED, 3), ([(2, None), (4, None)], 1), ([(2, None), (2, 8)], 2), ([], 0)],
)
def test_products_hold_every_size_once_and_no_other(sizes, count):
    made = products(sizes)
    held = [size for batches, lengths in made for size in product(batches, lengths)]
    assert set(held) == set(sizes)
    assert len(held) == len(sizes)
    assert len(made) == count


def test_a_printed_command_really_fills_the_gap(tmp_path, tiny_flags, monkeypatch):
    """Typed in the folder of the page, whose name a shell would take apart."""
    folder = tmp_path / "a sweep's $folder"
    rows = ["--batch-size", "2", "--methods", "flash", "--instruments", "time"]
    assert rows_here.run("compare", *tiny_flags, *rows, "--out", folder).exit_code == 0
    command = next(c for c in commands_of(Comparison.read(folder).results) if "--instruments trace" in c)
    as_bash_reads_it = f"dpscope() {{ printf '%s\\0' \"$@\"; }}; {command}"
    printed = subprocess.run(["bash", "-c", as_bash_reads_it], cwd=folder, check=True, capture_output=True, text=True)
    monkeypatch.chdir(folder)
    assert rows_here.run(*printed.stdout.split("\0")[:-1]).exit_code == 0
    results = Comparison.read(folder).results
    assert sorted((r.experiment, r.instrument, r.status) for r in results) == [
        ("flash", instrument, "ok") for instrument in ("time", "trace")
    ]
    assert not any("--instruments trace" in command for command in commands_of(results))
