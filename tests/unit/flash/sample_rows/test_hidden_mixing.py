"""Samples that mix where it hardly shows: by their place or number, by the longest, in what a forward leaves behind."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from tests.unit.flash.agreement import assert_exact
from tests.unit.flash.agreement import private_step as step

BATCH, LENGTH, WIDTH = 6, 5, 8


class Effect(nn.Module):
    """Two layers, with a function of everything that is given between them."""

    def __init__(self, effect: Any) -> None:
        super().__init__()
        self.first, self.effect, self.last = nn.Linear(WIDTH, WIDTH), effect, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return self.last(self.effect(self.first(x), *others))


def rows(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randn(batch, length, WIDTH)


def losses(model: nn.Module, batch: tuple[Any, ...]) -> Tensor:
    return (3 * model(*batch)).sin().flatten(1).sum(1)


def numbered(h: Tensor) -> Tensor:
    return torch.arange(len(h)).view(-1, 1, 1).to(h)


@pytest.mark.parametrize(
    "effect",
    [
        lambda h: h + 0.1 * numbered(h),
        lambda h: torch.where(numbered(h) % 2 == 0, h, 2 * h),
        lambda h: torch.cat([2 * h[:1], h[1:]]),
        lambda h: torch.cat([h[:-1], 2 * h[-1:]]),
        lambda h: h + torch.ones_like(h).cumsum(0),
        lambda h: nn.functional.dropout(h, 0.1) / len(h),
    ],
)
def test_a_sample_whose_output_depends_on_its_place_or_on_their_number_is_refused(effect):
    model = Effect(effect)
    with FlashEngine(model) as engine, pytest.raises(UserError, match=r"how many samples .* or on its place"):
        step(engine, (rows(),), losses)


# -- sizes that follow the longest sample ------------------------------------------------------------------------------


class ToTheLongest(nn.Module):
    """Cuts samples to the longest of the batch, and reads them from the end, or from the beginning."""

    def __init__(self, backwards: bool) -> None:
        super().__init__()
        self.reads, self.backwards = nn.GRU(WIDTH, WIDTH, batch_first=True), backwards

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = x[:, : int(lengths.max())]
        found = self.reads(x.flip(1))[0].flip(1) if self.backwards else self.reads(x)[0]
        return found * (torch.arange(x.shape[1]) < lengths[:, None]).unsqueeze(-1)


def test_a_model_that_reads_padding_up_to_the_longest_sample_is_refused():
    model = ToTheLongest(backwards=True)
    batch = rows(length=7), torch.tensor([7, 2, 3, 1, 4, 6])
    with FlashEngine(model) as engine, pytest.raises(UserError, match="samples mix"):
        step(engine, batch, losses)


def test_a_model_whose_output_is_as_long_as_the_longest_sample_is_exact():
    assert_exact(ToTheLongest(backwards=False), (rows(length=7), torch.tensor([7, 2, 3, 1, 4, 6])), losses)


# -- arguments that all samples might share ----------------------------------------------------------------------------


def where_any(h: Tensor, padding: Tensor) -> Tensor:
    """Return the mean over positions that any sample has."""
    return h[:, ~padding.all(0)].mean(1)


def only_of_one(batch: int, length: int) -> Tensor:
    """Padding of which each of the first positions is missing in all samples but one."""
    padding = torch.zeros(batch, length, dtype=torch.bool)
    padding[:, :batch] = ~torch.eye(batch, min(batch, length), dtype=torch.bool)
    return padding


def test_a_mask_of_samples_is_not_taken_for_one_that_they_share():
    model = Effect(where_any)
    with FlashEngine(model) as engine, pytest.raises(UserError, match="samples mix"):
        step(engine, (rows(length=BATCH + 1), only_of_one(BATCH, BATCH + 1)), losses)


def test_an_argument_that_was_taken_to_be_shared_may_not_change_from_step_to_step():
    model, mask = Effect(where_any), only_of_one(BATCH, BATCH)
    with FlashEngine(model) as engine:
        for _ in range(2):  # the same mask for all samples, as far as two steps show
            step(engine, (rows(length=BATCH), mask), losses)
            engine.zero_grad()
        with pytest.raises(UserError, match=r"tensor 1 .* changes from step to step"):
            step(engine, (rows(length=BATCH), mask.flip(0)), losses)


def test_a_model_no_argument_of_which_has_a_row_for_each_sample_is_refused():
    model = Effect(lambda h: h.view(4, 3, WIDTH).mean(1))
    with (
        FlashEngine(model, batch_size_of=lambda args, kwargs: 4),
        pytest.raises(UserError, match="no argument of the model has a row for each of its 4 samples"),
    ):
        model(torch.randn(12, WIDTH))


# -- parts that change between steps -----------------------------------------------------------------------------------


class Mixes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def with_forward_hook(model: nn.Sequential) -> None:
    model[1].register_forward_hook(lambda module, args, output: output - output.mean(0))


def with_backward_hook(model: nn.Sequential) -> None:
    model[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] / inputs[0].norm(),))


def with_own_forward(model: nn.Sequential) -> None:
    model[1].forward = lambda x: x - x.mean(0)


def with_another_child(model: nn.Sequential) -> None:
    model[1] = Mixes()


@pytest.mark.parametrize("change", [with_forward_hook, with_backward_hook, with_own_forward, with_another_child])
def test_a_hook_a_forward_or_a_child_that_is_new_is_verified_in_that_step(change):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    with FlashEngine(model) as engine:
        for _ in range(2):
            step(engine, (rows(),), losses)
            engine.zero_grad()
        change(model)
        with pytest.raises(UserError, match=r"mix"):  # pass 3 is no look
            step(engine, (rows(),), losses)


def test_a_layer_that_is_new_is_refused_by_name():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    with FlashEngine(model) as engine:
        step(engine, (rows(),), losses)
        model[2] = nn.Linear(WIDTH, 3)
        with pytest.raises(UserError, match=r"^2\.weight was added after the engine was attached"):
            step(engine, (rows(),), losses)


def test_hooks_of_instruments_cost_no_verification():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    calls: list[int] = []
    with FlashEngine(model) as engine:
        step(engine, (rows(),), losses)
        engine.zero_grad()
        engine.verification.schedule.pause()
        model[1].register_forward_hook(lambda *_: calls.append(1))
        step(engine, (rows(),), losses)
    assert len(calls) == 1


# -- what a forward leaves behind --------------------------------------------------------------------------------------

KEPT: list[Tensor] = []


class LeavesLoss(nn.Module):
    """Leaves the loss of a router somewhere, beside rows."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.gate, self.last, self.where = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH), where
        self.table: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        mean = scores.mean((0, 1))
        if self.where == "list":
            self.losses = [mean.square().sum()]
        elif self.where == "dictionary":
            self.table["loss"] = mean.square().sum()
        elif self.where == "vector":
            self.mean = mean
        else:
            KEPT[:] = [scores if self.where == "rows outside" else mean.square().sum()]
        return self.last(x) * scores[..., :1]

    def loss(self) -> Tensor:
        kept: dict[str, Any] = {
            "list": lambda: self.losses[0],
            "dictionary": lambda: self.table["loss"],
            "vector": lambda: self.mean.square().sum(),
        }
        return kept[self.where]() if self.where in kept else KEPT[0].square().sum()


@pytest.mark.parametrize("where", ["list", "dictionary", "vector", "outside"])
def test_a_loss_that_forward_leaves_anywhere_is_not_trained_on_if_it_mixes_samples(where):
    model = LeavesLoss(where)
    with FlashEngine(model), pytest.raises(UserError, match=r"mixes samples|outside of the model's modules"):
        (model(rows()).sin().sum() + model.loss()).backward()


def test_rows_that_forward_leaves_outside_of_the_model_are_trained_on():
    def with_kept(model: nn.Module, batch: tuple[Any, ...]) -> Tensor:
        return losses(model, batch) + KEPT[0].square().flatten(1).sum(1)

    assert_exact(LeavesLoss("rows outside"), (rows(),), with_kept)


class Counting(nn.Module):
    """Counts in whole numbers, something of the samples or its calls."""

    def __init__(self, of_samples: bool) -> None:
        super().__init__()
        self.layer, self.of_samples = nn.Linear(WIDTH, 3), of_samples
        self.register_buffer("count", torch.zeros(WIDTH, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.count += (x > 0).sum((0, 1)) if self.of_samples else 1
        return self.layer(x)


def test_a_whole_number_that_forward_makes_of_samples_is_no_buffer_to_publish():
    with FlashEngine(Counting(True)) as engine, pytest.raises(UserError, match=r"^count is a buffer that forward comp"):
        step(engine, (rows(),), losses)
    model = Counting(False)
    with FlashEngine(model) as engine:
        step(engine, (rows(),), losses)
    assert model.count.tolist() == [1] * WIDTH


# -- backward ----------------------------------------------------------------------------------------------------------


class ClippedTogether(torch.autograd.Function):
    """Scales gradients down if those of all samples together are large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * min(1.0, float(100 / g.norm()))


def test_a_backward_pass_that_clips_what_is_large_is_refused_though_nothing_is_large_yet():
    model = Effect(ClippedTogether.apply)
    with FlashEngine(model) as engine, pytest.raises(UserError, match="mixes samples in backward"):
        step(engine, (rows(),), losses)


# -- tensors that are not dense ----------------------------------------------------------------------------------------


def test_nested_and_sparse_tensors_are_refused_by_name():
    ragged = [torch.randn(2 + b % 3, WIDTH) for b in range(BATCH)]
    layer = Effect(lambda h: h)
    with FlashEngine(layer), pytest.raises(UserError, match="the model was given a nested tensor"):
        layer(torch.nested.nested_tensor(ragged))
    inside = Effect(lambda h: torch.nested.nested_tensor([row[:3] for row in h.detach()]))
    with FlashEngine(inside), pytest.raises(UserError, match="last was given a nested tensor"):
        inside(rows())

    class OfItsOwn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, 3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(x, self.weight)

    own = OfItsOwn()
    with FlashEngine(own), pytest.raises(UserError, match="with a sparse tensor"):
        own(torch.randn(BATCH, WIDTH).relu().to_sparse())


# -- between steps -----------------------------------------------------------------------------------------------------


def test_samples_that_are_flipped_later_are_found_among_three_at_the_next_look():
    switch = {"on": False}
    model = Effect(lambda h: h.flip(0) if switch["on"] else h)
    with FlashEngine(model) as engine:
        step(engine, (rows(3),), losses)
        engine.zero_grad()
        switch["on"] = True
        with pytest.raises(UserError, match="samples mix"):
            step(engine, (rows(3),), losses)


class Positions(nn.Module):
    """Adds a table of positions that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.layer(x + table[: x.shape[1]])


def test_a_table_that_looks_like_rows_of_samples_is_tried_as_a_table_if_it_cannot_be_cut():
    """Seven samples of six positions, and a table of seven rows and six columns."""
    model, table = Positions(), torch.randn(7, 6)

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return model(x, table.to(x)).sin().flatten(1).sum(1)

    assert_exact(model, torch.randn(7, 6, 6), losses)


# -- little of it ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "share"), [("float32", 1e-5), ("bf16", 1e-3), ("autocast", 1e-3)])
def test_samples_that_mix_by_less_than_rounding_would_hide_are_refused(dtype, share):
    """The model is too large to be asked in float64 without a reason."""
    wide = nn.Sequential(nn.Linear(WIDTH, 600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, WIDTH))
    model = nn.Sequential(Effect(lambda h: h + share * h.roll(1, 0)), wide)
    x = torch.randn(16, WIDTH)
    if dtype == "bf16":
        model, x = model.bfloat16(), x.bfloat16()
    precision = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast")
    with FlashEngine(model), precision, pytest.raises(UserError, match="samples mix"):
        model(x)


def test_rows_that_round_differently_with_the_others_are_not_taken_to_mix():
    """An expert is given the samples that come to it: products of other sizes round in another way."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(64, 2), nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            chosen = self.gate(x).argmax(1)
            y = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                y = y.index_put((torch.where(chosen == number)[0],), expert(x[chosen == number]))
            return y

    assert_exact(Experts(), torch.randn(13, 64), lambda model, x: model(x).sin().sum(1))


def test_a_model_too_large_for_copies_in_float64_is_judged_by_its_own_rounding(monkeypatch):
    monkeypatch.setattr("dpscope.flash.sample_rows.mixing.number_in", lambda *_: 1)  # KiB
    for share, refused in ((1e-6, nullcontext()), (1e-2, pytest.raises(UserError, match="samples mix"))):
        model = Effect(lambda h, share=share: h + share * h.roll(1, 0))
        with FlashEngine(model), refused:
            model(rows(16))


def test_samples_that_mix_in_the_models_own_dtype_alone_are_refused():
    """In float64 the model does something else, so that float64 cannot tell that it was rounding."""
    torch.manual_seed(0)  # the largest is not one, by which nothing would be divided
    model = Effect(lambda h: h / h.detach().abs().max() if h.dtype == torch.bfloat16 else h)
    with FlashEngine(model), torch.autocast("cpu", torch.bfloat16), pytest.raises(UserError, match="samples mix"):
        model(rows(8))


PENALTIES = {"number": lambda w: w.square().sum(), "matrix": lambda w: w @ w.T, "row": lambda w: w[:1]}


@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
def test_a_penalty_on_weights_may_be_returned_beside_the_rows_but_not_trained_on(penalty):
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.last(self.first(x).tanh()), penalty(self.first.weight)

    model, x = Penalised(), torch.randn(BATCH, WIDTH)
    assert_exact(model, x, lambda model, x: model(x)[0].sin().sum(1))
    with FlashEngine(model), pytest.raises(UserError, match="made of parameters alone"):
        sum(output.sum() for output in model(x)).backward()
