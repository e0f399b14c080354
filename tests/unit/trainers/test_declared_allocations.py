"""What methods hold in local variables only is told by the functions that make it; losing one word of it shows."""

from __future__ import annotations

from functools import cache

import pytest

import dpscope.flash.layers  # noqa: F401  (every file that declares something is loaded)
from dpscope.flash.gradients.paths import KEEP
from dpscope.flash.kernels import scaled_sum
from dpscope.flash.update.optimizer import FusedUpdate
from dpscope.instruments.memory import attribute
from dpscope.vocabulary import phases
from dpscope.vocabulary.phases import allocates, component_of
from dpscope.workloads.configs import make_config
from tests.unit.instruments.memory.steps import WORKLOADS, tracked_step, trainer_of

BATCH = 3
# Widths that no 16-byte word divides: on Hopper their sums are made of padded copies.
ODD = make_config("tiny", num_layers=1, hidden_dim=91, num_heads=1, vocab_size=64, max_seq_len=16)
# method, what is trained, changes to its spec, whether the update is fused
STEPS = {
    "fused transformer": ("flash", "transformer", {}, True),
    "fused cnn": ("flash", "cnn", {}, True),
    "fused, odd widths": ("flash", "transformer", {"workload": ODD, "dtype": "bf16", "seq_len": 16}, True),
    "transformer": ("flash", "transformer", {}, False),
    "flat": ("flat", "transformer", {}, False),
    "ghost": ("ghost", "transformer", {}, False),
    "ghost cnn": ("ghost", "cnn", {}, False),
}


@cache
def measured(name):
    """One step of SGD, really run and tracked."""
    method, kind, changes, fused = STEPS[name]
    with pytest.MonkeyPatch.context() as patch:
        if fused:
            patch.setattr(FusedUpdate, "is_worthwhile", staticmethod(lambda optimizer: True))
        if "odd" in name:
            patch.setattr(scaled_sum, "multiplies_halves", lambda device: True)
        trainer, batch = trainer_of(method, kind, optimizer="sgd", **changes)
        return trainer, tracked_step(trainer, batch).record


def largest(name):
    """The most that each component takes in the step, in bytes."""
    use = attribute(measured(name)[1])
    return dict(zip(use.components, map(max, zip(*use.points, strict=True)), strict=True))


def elements(trainer):
    """(those that come to the update as clipped sums, those whose per-sample gradients are kept for it)"""
    sizes = {name: p.numel() for name, p in trainer.plain_model.named_parameters()}
    kept = {row.parameter for row in trainer.engine.explain() if KEEP in (row.path, row.kind) or row.kind == "kept"}
    return sum(n for name, n in sizes.items() if name not in kept), sum(sizes[name] for name in kept)


@pytest.mark.parametrize("name", ["fused transformer", "fused cnn"])
def test_clipped_sums_of_a_fused_step_are_gradients_to_the_byte(name):
    """A gigabyte of sums is handed to the fused update at once: here that is all of them, in float32."""
    trainer, _ = measured(name)
    summed, kept = elements(trainer)
    assert summed > kept > 0
    assert largest(name)["gradients"] == 4 * summed
    assert largest(name)["per_sample_gradients"] == 4 * BATCH * kept


def test_without_a_fused_update_the_whole_gradient_is_there():
    trainer, _ = measured("transformer")
    assert largest("transformer")["gradients"] == 4 * sum(elements(trainer))


def test_a_sum_that_is_cut_out_of_a_padded_one_is_a_gradient_too():
    """All sums are live at once; before the lookups', which take less, a padded one of (91, 96) is."""
    summed, _ = elements(measured("fused, odd widths")[0])
    assert 0 < largest("fused, odd widths")["gradients"] - 4 * summed <= 4 * 91 * 96


# What a dry run on fake tensors allocates in place of a kernel is declared, too, and so is what kernels of a GPU fill
# with a convolution's products or an RMSNorm's sums, or what is summed of patches on other devices: no step here does
# any of it.
ELSEWHERE = {"_like_launched", "conv_products", "conv_norms", "_sum", "_sum_of_patches", "_in_one_launch"}
DECLARED = {key: value for key, value in phases._components.items() if key[0].co_name not in ELSEWHERE}


@pytest.mark.parametrize(("code", "operator"), DECLARED, ids=lambda part: getattr(part, "co_name", part))
def test_without_any_one_declaration_a_component_has_another_size(monkeypatch, code, operator):
    told = {name: largest(name) for name in STEPS}
    monkeypatch.delitem(phases._components, (code, operator))
    assert {name: largest(name) for name in STEPS} != told


def test_a_function_is_known_by_itself_and_not_by_its_name():
    @allocates("gradients", "aten::mv", "aten::mm")
    def make():
        return None

    renamed, make_again = make, lambda: None
    make_again.__name__ = "make"
    assert component_of(renamed.__code__, "aten::mv") == component_of(renamed.__code__, "aten::mm") == "gradients"
    assert component_of(renamed.__code__, "aten::add") is None
    assert component_of(make_again.__code__, "aten::mv") is None
    assert component_of(None, "aten::mv") is None
    for operator in ("aten::mv", "aten::mm"):
        del phases._components[make.__code__, operator]


def test_workloads_are_of_the_batch_size_that_is_reckoned_with():
    assert {workload["batch_size"] for workload in WORKLOADS.values()} == {BATCH}
