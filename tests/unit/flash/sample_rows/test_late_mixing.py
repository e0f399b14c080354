"""Samples that mix though a first batch does not show it, or through what is kept from step to step, are refused."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from torch import nn

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from dpscope.flash.sample_rows.tried_call import RANDOM
from tests.unit.flash.agreement import assert_exact, private_step
from tests.unit.flash.sample_rows.verified_models import losses, rows


class SortsByLength(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x[x.abs().sum(-1).argsort()])


def test_a_model_that_sorts_its_samples_is_refused_though_the_first_batch_is_sorted():
    x = torch.randn(6, 6)
    x = x[x.abs().sum(-1).argsort()]
    with FlashEngine(SortsByLength(), max_grad_norm=1.0) as engine, pytest.raises(UserError, match="samples mix"):
        private_step(engine, {"x": x}, losses)


class MixesSometimes(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.layer, self.draw = nn.Linear(6, 3), draw

    def forward(self, x):
        if self.draw():
            x = 0.7 * x + 0.3 * x.roll(1, 0)
        return self.layer(x)


@pytest.mark.parametrize("draw", [lambda: torch.rand(()) < 0.5, lambda: random.random() < 0.5])
def test_mixing_with_a_probability_of_one_half_is_found_in_the_first_step(draw):
    """Twelve draws: it passes with probability 2⁻¹²."""
    for seed in range(8):
        torch.manual_seed(seed)
        random.seed(seed)
        RANDOM.seed(seed)
        refused = pytest.raises(UserError, match="samples mix")
        with FlashEngine(MixesSometimes(draw), max_grad_norm=1.0) as engine, refused:
            private_step(engine, rows(8), losses)


def test_mixing_that_is_rare_is_found_within_some_steps():
    """One pass in ten: each later check makes four draws."""
    torch.manual_seed(0)
    RANDOM.seed(0)
    model = MixesSometimes(lambda: torch.rand(()) < 0.1)
    with FlashEngine(model, max_grad_norm=1.0) as engine, pytest.raises(UserError, match="samples mix"):
        for _ in range(2**9):
            private_step(engine, rows(8), losses)


def test_mixing_that_begins_late_is_found_within_twice_the_steps():
    model = MixesSometimes(lambda: False)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for _ in range(5):
            private_step(engine, rows(8), losses)
        model.draw = lambda: True
        with pytest.raises(UserError, match="samples mix"):
            for _ in range(5):
                private_step(engine, rows(8), losses)


def test_a_check_that_falls_on_an_empty_batch_is_made_in_the_next_pass(monkeypatch):
    monkeypatch.setattr("dpscope.flash.sample_rows.schedule.RANDOM_SHARE", 0)
    model = MixesSometimes(lambda: False)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for size in (1, 1, 1, 1, 1, 1, 1, 0, 1):  # passes 2 and 8 are checked, the second with the self-test
            private_step(engine, rows(size), losses)
        assert engine.verification.schedule.looks == [2, 9]


def test_an_adjacency_that_is_diagonal_at_first_is_refused():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x, adjacency):
            return adjacency @ self.layer(x)

    model = Graph()
    with FlashEngine(model, max_grad_norm=1.0), pytest.raises(UserError, match="mix"):
        model(torch.randn(5, 6), torch.eye(5))


def test_a_callable_argument_that_starts_to_mix_is_refused():
    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x, change):
            return self.layer(change(x))

    model = Called()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        model(torch.randn(5, 6), lambda x: x).sum().backward()
        engine.finish()
        with pytest.raises(UserError, match="mix"):
            model(torch.randn(5, 6), lambda x: x - x.mean(0))


def test_a_way_of_calling_whose_verification_fails_is_refused():
    class Once(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x, numbers=None):
            return self.layer(x) * (1.0 if numbers is None else next(numbers))

    model = Once()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        model(torch.randn(4, 6)).sum().backward()
        engine.finish()
        with pytest.raises(UserError, match="could not be run again"):
            # The verification use the numbers up: the last one is the real forward's.
            model(torch.randn(4, 6), numbers=_Numbers())


class _Numbers:
    """An iterator that fails the first two times."""

    def __init__(self):
        self.asked = 0

    def __deepcopy__(self, memo):
        return self

    def __copy__(self):
        return self

    def __next__(self):
        self.asked += 1
        if self.asked <= 2:
            raise RuntimeError("not yet")
        return 1.0


class Switched(nn.Module):
    """Mixes where something that it holds says so."""

    def __init__(self, where):
        super().__init__()
        self.layer, self.where = nn.Linear(6, 3), where
        self.mixing, self.options, self.settings = False, {"mixing": False}, type("Settings", (), {})()
        self.settings.mixing = False

    def switch(self, on):
        {"attribute": self, "object": self.settings}.get(self.where, self).mixing = on
        self.options["mixing"] = on

    def forward(self, x):
        flags = {"attribute": self.mixing, "dict": self.options["mixing"], "object": self.settings.mixing}
        return self.layer(x.cumsum(0) if flags[self.where] else x)


@pytest.mark.parametrize("where", ["attribute", "dict", "object"])
def test_an_option_that_switches_mixing_on_is_seen_in_the_step_where_it_changes(where):
    """The third pass is none at which the model would be looked at."""
    model = Switched(where)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for _ in range(2):
            private_step(engine, rows(), losses)
        model.switch(True)
        with pytest.raises(UserError, match="samples mix"):
            private_step(engine, rows(), losses)


def test_a_counter_of_the_models_own_costs_no_look():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.calls = nn.Linear(6, 3), 0

        def forward(self, x):
            self.calls += 1
            return self.layer(x)

    model = Counts()
    calls: list[int] = []
    model.layer.register_forward_hook(lambda *_: calls.append(1))
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        private_step(engine, rows(), losses)
        calls.clear()
        for _ in range(2, 8):
            private_step(engine, rows(), losses)
    assert len(calls) < 6 + 8  # passes 3, 5, 6 and 7 are not looked at, nor is 4, of a small batch


def test_an_option_that_changes_in_every_step_is_not_watched_for_ever():
    model = Switched("attribute")
    calls: list[int] = []
    model.layer.register_forward_hook(lambda *_: calls.append(1))
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for step in range(6):
            model.settings.mixing = step  # read by nobody here
            private_step(engine, rows(), losses)
        calls.clear()
        model.settings.mixing = 7
        private_step(engine, rows(), losses)
    assert len(calls) == 1


def test_samples_that_are_all_the_same_show_nothing_of_mixing():
    model = MixesSometimes(lambda: True)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for _ in range(2):
            private_step(engine, {"x": torch.zeros(4, 6)}, losses)  # and stay so when one of them is made louder
        with pytest.raises(UserError, match="samples mix"):
            private_step(engine, rows(), losses)


EFFECTS = {
    "each sample depends on those before it": lambda x: x.cumsum(0),
    "each sample depends on those after it": lambda x: x.flip(0).cumsum(0).flip(0),
    "the samples are in reverse order": lambda x: x.flip(0),
}


@pytest.mark.parametrize("batch", [4, 7, 19])
@pytest.mark.parametrize("effect", EFFECTS)
def test_mixing_by_place_is_found_at_the_next_look(effect, batch):
    switch = []

    class Mixes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(EFFECTS[effect](x) if switch else x)

    for seed in range(8):
        RANDOM.seed(seed)
        switch.clear()
        with FlashEngine(Mixes(), max_grad_norm=1.0) as engine:
            private_step(engine, rows(batch), losses)
            switch.append(1)
            with pytest.raises(UserError, match="samples mix"):
                private_step(engine, rows(batch), losses)


@pytest.mark.parametrize("batch", [2, 4, 9])
def test_a_model_that_divides_by_the_number_of_samples_is_refused(batch):
    class Divides(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.layer(x) / len(x))

    with (
        FlashEngine(Divides(), max_grad_norm=1.0) as engine,
        pytest.raises(UserError, match="depends on how many samples"),
    ):
        private_step(engine, rows(batch), losses)


@pytest.mark.parametrize("probability", [0.25, 0.5])
def test_mixing_with_a_probability_passes_the_first_batch_as_often_as_is_said(probability):
    """docs/guarantees.md: unseen with a probability of at most (1 - p)^5."""
    trials, unseen = 60, 0
    for seed in range(trials):
        torch.manual_seed(seed)
        with FlashEngine(MixesSometimes(lambda: bool(torch.rand(()) < probability)), max_grad_norm=1.0) as engine:
            try:
                private_step(engine, rows(), losses)
                unseen += 1
            except UserError:
                pass
    expected = trials * (1 - probability) ** 5
    assert unseen <= expected + 4 * expected**0.5  # four standard deviations


def test_two_forward_passes_of_other_data_before_a_backward_are_told(recwarn):
    model = nn.Linear(6, 3)
    x = rows()["x"]
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        (model(x) + model(x.clone())).sum().backward()
        engine.finish()
        assert not [each for each in recwarn if "called again before a backward pass" in str(each.message)]
        engine.zero_grad()
        with pytest.warns(UserWarning, match="called again before a backward pass, with other data"):
            (model(x) + model(x + 1)).sum().backward()


# -- what is kept from step to step


class Remembers(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.layer, self.where = nn.Linear(6, 3), where
        self.last, self.items, self.table = None, [], {}

    def forward(self, x):
        before = {"attribute": self.last, "list": self.items[-1] if self.items else None, "dict": self.table.get("x")}[
            self.where
        ]
        now = x.detach().mean(0)
        self.last = now
        self.items.append(now)
        self.table["x"] = now
        return self.layer(x if before is None else x + before)


@pytest.mark.parametrize("where", ["attribute", "list", "dict"])
@pytest.mark.parametrize("batch", [1, 4])
def test_state_of_samples_that_reaches_the_next_step_is_refused(where, batch):
    refused = pytest.raises(UserError, match=r"from one step to the next \(in .*(last|items|table)")
    with FlashEngine(Remembers(where), max_grad_norm=1.0) as engine, refused:
        private_step(engine, rows(batch), losses)


def test_what_is_kept_and_never_read_is_no_matter():
    class Notes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = nn.Linear(6, 3), []

        def forward(self, x):
            self.last = self.layer(x).detach()
            self.seen.append(float(x.detach().mean()))
            return self.layer(x)

    assert_exact(Notes(), rows(), losses)


def test_a_mean_that_is_carried_is_found_though_all_samples_are_looked_at():
    """With a second argument of as many entries, all samples are: in another order they have the same mean."""

    class Carries(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.mean = nn.Linear(6, 3), []

        def forward(self, x, table):
            before = self.mean[-1] if self.mean else 0.0
            self.mean.append(x.detach().mean(0))
            return self.layer(x + before) * table.sum()

    model = Carries()
    with FlashEngine(model, max_grad_norm=1.0), pytest.raises(UserError, match="from one step to the next"):
        model(torch.randn(4, 6), torch.randn(2, 4))


@pytest.mark.parametrize(("kept", "share"), [(torch.sign, 1.0), (torch.clone, 1e-10)], ids=["signs", "little"])
def test_state_is_found_that_depends_on_signs_or_moves_the_next_step_by_little(kept, share):
    class Carries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(4, 4), torch.zeros(4)

        def forward(self, x):
            y = self.inner(x + share * self.last.to(x))
            self.last = kept(x.detach()).mean((0, 1))
            return y

    model = Carries().double()
    x = torch.rand(2, 3, 4, dtype=torch.float64)  # of one sign
    with FlashEngine(model, max_grad_norm=1.0), pytest.raises(UserError, match=r"from one step to the next \(in last"):
        model(x).sum().backward()


class MixesIf(nn.Module):
    """Divides by something of all samples, without a gradient, under a condition on its input and its first layer."""

    def __init__(self, condition):
        super().__init__()
        self.first, self.last, self.condition = nn.Linear(6, 6), nn.Linear(6, 3), condition

    def forward(self, x):
        h = self.first(x)
        return self.last(h / h.detach().std() if self.condition(x, h) else h).flatten(1)


@pytest.mark.parametrize("condition", [lambda x, h: torch.is_grad_enabled(), lambda x, h: h.requires_grad])
def test_a_model_that_mixes_only_with_gradients_is_refused(condition):
    with FlashEngine(MixesIf(condition), max_grad_norm=1.0) as engine, pytest.raises(UserError, match="samples mix"):
        private_step(engine, rows(), losses)


def test_a_model_that_mixes_once_a_layer_is_frozen_is_refused():
    model = MixesIf(lambda x, h: not h.requires_grad)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for _ in range(2):  # the third pass is not looked at otherwise
            private_step(engine, rows(), losses)
        model.first.requires_grad_(False)
        with pytest.raises(UserError, match="samples mix"):
            private_step(engine, rows(), losses)


@pytest.mark.parametrize("mixing", [False, True])
def test_a_model_that_mixes_if_its_input_requires_a_gradient_is_refused(mixing):
    """Each way is verified when it comes, though the other one was."""
    model = MixesIf(lambda x, h: x.requires_grad == mixing)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for _ in range(2):
            private_step(engine, {"x": torch.randn(4, 6).requires_grad_(not mixing)}, losses)
        with pytest.raises(UserError, match="samples mix"):
            private_step(engine, {"x": torch.randn(4, 6).requires_grad_(mixing)}, losses)


@pytest.mark.parametrize(
    ("condition", "first", "second"),
    [
        (lambda x, h: h.shape[1] > 12, (4, 6), (4, 24)),  # positions
        (lambda x, h: h.shape[0] * h.shape[1] > 64, (8, 6), (8, 13)),  # tokens of the whole batch
        (lambda x, h: h.shape[1] > 12, (16, 6), (2, 13)),
    ],
)
def test_a_model_that_mixes_where_tensors_are_larger_is_refused_in_the_first_step_with_one(condition, first, second):
    model = MixesIf(condition)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for _ in range(2):  # the third pass is not looked at otherwise
            private_step(engine, {"x": torch.randn(*first, 6)}, losses)
        with pytest.raises(UserError, match=r"samples mix|how many samples"):
            private_step(engine, {"x": torch.randn(*second, 6)}, losses)


class WritesIntoItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x.mul_(2))


def test_a_model_that_writes_into_an_input_that_requires_a_gradient_is_exact():
    """What another layer gave it, say."""
    scale = torch.ones(6, requires_grad=True)
    assert_exact(
        WritesIntoItsInput(), rows(), lambda model, batch: losses(model, {"x": batch["x"] * scale.to(batch["x"])})
    )


KEPT = []  # (samples, whether something is saved for backward): attributes are put back after verification


class Noting(nn.Module):
    """Notes whether autograd saves what it is given; mixes samples, if there are many, by `share`."""

    def __init__(self, share=0.0, *, own_gradient=False):
        super().__init__()
        self.first, self.last, self.share, self.own_gradient = nn.Linear(6, 6), nn.Linear(6, 3), share, own_gradient

    def forward(self, x):
        h = self.first(x).sin()
        with contextlib.suppress(AttributeError):  # without gradients nothing is saved
            try:
                KEPT.append((len(x), h.grad_fn._saved_self is not None))
            except (TypeError, RuntimeError):
                KEPT.append((len(x), False))
        if self.own_gradient:
            h = torch.func.grad(lambda y: y.sin().sum())(h)
        return self.last(h + self.share * h.mean(0) if len(x) > 16 else h)


def test_the_whole_batch_is_looked_at_without_the_memory_of_a_backward_pass():
    KEPT.clear()
    with FlashEngine(Noting(), max_grad_norm=1.0) as engine:
        private_step(engine, rows(40), losses)
    assert (40, False) in KEPT
    assert KEPT.count((40, True)) == 1  # the step itself


@pytest.mark.parametrize("own_gradient", [False, True])
def test_a_model_that_takes_gradients_itself_is_looked_at_in_the_whole_batch_too(own_gradient):
    assert_exact(Noting(own_gradient=own_gradient), rows(40), losses)
    mixing = Noting(0.1, own_gradient=own_gradient)
    with FlashEngine(mixing, max_grad_norm=1.0) as engine, pytest.raises(UserError, match="how many samples"):
        private_step(engine, rows(40), losses)
