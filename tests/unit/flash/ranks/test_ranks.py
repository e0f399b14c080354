"""A run on one, two or four ranks is the same run, noise included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dpscope.flash.ranks.ranks import release_weights
from tests.torch_here import takes_compiled, takes_shards
from tests.unit.flash.ranks import cases
from tests.unit.flash.ranks.world import CLIP, ROUNDING, assert_same, trained

pytestmark = pytest.mark.slow

# bfloat16 keeps 8 bits, and kernels for another number of rows round differently.
HALF_ROUNDING = 2e-2


@pytest.mark.parametrize(("size", "case"), [(2, "every_way"), (4, "every_way"), (2, "fused")])
def test_every_way_of_spreading_gives_the_parameters_of_one_process(
    worlds: dict[int, Any], alone: dict[str, Any], size: int, case: str
) -> None:
    """Uneven and empty shares, a step without any sample, SGD with momentum and AdamW."""
    for found in worlds[size]:
        for (_way, optimizer), parameters in found[case].items():
            assert_same(parameters, alone[optimizer])


@takes_compiled
def test_compiled_models_are_trained_as_by_one_process_and_their_layers_stay_in_graphs(
    worlds: dict[int, Any],
) -> None:
    expected = trained("alone", "adamw", cases.COMPILED_STEPS)
    for rank, found in enumerate(worlds[2]):
        for way, (parameters, graphs, breaks) in found["compiled_ways"].items():
            assert_same(parameters, expected)
            assert not breaks
            # DDP's buckets would cut each graph into five.
            assert graphs == ((3, 1)[rank] if "ddp" in way else graphs) > 0


def test_a_world_of_one_rank_gives_the_same_to_the_last_bit(worlds: dict[int, Any], alone: dict[str, Any]) -> None:
    for (_way, optimizer), parameters in worlds[1][0]["every_way"].items():
        assert_same(parameters, alone[optimizer], tolerance=0)


def test_gradients_add_up_over_several_backward_passes(worlds: dict[int, Any]) -> None:
    expected = cases.accumulated("alone")
    for found in worlds[2]:
        for parameters in found["accumulated_ways"].values():
            assert_same(parameters, expected)


def test_a_model_that_cannot_take_an_empty_batch_trains_on_empty_shares(worlds: dict[int, Any]) -> None:
    expected = cases.picky("alone")
    for found in worlds[2]:
        for parameters in found["picky_ways"].values():
            assert_same(parameters, expected)


def test_tied_frozen_opaque_and_checkpointed_parts_are_trained_as_by_one_process(worlds: dict[int, Any]) -> None:
    expected = cases.tied("alone")
    for found in worlds[2]:
        for parameters in found["tied_ways"].values():
            assert_same(parameters, expected)


def test_every_rule_and_every_kind_of_rows_is_that_of_one_process(worlds: dict[int, Any]) -> None:
    expected = {(rule, rows): cases.ruled("alone", rule, **cases.ROWS[rows]) for rule, rows in cases.RULED}
    for found in worlds[2]:
        assert len(found["ruled_ways"]) >= len(expected)
        for (_way, rule, rows), parameters in found["ruled_ways"].items():
            assert_same(parameters, expected[rule, rows])


@takes_shards
def test_blocks_of_a_sharded_model_run_again_with_the_weights_of_all_ranks(worlds: dict[int, Any]) -> None:
    """On a rank without a sample, too, which runs none of them. A block that runs twice is held."""
    for rank, found in enumerate(worlds[2]):
        for policy, ((held, rows), (lean, rows_if_lean)) in found["lean_shards"].items():
            assert_same(lean, held, HALF_ROUNDING if policy else ROUNDING)
            assert (rows, "held" in rows_if_lean, "recomputed" in rows_if_lean) == (set(), True, rank == 0)


@takes_shards
def test_under_a_half_precision_policy_sums_travel_in_float32_and_no_share_is_above_the_bound(
    worlds: dict[int, Any],
) -> None:
    for found in worlds[2]:
        parameters, shares, dtypes = found["half_precision"]
        assert dtypes == {torch.float32}
        assert (shares <= CLIP * (1 + 1e-3)).all()
        assert_same(parameters, worlds[1][0]["half_precision"][0], HALF_ROUNDING)


@pytest.mark.parametrize("way", ["ddp", pytest.param("fsdp", marks=takes_shards)])
def test_one_sample_more_on_one_rank_moves_the_sum_over_all_ranks_by_at_most_the_bound(
    worlds: dict[int, Any], way: str
) -> None:
    """Gradients are a hundred times too large, so that a share that is not clipped would show."""
    found = worlds[4][0]["neighbours"]
    everyone = found[way, None]
    for left_out in (21, 32):
        less = found[way, left_out]
        distance = sum((everyone[name] - less[name]).double().square().sum() for name in everyone).sqrt()
        assert CLIP * 0.9 < distance <= CLIP * (1 + 1e-3)


def test_a_model_that_was_not_sharded_needs_no_resharding() -> None:
    release_weights(torch.nn.Linear(2, 2))
