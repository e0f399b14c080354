import pytest
import torch
from torch import nn

from dpscope.flash.checkpointing.recomputation import Fingerprint, different, project
from dpscope.flash.gradients.contributions import Kept, Outer
from dpscope.flash.gradients.paths import GRAM, Decision
from dpscope.flash.gradients.slots import Slot

SLOTS = [Slot(name, nn.Parameter(torch.zeros(4, 4)), "layer") for name in ("weight", "bias")]


def left(g, sums, x=1.0):
    """What a layer leaves for its weight and its bias."""
    return {SLOTS[0]: [Outer(torch.full_like(g, x), g, Decision(GRAM, ""))], SLOTS[1]: [Kept(sums)]}


def fingerprint(g, sums):
    return Fingerprint.of(left(g, sums), ())


def differs(before, again, finite=None):
    (found,) = different([before], [project(again)], finite)
    return found


@pytest.fixture
def g():
    return torch.randn(3, 16, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_gradients_do_not_differ_and_rounding_is_no_difference(g, dtype):
    g = g.to(dtype)
    found = fingerprint(g, g.sum(1))
    assert not differs(found, left(g.clone(), g.sum(1)))
    ulps = torch.randint(-1, 2, g.shape, generator=torch.Generator().manual_seed(1))
    rounded = (g.double() * (1 + ulps * torch.finfo(dtype).eps / 2)).to(dtype)
    assert not differs(found, left(rounded, g.sum(1)))


def test_a_small_difference_of_one_sample_is_found_though_no_norm_changes(g):
    found = fingerprint(g, g.sum(1))
    turned = g.clone()
    angle = torch.tensor(1e-3)
    turned[1, :, 0], turned[1, :, 1] = (
        g[1, :, 0] * angle.cos() - g[1, :, 1] * angle.sin(),
        g[1, :, 0] * angle.sin() + g[1, :, 1] * angle.cos(),
    )
    torch.testing.assert_close(turned[1].norm(), g[1].norm(), rtol=1e-6, atol=0)
    assert differs(found, left(turned, g.sum(1)))
    assert not differs(found, left(turned, g.sum(1)), torch.tensor([True, False, True]))


def test_a_layer_that_left_nothing_differs_unless_it_left_zeros(g):
    assert differs(fingerprint(g, g.sum(1)), {SLOTS[0]: [], SLOTS[1]: [Kept(g.sum(1))]})
    zeros = torch.zeros_like(g)
    assert not differs(fingerprint(zeros, g.sum(1)), {SLOTS[0]: [], SLOTS[1]: [Kept(g.sum(1))]})
    assert not differs(fingerprint(zeros, zeros.sum(1)), {SLOTS[0]: [], SLOTS[1]: []})


def test_samples_that_are_not_finite_are_left_out(g):
    g[0, 3, 2] = torch.nan
    assert not differs(fingerprint(g, g.sum(1)), left(g.clone(), g.sum(1)))


def test_blocks_are_told_apart(g):
    found = fingerprint(g, g.sum(1))
    same, other = project(left(g, g.sum(1))), project(left(2 * g, g.sum(1)))
    assert different([found, found, found], [same, other, same], None) == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_input_differs_though_gradients_are_the_same(g, dtype):
    g = g.to(dtype)
    assert differs(fingerprint(g, g.sum(1)), left(g, g.sum(1), x=1.5))


def test_gradients_that_are_a_little_longer_differ_in_bfloat16_too(g):
    """A projection may happen to be small, and moves by as little: the norm does not."""
    g = g.bfloat16()
    assert differs(fingerprint(g, g.sum(1)), left((1.015 * g.float()).bfloat16(), g.sum(1)))
