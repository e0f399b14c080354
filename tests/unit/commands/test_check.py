"""`dpscope check` finds an exact method exact, and a faulty one not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from dpscope.cli import main
from dpscope.runner import exactness
from dpscope.trainers import registry
from dpscope.trainers.standard import StandardTrainer

SMALL = ["--num-layers", "1", "--hidden-dim", "16", "--num-heads", "2", "--vocab-size", "50", "--max-seq-len", "32"]


def run(*arguments: str):
    return CliRunner().invoke(main, ["check", "--device", "cpu", *arguments])


def test_every_private_method_is_exact_on_the_transformer():
    result = run(*SMALL, "--seq-len", "12")
    assert result.exit_code == 0, result.output
    for method in ("flat", "ghost", "flash"):
        assert f"{method}: exact; largest relative error" in result.output
    assert "2 of 4 samples are clipped" in result.output


def test_a_lone_sample_is_clipped_too():
    result = run(*SMALL, "--seq-len", "12", "--methods", "flash", "--batch-size", "1")
    assert result.exit_code == 0, result.output
    assert "1 of 1 samples are clipped" in result.output


def test_exact_without_clipping_is_no_answer():
    result = run(*SMALL, "--seq-len", "12", "--methods", "flash", "--max-grad-norm", "1e6")
    assert result.exit_code == 1, result.output
    assert "clipping was not exercised: give --max-grad-norm" in result.output


@pytest.mark.parametrize(("norms", "clipped"), [([1.0, 3.0], 1), ([1.0, 2.0, 4.0], 1), ([2.0, 2.00001], 2), ([2.0], 1)])
def test_the_default_clip_norm_is_exceeded_by_some_and_by_all_only_where_norms_are_equal(norms, clipped):
    oracle = SimpleNamespace(norms=torch.tensor(norms))
    assert int((oracle.norms > exactness.telling_clip_norm(oracle)).sum()) == clipped


def test_paths_are_shown_for_flash():
    result = run("--model", "cnn", "--image-size", "8", "--methods", "flash", "--paths")
    assert result.exit_code == 0, result.output
    assert "rank-1" in result.output and "one position a sample" in result.output


class Unclipped(StandardTrainer):
    """What a method does that forgets to clip."""


class WithoutBias(StandardTrainer):
    """What a method does that is exact where nobody clips, but forgets a bias."""

    def update(self):
        self.model.head.weight.grad = None
        super().update()


@pytest.mark.parametrize(
    ("trainer", "options", "word"),
    [
        (Unclipped, [], "NOT EXACT"),
        (Unclipped, ["--max-grad-norm", "1e6"], ": exact"),
        (WithoutBias, ["--max-grad-norm", "1e6"], "NOT EXACT"),
    ],
)
def test_a_planted_fault_is_found(monkeypatch, trainer, options, word):
    faulty = registry.Method("faulty", f"{__name__}:{trainer.__name__}", "a fault")
    monkeypatch.setattr(registry, "BUILT_IN", (*registry.BUILT_IN, faulty))
    registry.methods.cache_clear()
    try:
        result = run(*SMALL, "--seq-len", "12", "--methods", "faulty", *options)
    finally:
        registry.methods.cache_clear()
    assert word in result.output, result.output
    assert result.exit_code == 1  # also where nothing was clipped


def test_nan_is_never_exact():
    torch.manual_seed(0)
    result = exactness.Exactness("m", {"a": 0.0, "b": float("nan")}, torch.ones(1), 1, None)
    assert not result.exact
    assert result.worst[0] == "b"
