"""scripts/profiling_script.py: a door with old names, which opens on `dpscope trace`."""

from __future__ import annotations

import runpy
import sys

import pytest

from tests import ROOT

SCRIPT = ROOT / "scripts" / "profiling_script.py"


@pytest.fixture
def script(monkeypatch):
    """Run it with some flags; what it asked of dpscope, and its exit code."""
    asked = []

    def run(*flags, cuda=False):
        monkeypatch.setattr("dpscope.cli.main", asked.append)
        monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags])
        monkeypatch.syspath_prepend(SCRIPT.parent)  # as `python SCRIPT` would
        with pytest.raises(SystemExit) as outcome:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return asked, outcome.value.code

    return run


def options(command):
    flags = [word for word in command[1:] if word != "--memory"]
    return dict(zip(flags[::2], flags[1::2], strict=True))


def test_memory_is_recorded_without_asking(script):
    (command,), _ = script("--mode=profile")
    assert "--memory" in command


def test_without_cuda_it_says_so_and_profiles_the_small_model_on_the_cpu(script, capsys):
    (command,), code = script("--mode=profile")
    assert code == 0
    assert command[0] == "trace"
    assert options(command) == {
        "--device": "cpu",
        "--methods": "standard,dpsgd,dpsgd_ghost",
        "--model": "tiny",
        "--batch-size": "2,4",
        "--seq-len": "256,512",
        "--logdir": "runs",
    }
    assert "No CUDA device" in capsys.readouterr().out


def test_with_cuda_it_profiles_the_large_model(script):
    (command,), _ = script(cuda=True)
    found = options(command)
    assert (found["--device"], found["--model"]) == ("cuda", "1b")
    assert (found["--batch-size"], found["--seq-len"]) == ("4,8", "512,1024")


def test_flags_and_environment_shrink_it_and_further_flags_are_dpscopes(script, monkeypatch):
    monkeypatch.setenv("BATCH_SIZES", "1")
    monkeypatch.setenv("TRAINERS", "standard")
    (command,), _ = script("--seq_lens", "16", "--dtype", "bf16")
    found = options(command)
    assert (found["--batch-size"], found["--seq-len"], found["--methods"]) == ("1", "16", "standard")
    assert found["--dtype"] == "bf16"


def test_mode_test_takes_a_step_with_every_trainer(script, capsys):
    asked, code = script("--mode=test")
    assert (asked, code) == ([], 0)
    said = capsys.readouterr().out
    for name in ("StandardTrainer", "DPSGDTrainer", "DPGhostClippingTrainer"):
        assert f"[TEST OK] {name} passed local test." in said
