"""The cost model: pure decisions from shapes, and what room in memory changes of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpscope.flash.gradients import paths
from dpscope.flash.gradients.memory_budget import MemoryBudget
from dpscope.flash.gradients.paths import DIRECT, GRAM, KEEP, RANK1, SHARING, Decision, PathRules, Product, Unfolded
from dpscope.flash.gradients.paths import choose_path as choose

SIZES = st.integers(1, 5000)


def choose_path(*shape: int, **options) -> Decision:
    """Choose the path of a product, given what describes it and what is asked."""
    asked = {name: options.pop(name) for name in ("forced", "room") if name in options}
    return choose(Product(*shape, **options), **asked)


def test_one_sample_keeps_its_gradient():
    assert choose_path(1, 16384, 2048, 8192, itemsize=2).path == KEEP


def test_one_position_is_rank_one():
    assert choose_path(8, 1, 64, 64).path == RANK1


def test_short_sequences_of_wide_layers_take_the_gram_path():
    decision = choose_path(16, 256, 2048, 8192, itemsize=2)
    assert decision.path == GRAM
    assert "more memory" in decision.reason


def test_long_sequences_of_narrow_layers_are_kept():
    assert choose_path(4, 16384, 64, 64, itemsize=2).path == KEEP


@given(
    batch=SIZES,
    length=SIZES,
    d=SIZES,
    p=SIZES,
    itemsize=st.sampled_from([2, 4, 8]),
    rounding=st.sampled_from([0.0, 2.0**-11, 2.0**-8]),
    fits=st.booleans(),
    width_freed=st.none() | SIZES,
)
def test_the_cheapest_path_is_taken_that_is_exact_and_has_room(
    batch, length, d, p, itemsize, rounding, fits, width_freed
):
    rounding = rounding if itemsize == 4 else 0.0
    decision = choose_path(
        batch,
        length,
        d,
        p,
        itemsize=itemsize,
        rounding=rounding,
        room="more" if fits else "freed",
        width_freed=width_freed,
    )
    costs = decision.costs
    if batch > 1 and length > 1:
        has_room = fits or batch * d * p <= batch * length * max(width_freed or p, d // SHARING)
        allowed = [DIRECT] + [GRAM] * (rounding < 2.0**-8) + [KEEP] * has_room
        assert decision.path in allowed
        assert costs[decision.path].seconds == min(costs[name].seconds for name in allowed)


@given(batch=st.integers(2, 5000), length=st.integers(2, 5000), d=SIZES, p=SIZES, itemsize=st.sampled_from([2, 4]))
def test_in_a_block_that_runs_again_nothing_is_kept(batch, length, d, p, itemsize):
    """Products for the norm are thrown away: they are worth no more than those of the direct path."""
    decision = choose_path(batch, length, d, p, itemsize=itemsize, room="none")
    assert decision.path == min((GRAM, DIRECT), key=lambda name: decision.costs[name].seconds)
    assert "runs again" in decision.reason


# The parts that were run on an H200 (2026-11-15), 20 layers of width 2048: keeping costs less than Gram norms from 1024
# positions on, and more at 512 and below.
@pytest.mark.parametrize(("batch", "length", "path"), [(2, 4096, KEEP), (4, 2048, KEEP), (8, 1024, KEEP)])
@pytest.mark.parametrize("p", [2048, 8192])
def test_long_samples_are_kept_where_there_is_room(batch, length, path, p):
    assert choose_path(batch, length, 2048, p, itemsize=2, room="more").path == path


@pytest.mark.parametrize(("batch", "length"), [(16, 512), (24, 384), (16, 256), (32, 256), (8, 256), (64, 64)])
@pytest.mark.parametrize("p", [2048, 8192])
def test_short_samples_are_not_kept_whatever_the_room(batch, length, p):
    assert choose_path(batch, length, 2048, p, itemsize=2, room="more").path == GRAM


def test_what_is_kept_takes_the_place_of_the_output_gradient_and_of_nothing_else():
    """q, k and v read the same x: what one of them keeps does not free it."""
    assert choose_path(8, 1024, 2048, 2048, itemsize=2).path == GRAM
    assert choose_path(8, 2048, 2048, 2048, itemsize=2).path == KEEP
    assert choose_path(8, 2048, 2048, 8192, itemsize=2, width_freed=2048).path == GRAM  # the output gradient is "x"


def test_float32_is_kept_sooner_and_tf32_is_normed_by_the_operands_it_holds():
    """Gram norms in float32 take three products on tensor cores, those of operands that TF32 holds take one."""
    assert choose_path(8, 256, 2048, 2048, itemsize=4, room="more").path == GRAM
    assert choose_path(8, 1024, 2048, 2048, itemsize=4, room="more").path == KEEP
    assert choose_path(8, 1024, 2048, 2048, itemsize=4, rounding=2.0**-11, room="more").path == KEEP
    without_room = choose_path(8, 256, 2048, 2048, itemsize=4, rounding=2.0**-11)
    assert without_room.path == GRAM
    assert "TF32" in without_room.reason
    assert choose_path(8, 256, 64, 64, itemsize=4, rounding=2.0**-11, forced=GRAM).path == GRAM
    assert choose_path(8, 1, 64, 64, itemsize=4, rounding=2.0**-11).path == RANK1
    assert choose_path(8, 1, 64, 64, itemsize=4, rounding=2.0**-8).path != RANK1  # bfloat16: 2⁻⁷ of a share is too much


@pytest.mark.parametrize(
    "otherwise", [{"rounding": 2.0**-8}, {"unfolded": Unfolded(64, True, False)}, {"room": "none"}], ids=str
)
@pytest.mark.parametrize("forced", [None, GRAM])
def test_rounded_products_are_not_normed_by_operands_that_their_sum_is_not_made_of(otherwise, forced):
    """bfloat16's rounding, patches that are unfolded again, blocks that run again."""
    decision = choose_path(8, 256, 2048, 2048, **{"itemsize": 4, "rounding": 2.0**-11, "forced": forced, **otherwise})
    assert decision.path == DIRECT


class Room(MemoryBudget):
    def __init__(self, room: float) -> None:
        super().__init__(None, ())
        self.has, self.asked = room, []

    def fits(self, more: float) -> bool:
        self.asked.append(more)
        return more <= self.has


def test_rules_ask_for_room_only_where_it_would_change_the_path():
    """Asking takes microseconds a layer. Asked for: kept gradients, and a float32 gradient of x beside them."""
    g = torch.empty(8, 1024, 8192, dtype=torch.bfloat16, device="meta")
    more = 2 * 8 * 2048 * 8192 + 4 * 8 * 1024 * 2048
    for room, path in ((more, KEEP), (more - 1, GRAM)):
        budget = Room(room)
        assert PathRules(None, budget).of_product((8, 1024, 2048), g).path == path
        assert budget.asked == [more]
    for batch, length, forced in ((16, 256, None), (1, 4096, None), (8, 1024, "gram"), (8, 1024, "keep")):
        budget = Room(0)
        PathRules(forced, budget).of_product((batch, length, 2048), g)
        PathRules(forced, budget).of_product((batch, length, 64), g, p=64)
        assert budget.asked == []


def test_float16_gradients_are_stored_in_float32(monkeypatch):
    """Else the batch would decide whether a gradient above 65504 overflows."""
    budget = Room(0)
    g = torch.empty(4, 8192, 256, dtype=torch.float16, device="meta")
    decision = PathRules(None, budget).of_product(g.shape, g)
    assert decision.costs[KEEP].bytes_held == 4 * 4 * 256 * 256


def test_the_users_setting_decides_at_each_product(monkeypatch):
    g = torch.empty(8, 256, 2048, device="meta")
    taken = []
    for rounding in (0.0, 2.0**-8, 0.0):
        monkeypatch.setattr(paths, "operand_rounding", lambda device, rounding=rounding: rounding)
        taken.append(PathRules().of_product(g.shape, g).path)
    assert taken == [GRAM, DIRECT, GRAM]


@pytest.mark.parametrize("path", [GRAM, DIRECT, KEEP])
def test_a_forced_path_is_taken_whatever_it_costs(path):
    assert choose_path(1, 1, 3, 5, forced=path).path == path


def test_an_unknown_path_is_refused_by_name():
    with pytest.raises(ValueError, match="'fast' is not one of gram, direct, keep"):
        choose_path(2, 2, 2, 2, forced="fast")


def test_operation_counts_follow_the_mathematics():
    costs = choose_path(2, 3, 5, 7).costs
    gemm = 2 * 2 * 3 * 5 * 7
    assert costs[KEEP].operations == gemm
    assert costs[DIRECT].operations == 2 * gemm
    assert costs[GRAM].operations == gemm + 2 * 3**2 * (5 + 7)


def test_where_the_gradient_is_sharded_that_of_a_lone_sample_is_kept_only_if_it_takes_less_than_x_and_g() -> None:
    """One sample of 64 positions: its gradient is much larger than what it is made of."""
    assert choose_path(1, 64, 1024, 1024).path == KEEP
    short, long = (
        choose_path(1, length, 1024, 1024, itemsize=2, stored_itemsize=4, reduced=True) for length in (64, 4096)
    )
    assert short.path != KEEP
    assert long.path == KEEP
    rules = PathRules(reduced=True)
    assert rules.of_product((1, 64, 1024), torch.empty(1, 64, 1024)).path != KEEP
    assert rules.of_lookup(1, 64).path != KEEP


def test_where_norms_come_with_the_product_keeping_takes_one_read_less():
    alone, normed = (choose_path(8, 1024, 2048, 2048, itemsize=2, normed=normed).costs for normed in (False, True))
    assert alone[KEEP].bytes_moved - normed[KEEP].bytes_moved == alone[KEEP].bytes_held
    assert alone[GRAM] == normed[GRAM]


def test_in_float32_room_is_left_for_what_attention_makes_and_with_tf32_for_copies(monkeypatch):
    """Gram norms of TF32's products take copies of x and g: of the largest product that had no room so far."""
    wide, narrow = (torch.empty(8, 1024, p, device="meta") for p in (8192, 2048))
    kept, beside = 4 * 8 * 2048 * 2048, 4 * 4 * 8 * 1024 * 2048
    copies = 4 * 8 * 1024 * (2048 + 8192)
    for rounding, more in ((0.0, kept + beside), (2.0**-11, kept + beside + copies)):
        monkeypatch.setattr(paths, "operand_rounding", lambda device, rounding=rounding: rounding)
        monkeypatch.setattr(paths, "reads_tf32", lambda device: True)
        budget = Room(0)
        rules = PathRules(None, budget)
        for g in (wide, narrow):
            rules.of_product((8, 1024, 2048), g)
        assert budget.asked[-1] == more


def test_small_products_are_not_kept_for_a_launch_of_their_own():
    """On an H200 such a launch takes the host 52 µs; Gram norms of all layers share one."""
    assert choose_path(16, 512, 1024, 1024, itemsize=2, room="more", normed=True).path == GRAM
    assert choose_path(8, 1024, 2048, 2048, itemsize=2, room="more", normed=True).path == KEEP


def test_a_convolution_keeps_products_that_are_cheaper_in_tf32():
    """28² positions, 3×3 of 128 channels: exact products take longer than the Gram matrices of stored patches."""
    exact, rounded = (
        choose_path(64, 784, 1152, 128, unfolded=Unfolded(100352, True, in_tf32), room="more").costs
        for in_tf32 in (False, True)
    )
    assert rounded[KEEP].seconds < exact[KEEP].seconds
    assert all(rounded[path] == exact[path] for path in (GRAM, DIRECT))


@pytest.mark.parametrize(("d", "p"), [(4096, 16), (16, 4096)])
def test_adapters_keep_their_gradients_also_where_layers_share_an_x(d, p):
    """Products for norms alone would be made layer by layer, in launches that take longer than they do."""
    product = Product(4, 1024, d, p, itemsize=2, width_freed=p, normed=True)
    assert choose(product).path == KEEP
    assert choose(product, "none").path != KEEP
