"""Contributions of one parameter: whatever they are made of, norm and sum are those of their sum."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from dpscope.flash.gradients import contributions as c
from dpscope.flash.gradients.norms import SquaredNorms
from dpscope.flash.gradients.paths import PathRules
from dpscope.flash.gradients.slots import combine, cross_terms
from dpscope.flash.kernels import triton_runtime

ROWS, WIDTH = 7, 4  # of the parameter
CHEAPEST = PathRules()


def make(kind: str, batch: int, length: int, padding: int | None = None, rules: PathRules = CHEAPEST) -> c.Contribution:
    double = torch.float64
    if kind == "kept":
        return c.Kept(torch.randn(batch, ROWS, WIDTH, dtype=double))
    if kind == "outer":
        x, g = torch.randn(batch, length, WIDTH, dtype=double), torch.randn(batch, length, ROWS, dtype=double)
        return c.Outer(x, g, rules.of_product(x.shape, g))
    ids = torch.randint(0, ROWS, (batch, length))
    g = torch.randn(batch, length, WIDTH, dtype=double)
    return c.Lookup(ids, g, ROWS, padding, rules.of_lookup(batch, length))


def dense(part: c.Contribution) -> torch.Tensor:
    """Per-sample gradients, element by element."""
    if isinstance(part, c.Kept):
        return part.values.clone()
    if isinstance(part, c.Outer):
        return torch.einsum("btp,btd->bpd", part.g, part.x)
    table = torch.zeros(part.batch_size, ROWS, WIDTH, dtype=torch.float64)
    for b, ids in enumerate(part.ids.tolist()):
        for t, row in enumerate(ids):
            if row != part.padding_idx:
                table[b, row] += part.g[b, t]
    return table


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    kinds=st.lists(st.sampled_from(["kept", "outer", "lookup"]), min_size=1, max_size=4),
    batch=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 6), min_size=4, max_size=4),
    padding=st.sampled_from([None, 2]),
    path=st.sampled_from([None, "gram", "direct", "keep"]),
    seed=st.integers(0, 1000),
)
def test_norm_and_sum_of_any_mix(kinds, batch, lengths, padding, path, seed):
    torch.manual_seed(seed)
    rules = PathRules(path)
    parts = [make(kind, batch, length, padding, rules) for kind, length in zip(kinds, lengths, strict=False)]
    truth = torch.stack([dense(part) for part in parts]).sum(0)
    scale = torch.rand(batch, dtype=torch.float64)
    norms = SquaredNorms(1, batch, torch.device("cpu"))
    merged = norms.add_part(0, combine(parts, torch.float64, rules))
    torch.testing.assert_close(norms.result()[0], truth.square().sum((1, 2)), rtol=1e-12, atol=1e-12)
    total = merged.clipped_sum(scale, None)
    torch.testing.assert_close(total, torch.einsum("b,bpd->pd", scale, truth), rtol=1e-12, atol=1e-12)


def test_two_uses_of_one_input_add_their_gradients_instead_of_growing():
    outer = make("outer", 2, 3)
    again = c.Outer(outer.x, torch.randn_like(outer.g), outer.decision)
    merged = combine([outer, again], torch.float64, PathRules())
    assert merged.x.shape == outer.x.shape
    torch.testing.assert_close(dense(merged), dense(outer) + dense(again))


def test_the_cross_term_is_taken_in_slices(monkeypatch):
    lookup, outer = make("lookup", 3, 11), make("outer", 3, 5)
    whole = cross_terms(lookup, outer)
    monkeypatch.setattr(triton_runtime, "SCRATCH_BYTES", 1)
    torch.testing.assert_close(cross_terms(lookup, outer), whole)
    torch.testing.assert_close(whole, (dense(lookup) * dense(outer)).sum((1, 2)))


@pytest.mark.parametrize("kind", ["kept", "outer", "lookup"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_sample_with_scale_zero_never_reaches_the_sum(kind, poison):
    part = make(kind, 3, 4)
    clean = dense(part)
    (part.values if kind == "kept" else part.g)[1] = poison
    total = part.clipped_sum(torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64), None)
    torch.testing.assert_close(total, 0.5 * clean[0] + 2.0 * clean[2])


@pytest.mark.parametrize("changed", ["x", "g"])
def test_a_tensor_changed_in_place_before_the_sum_is_an_error(changed):
    part = make("outer", 2, 3)
    part.check_unchanged("weight")
    getattr(part, changed).zero_()
    with pytest.raises(UserError, match=r"weight was changed in place.*copy the batch into fresh tensors"):
        part.check_unchanged("weight")


@pytest.mark.parametrize("shape", [(2, 10**6), (2, 3, 10**5)])
@pytest.mark.parametrize("fill", [0.1, None])
def test_norms_of_long_rows_lose_nothing(shape, fill):
    values = torch.rand(shape) if fill is None else torch.full(shape, fill)
    truth = values.double().flatten(1).square().sum(1)
    torch.testing.assert_close(c.kept_norms_squared([values]), truth, rtol=1e-6, atol=0)


@pytest.mark.parametrize("batch", [1, 3])
def test_kept_gradients_are_added_to_what_is_there(batch):
    values, scale, before = torch.randn(batch, 4, 5), torch.rand(batch), torch.randn(4, 5)
    wanted = before + torch.einsum("b,bij->ij", scale, values)
    torch.testing.assert_close(c.Kept(values.clone()).clipped_sum(scale, before.clone()), wanted)
    torch.testing.assert_close(c.Kept(values.clone()).clipped_sum(scale, None), wanted - before)


# -- tensors that others may write to ----------------------------------------------------------------------------------


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.PReLU(3))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def test_a_batch_in_numpys_memory_may_be_refilled_before_the_step() -> None:
    model, memory = two_layers(), torch.randn(5, 4).numpy()
    x = torch.from_numpy(memory)
    with FlashEngine(model, max_grad_norm=1.0, loss_reduction="sum") as engine:
        loss_of(model, x.clone()).backward()
        engine.finish()
        truth = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        loss_of(model, x).backward()
        memory[:] = 7.0
        engine.finish()
    for parameter, total in zip(model.parameters(), truth, strict=True):
        torch.testing.assert_close(parameter.grad, total)


def test_a_batch_in_torchs_memory_that_is_refilled_before_the_step_is_refused() -> None:
    model, x = two_layers(), torch.randn(5, 4)
    with FlashEngine(model, max_grad_norm=1.0, loss_reduction="sum") as engine:
        loss_of(model, x).backward()
        x.fill_(7.0)
        with pytest.raises(UserError, match=r"0\.weight was changed in place"):
            engine.finish()


def test_gradients_of_a_unit_that_are_changed_in_place_are_refused() -> None:
    gradients = torch.randn(3, 4)
    kept = c.Kept(gradients, owned=False)
    kept.check_unchanged("unit.weight")
    gradients.mul_(2.0)
    with pytest.raises(UserError, match=r"unit\.weight was changed in place"):
        kept.check_unchanged("unit.weight")


# -- hooks on parameters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("late", [False, True])
def test_hooks_on_parameters_are_refused_by_name(kind: str, late: bool) -> None:
    model = two_layers()

    def add_hook() -> None:
        getattr(model[0].weight, kind)(lambda *_: None)

    if not late:
        add_hook()
        with pytest.raises(UserError, match=r"0\.weight has a gradient hook"):
            FlashEngine(model, max_grad_norm=1.0)
        return
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        add_hook()
        loss_of(model, torch.randn(5, 4)).backward()
        with pytest.raises(UserError, match=r"0\.weight has a gradient hook"):
            engine.finish()
