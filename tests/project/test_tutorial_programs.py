"""Programs to practise on run on a CPU too, their ways do the same work, and commands for a GPU are well formed."""

from __future__ import annotations

import importlib
import json
import runpy
import shlex

import pytest
import torch

from tests import ROOT

PROGRAMS = ROOT / "tutorials" / "programs"
SMALL = {
    "case_1": 64,
    "case_2": 3,
    "case_3": 2,
    "case_4": 2,
    "case_5": 8,
    "case_6": 2,
    "case_7": 8,
    "case_8": 2,
    "case_9": 8,
    "case_10": 2,
    "per_sample_norms": 4,
}
# Where both ways return what they compute. bfloat16 is case 5's point, and it is less exact.
SAME = ["case_1", "case_7", "case_8", "case_9", "case_10", "per_sample_norms"]


@pytest.fixture
def program_named(monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return lambda name: importlib.import_module(name).PROGRAM


def run(name, *arguments, monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAMS))
    monkeypatch.setattr("sys.argv", [name, "--device", "cpu", "--size", str(SMALL[name]), *arguments])
    runpy.run_path(str(PROGRAMS / f"{name}.py"), run_name="__main__")


def gpu_commands():
    lines = (PROGRAMS / "gpu_commands.txt").read_text(encoding="utf-8").splitlines()
    commands = [line.lstrip("&! ") for line in lines if line and not line.startswith("#")]
    return [command.partition(": ")[::2] for command in commands]


@pytest.mark.parametrize("name", SMALL)
def test_a_program_measures_each_of_its_ways_and_keeps_the_figures(name, tmp_path, capsys, monkeypatch, program_named):
    run(name, "--way", "all", "--steps", "2", "--json", str(tmp_path), monkeypatch=monkeypatch)
    ways = program_named(name).ways_on("cpu")
    printed = capsys.readouterr().out
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(f"{name}-{way}" for way in ways)
    for way in ways:
        kept = json.loads((tmp_path / f"{name}-{way}.json").read_text(encoding="utf-8"))
        assert len(kept["step_ms"]) == 2 and min(kept["step_ms"]) <= kept["median_ms"] <= max(kept["step_ms"])
        assert f"{name} {way}: {kept['median_ms']:.3f} ms a step" in printed


@pytest.mark.parametrize("name", SAME)
def test_the_fixed_way_computes_the_same(name, program_named):
    program = program_named(name)
    results = []
    for way in program.ways_on("cpu"):
        torch.manual_seed(0)
        results.append(program.ways[way]("cpu", SMALL[name])().detach().double())
    # The Gram path and fused attention add up other products: both err by a few roundings of float32.
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in SMALL if name.startswith("case_")])
def test_a_case_does_not_tell_what_is_wrong_with_it(name, program_named):
    first = (PROGRAMS / f"{name}.py").read_text(encoding="utf-8").partition("from __future__")[0]
    told = f"{first} {program_named(name).task}".lower()
    for word in ("bound", "pinned memory", "sync", "leak", "slow", "wait for", "problem", "fault"):
        assert word not in told
    assert list(program_named(name).ways) == list("abc")[: len(program_named(name).ways)]


def test_a_way_that_only_a_gpu_shows_is_refused_on_a_cpu_in_a_sentence(monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        run("case_3", "--way", "b", monkeypatch=monkeypatch)
    assert ended.value.code == 2
    assert "it needs --device cuda" in capsys.readouterr().err


def test_a_recorded_step_shows_the_reads_that_would_wait_on_a_gpu(tmp_path, program_named):
    from dpscope.instruments.trace import read_trace, summarise

    program = program_named("case_4")
    path = program.record("a", tmp_path, device="cpu", size=2)
    reads = [found for found in summarise([read_trace(path)])["synchronisations"] if found["operator"] == "aten::item"]
    assert sum(found["count"] for found in reads) == 32  # one for each layer


def test_commands_for_a_gpu_have_names_of_their_own_and_programs_that_are_there():
    commands = gpu_commands()
    names = [name for name, _ in commands]
    assert len(set(names)) == len(names)
    for _, command in commands:
        for word in shlex.split(command):
            if word.startswith("programs/"):
                assert (PROGRAMS.parent / word).is_file(), command
