"""The engine knows which rows of a layer's input are samples: it is exact, or refuses by name, whatever the sizes."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash import FlashEngine, run_oracle
from tests.unit.flash.agreement import assert_exact, assert_next_step_is_exact, private_step
from tests.unit.flash.flash_models import sine_losses
from tests.unit.flash.sample_models import B, Counting, D, T, assert_refused


def ids(batch: int = B, length: int = T) -> Tensor:
    return torch.stack([torch.randperm(9)[:length] for _ in range(batch)])


# -- positions and tables in place of samples ------------------------------------------------------------------------


class Tokens(nn.Module):
    """Tokens and positions; `how` the ids of positions are given."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.tokens, self.positions, self.head = nn.Embedding(9, D), nn.Embedding(16, D), nn.Linear(D, 3)
        self.how = how

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.shape
        at = torch.arange(length)
        if self.how == "one row":
            at = at.unsqueeze(0)
        if self.how in ("a row each", "first row"):
            at = at.expand(batch, -1)
        where = self.positions(at)
        if self.how == "first row":
            where = where[0]
        return self.head(self.tokens(ids) + where).mean(1)


@pytest.mark.parametrize("how", ["one row", "a row each"])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5])
def test_positions_with_a_row_for_all_or_for_each_sample_are_exact(how, batch):
    assert_exact(Tokens(how), {"x": ids(batch)}, sine_losses)


@pytest.mark.parametrize("how", ["bare", "first row"])
def test_positions_that_number_as_many_as_samples_are_exact(how):
    assert_exact(Tokens(how), {"x": ids()}, sine_losses)


class RelativeBias(nn.Module):
    """As T5's: a table looked up with (T, T) distances, added to every sample's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.bias, self.value = nn.Embedding(9, D), nn.Embedding(2 * T, 1), nn.Linear(D, D)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        at = torch.arange(ids.shape[1])
        scores = x @ x.transpose(1, 2) + self.bias(at[:, None] - at + T).permute(2, 0, 1)
        return (scores.softmax(-1) @ self.value(x)).mean(1)


def test_a_relative_position_bias_is_exact():
    assert_exact(RelativeBias(), {"x": ids()}, sine_losses)


class TimeMajor(nn.Module):
    def __init__(self, *, attend: bool) -> None:
        super().__init__()
        self.first, self.second, self.attend = nn.Linear(D, D), nn.Linear(D, 3), attend

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.transpose(0, 1)).tanh()
        if self.attend:
            x = (x.transpose(0, 1) @ x.permute(1, 2, 0)).softmax(-1) @ x.transpose(0, 1)
            x = x.transpose(0, 1)
        return self.second(x).mean(0)


@pytest.mark.parametrize("attend", [False, True])
def test_a_linear_that_sees_time_first_is_exact(attend):
    assert_exact(TimeMajor(attend=attend), {"x": torch.randn(B, T, D)}, sine_losses)


def test_a_batch_of_one_needs_no_proof():
    assert_exact(Tokens("one row"), {"x": ids(1, 1)}, sine_losses)
    assert_exact(TimeMajor(attend=True), {"x": torch.randn(1, 1, D)}, sine_losses)


class Columns(nn.Module):
    """Categorical columns, each with a table of its own: ids of shape (B,)."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(5, D) for _ in range(columns))
        self.head = nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(sum(table(x[:, i]) for i, table in enumerate(self.tables)).tanh())


@pytest.mark.parametrize("columns", [3, 4])
@pytest.mark.parametrize("form", ["view", "copy", "constant"])
def test_ids_of_a_tables_column_are_samples_though_there_are_as_many_columns(columns, form):
    x = torch.randint(0, 5, (4, columns))
    if form == "constant":
        x[:, 1] = 3
    model = Columns(columns)
    assert_exact(model, {"x": x.float().long() if form == "copy" else x}, sine_losses)


class Mixing(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Linear(D, D), nn.Linear(D, 3), how

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.how == "batch norm":
            x = F.batch_norm(x, None, None, training=True)
        if self.how == "roll":
            x = x.roll(1, 0)
        if self.how == "last sample":
            x = x - x[-1:]
        y = self.second(x)
        return y - y.mean(0) if self.how == "at the end" else y


@pytest.mark.parametrize("how", ["batch norm", "roll", "last sample", "at the end"])
@pytest.mark.parametrize("batch", [2, 3, 8])
def test_samples_that_mix_are_refused(how, batch):
    assert_refused(Mixing(how), torch.randn(batch, D), "mix|first dimension")


# -- inputs with one row for all samples -----------------------------------------------------------------------------


class SharedTable(nn.Module):
    """A network that reads a table, one row of its answer chosen by each sample."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("table", torch.randn(5, D))
        self.mlp = nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "chosen":
            return self.mlp(self.table[None]).view(-1)[x].unsqueeze(1)
        if self.how == "first":
            return self.mlp(self.table[None])[0][x]
        if self.how == "repeated":
            return self.mlp(self.table[None]).repeat(len(x), 1, 1).gather(1, x.view(-1, 1, 1)).squeeze(1)
        if self.how == "returned":
            return self.mlp(self.table[None])
        return self.mlp(self.table[None]) * F.one_hot(x, 5).unsqueeze(2)


@pytest.mark.parametrize("how", ["broadcast", "repeated"])
def test_an_answer_that_is_broadcast_over_samples_is_exact(how):
    assert_exact(SharedTable(how), {"x": torch.tensor([0, 3, 1, 3])}, sine_losses)


@pytest.mark.parametrize("how", ["chosen", "first", "returned"])
def test_an_answer_that_samples_share_in_any_other_way_is_exact_or_refused_by_name(how):
    if how == "returned":
        assert_refused(SharedTable(how), torch.tensor([0, 3, 1, 3]), r"^mlp\.0 .*one row for all 4 samples.*expand")
    else:
        assert_exact(SharedTable(how), {"x": torch.tensor([0, 3, 1, 3])}, sine_losses)


def test_a_row_that_is_looked_at_besides_is_refused_and_not_expanded():
    model = nn.Sequential(nn.Linear(D, 3))
    with FlashEngine(model, max_grad_norm=1.0):
        model(torch.randn(B, D))
        with pytest.raises(UserError, match=r"^0 was called outside"):
            model[0](torch.randn(1, D))


# -- what the values of the first batch keep from sight ----------------------------------------------------------------


class ClosedGate(nn.Module):
    """The mean over the batch comes in through a layer that gives zeros at first."""

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.before, self.gate, self.after = nn.Linear(D, D), gate, nn.Linear(D, 3)
        for parameter in gate.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        opening = self.gate(torch.zeros(len(x), dtype=torch.long) if isinstance(self.gate, nn.Embedding) else x)
        return self.after(h + opening * h.mean(0))


@pytest.mark.parametrize("gate", [nn.Linear(D, 1), nn.Embedding(2, 1), nn.Linear(D, D)])
def test_samples_that_mix_behind_a_gate_that_is_closed_at_first_are_refused(gate):
    assert_refused(ClosedGate(gate), torch.randn(B, D), "samples")


class Cancelling(nn.Module):
    """Sums that are zero but for rounding, and rounding goes by the layout of what a unit gave."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.scale, self.head = Scale(layout), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scale(x - x.mean(1, keepdim=True)).sum(1))


class Scale(nn.Module):
    def __init__(self, layout: str) -> None:
        super().__init__()
        self.scale, self.layout = nn.Parameter(torch.ones(())), layout

    def forward(self, x: Tensor) -> Tensor:
        if self.layout == "transposed":
            return (self.scale * x.mT.contiguous()).mT
        if self.layout == "gaps":
            return (self.scale * torch.stack([x.mT, x.mT], -1))[..., 0].mT
        return (self.scale * x[..., :1]).expand(-1, -1, D)


@pytest.mark.parametrize("layout", ["transposed", "gaps", "expanded"])
def test_samples_whose_sums_are_nothing_but_rounding_are_not_taken_for_mixed(layout):
    for seed in range(8):
        torch.manual_seed(seed)
        with FlashEngine(Cancelling(layout), max_grad_norm=1.0) as engine:
            engine.model(torch.randn(B, 67, D))


class SampleBySample(nn.Module):
    """Takes a list of samples, each (T, d), and gives one row for each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 3)

    def forward(self, samples: list[Tensor]) -> Tensor:
        return torch.stack([self.layer(x).tanh().mean(0) for x in samples])


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 7])
def test_a_list_of_samples_is_not_taken_for_rows_of_the_first_one(batch):
    assert_refused(
        SampleBySample(), [torch.randn(T, D) for _ in range(batch)], "list of samples|rows are not|samples mix"
    )


class PicksPositions(nn.Module):
    """Gives the outputs of some positions alone, (n, 3): no dimension has the size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.arange(x.shape[0] * x.shape[1]) % 3 != 1
        return self.layer(x).flatten(0, 1)[chosen]


def test_an_output_of_some_positions_of_each_sample_is_taken():
    with FlashEngine(PicksPositions(), max_grad_norm=1.0) as engine:
        assert engine.model(torch.randn(5, T, D)).shape[0] % 5


def test_a_buffer_that_counts_calls_is_taken_with_one_sample():
    assert_exact(Counting(of_samples=False), {"x": torch.randn(1, D)}, sine_losses)


def test_a_buffer_made_of_the_only_sample_is_refused_by_name():
    assert_refused(Counting(of_samples=True), torch.randn(1, D), "^calls is a buffer")


def test_a_layer_inside_vmap_over_positions_is_exact():
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(self.layer, in_dims=1, out_dims=1)(x)

    assert_exact(Mapped(), {"x": torch.randn(B, T, D)}, sine_losses)


def test_a_scripted_module_is_refused_by_name():
    with pytest.raises(UserError, match=r"^0 \(.*torch.jit"):
        FlashEngine(nn.Sequential(torch.jit.script(nn.Linear(D, 3))), max_grad_norm=1.0)


class MixedInTraining(nn.Module):
    def forward(self, x):
        return x + x.flip(0) if self.training else x


def test_a_submodule_that_mixes_samples_once_it_trains_is_found_then():
    model = nn.Sequential(nn.Linear(4, 4), MixedInTraining(), nn.Linear(4, 4))
    x = torch.randn(3, 2, 4)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        model[1].eval()
        model(x).sum().backward()
        engine.finish()
        model[1].train()
        with pytest.raises(UserError, match="samples mix"):
            model(x)


class SortsInside(nn.Module):
    """Sorts samples by their size around one module, and puts them back: rows of that module are other samples."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), inner

    def forward(self, x):
        x = self.first(x)
        order = x.flatten(1).norm(dim=1).argsort()
        y = self.inner(x[order])
        return (y[0] if isinstance(y, tuple) else y)[order.argsort()]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize("inner", [Scaled, partial(nn.Linear, 4, 4), partial(nn.LSTM, 4, 4, batch_first=True)])
@pytest.mark.parametrize("batch", [2, 3, 8])
def test_a_model_that_sorts_is_exact_though_the_first_batch_was_sorted(inner, batch):
    def losses(model, x):
        return model(x).sin().flatten(1).sum(1)

    model = SortsInside(inner())
    with FlashEngine(model, max_grad_norm=1.0, loss_reduction="sum") as engine:
        for number in range(3):
            x = torch.randn(batch, 3, 4)
            if not number:
                with torch.no_grad():
                    x = x[model.first(x).flatten(1).norm(dim=1).argsort()]
            truth = run_oracle(model, x, lambda model, x: losses(model, x).sum(), max_grad_norm=1.0)
            model.zero_grad()
            private_step(engine, x, losses)
            for name, total in truth.clipped_sums.items():
                torch.testing.assert_close(model.get_parameter(name).grad, total, rtol=1e-4, atol=1e-5)


def test_a_layer_of_chosen_samples_is_exact_where_only_one_is_chosen():
    """Its one row is not one for all samples. All are chosen in the first batch, so that nothing shows there."""

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(D, D), nn.Linear(D, 3)

        def forward(self, x: Tensor) -> Tensor:
            places = (x[:, 0] > 0).nonzero().flatten()
            return self.head(x.index_put((places,), self.inner(x[places]).tanh()))

    model, losses = Chosen(), lambda model, batch: model(batch["x"]).sin().sum(1)
    x = torch.randn(B, D).abs()
    engine = FlashEngine(model)
    assert_next_step_is_exact(engine, {"x": x}, losses)
    for chosen in (1, 1, 2):
        assert_next_step_is_exact(engine, {"x": torch.where(torch.arange(B)[:, None] < chosen, x, -x)}, losses)
    engine.detach()


def in_groups(layer: nn.Module, x: Tensor, is_in: Tensor) -> Tensor:
    """Put the chosen samples first, and all of them back where they were."""
    chosen, others = is_in.nonzero().flatten(), (~is_in).nonzero().flatten()
    rows = torch.cat([layer(x[chosen]).tanh()[: len(chosen)], x[others]])
    return rows[torch.cat([chosen, others]).argsort()]


CHOOSING = {
    "in groups": in_groups,
    "masked_scatter": lambda layer, x, is_in: x.masked_scatter(is_in[:, None].expand_as(x), layer(x[is_in]).tanh()),
    "one by one": lambda layer, x, is_in: torch.stack(
        [layer(row[None])[0].tanh() if chosen else row for row, chosen in zip(x, is_in, strict=True)]
    ),
    "into places": lambda layer, x, is_in: x.index_put(
        (is_in.nonzero().flatten(),), layer(x[is_in]).tanh()[: int(is_in.sum())]
    ),
}


class ChoosesSamples(nn.Module):
    def __init__(self, choose: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.choose, self.inner, self.head = choose, nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.choose(self.inner, x, x[:, 0] > 0))


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("choose", CHOOSING.values(), ids=CHOOSING)
def test_a_layer_that_is_given_one_chosen_sample_is_exact_in_the_first_batch(choose, place):
    """Its one row is expanded, as one that all samples share, and autograd then gives sample 0 all of the gradient."""
    x = torch.randn(5, D)
    x[:, 0] = torch.where(torch.arange(5) == place, 1.0, -1.0)
    assert_exact(ChoosesSamples(choose), {"x": x}, lambda model, batch: model(batch["x"]).sin().sum(1))


@pytest.mark.parametrize("choose", CHOOSING.values(), ids=CHOOSING)
def test_a_batch_of_which_no_sample_is_chosen_tells_nothing_of_later_ones(choose):
    """An operator of an empty tensor goes with any layout of rows."""
    model, losses = ChoosesSamples(choose), lambda model, batch: model(batch["x"]).sin().sum(1)
    engine = FlashEngine(model)
    for size, chosen in ((6, 6), (6, 0), (4, 1), (5, 2), (4, 1)):
        x = torch.randn(size, D)
        x[:, 0] = torch.where(torch.arange(size) < chosen, 1.0, -1.0)
        assert_next_step_is_exact(engine, {"x": x}, losses)
    engine.detach()
