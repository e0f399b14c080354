"""explain() names the path that was taken: observed here at the functions that take it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dpscope.flash import FlashEngine
from dpscope.flash.gradients import norms
from dpscope.flash.gradients.contributions import Lookup, Outer
from dpscope.flash.gradients.paths import DIRECT, GRAM, KEEP, RANK1
from dpscope.flash.layers import conv


class Paths:
    """The paths that norms of large parameters take, seen at the functions that compute them."""

    def __init__(self, monkeypatch) -> None:
        self.taken: set[str] = set()
        watched = [
            (norms, "gram_norms_squared", GRAM),
            (conv, "gram_norms_squared", GRAM),
            (conv, "kept_norms_squared", DIRECT),  # of per-sample gradients that are dropped again
            (Outer, "norms_squared", DIRECT),
            (Lookup, "norms_squared", DIRECT),
            (Outer, "rank1_norms_squared", RANK1),
            (norms, "kept_norms_squared", KEEP),
        ]
        for owner, name, path in watched:
            monkeypatch.setattr(owner, name, self._noting(getattr(owner, name), path))

    def _noting(self, function, path):
        def noted(*args, **kwargs):
            self.taken.add(path)
            return function(*args, **kwargs)

        return noted


@pytest.fixture
def paths(monkeypatch):
    return Paths(monkeypatch)


class Uses(nn.Module):
    """One layer without a bias, used several times; each use sees x with as many positions as `lengths` says."""

    def __init__(self, layer: nn.Module, lengths: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.lengths = layer, lengths

    def forward(self, x):
        return sum(self.layer(x[:, : length or None]).flatten(1).sin().sum(1) for length in self.lengths)


def step(engine, x):
    engine.model.zero_grad()
    engine.model(x).mean().backward()
    engine.finish()


def path_of(engine):
    (row,) = engine.explain()
    return row.path


# Costs that make the path depend on the length: short products by Gram matrices, long ones kept.
SHAPES = [((6,), 8), ((40,), 8), ((6, 5), 8), ((20, 30), 8), ((1,), 8), ((1, 2), 8), ((3, 3, 3), 8), ((60, 60), 12)]


@pytest.mark.parametrize(("lengths", "width"), SHAPES)
@pytest.mark.parametrize("room", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_linear_layer_used_any_number_of_times_takes_the_path_it_is_said_to_take(paths, lengths, width, room, batch):
    model = Uses(nn.Linear(width, width, bias=False), lengths)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        engine.path_rules.budget.fits = lambda more: room
        step(engine, torch.randn(batch, 64, width))
        paths.taken.clear()  # those of the self-test, too
        step(engine, torch.randn(batch, 64, width))
        assert {path_of(engine)} == paths.taken


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=3),
    width=st.integers(1, 24),
    out=st.integers(1, 24),
    batch=st.integers(1, 3),
    room=st.booleans(),
)
def test_the_path_said_is_the_path_taken_whatever_the_shapes(lengths, width, out, batch, room):
    with pytest.MonkeyPatch.context() as patch:
        observed = Paths(patch)
        model = Uses(nn.Linear(width, out, bias=False), tuple(lengths))
        with FlashEngine(model, max_grad_norm=1.0) as engine:
            engine.path_rules.budget.fits = lambda more: room
            step(engine, torch.randn(batch, 80, width))
            assert {path_of(engine)} == observed.taken


@pytest.mark.parametrize("path", ["gram", "direct"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_convolution_used_twice_keeps_its_gradients_and_says_so(paths, path, times):
    model = Uses(nn.Conv1d(4, 4, 3, padding=1, bias=False), (0,) * times)
    with FlashEngine(model, max_grad_norm=1.0, path=path) as engine:
        step(engine, torch.randn(3, 4, 32))
        assert {path_of(engine)} == paths.taken == {path if times == 1 else KEEP}


@pytest.mark.parametrize("length", [3, 256, 257])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("path", [None, "direct"])
def test_an_embedding_takes_the_path_it_is_said_to_take(paths, length, times, path):
    model = Uses(nn.Embedding(11, 4), (length,) * times)
    with FlashEngine(model, max_grad_norm=1.0, path=path) as engine:
        step(engine, torch.randint(0, 11, (3, 300)))
        assert {path_of(engine)} == paths.taken


def test_another_precision_of_the_same_shapes_is_decided_anew(paths):
    """Bytes of an element weigh memory against products: at 64 positions of 64 features they change the choice."""
    model = Uses(nn.Linear(64, 64, bias=False), (64,))
    said = set()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        engine.path_rules.budget.fits = lambda more: True
        x = torch.randn(3, 64, 64)
        for dtype in (None, torch.bfloat16, None):
            paths.taken.clear()
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                step(engine, x)
            assert {path_of(engine)} == paths.taken
            said.add(path_of(engine))
    assert len(said) == 2


def test_shapes_are_those_of_the_last_backward_pass():
    model = nn.Linear(4, 2)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for batch in (3, 5, 3):
            step(engine, torch.randn(batch, 6, 4))
            shapes = {row.parameter: row.shapes for row in engine.explain()}
            assert shapes == {"weight": f"x ({batch}, 6, 4), g ({batch}, 6, 2)", "bias": f"({batch}, 2)"}


def test_before_the_closing_no_path_is_claimed_for_what_is_decided_then():
    model = Uses(nn.Linear(4, 4, bias=False), (3, 5))
    with FlashEngine(model, max_grad_norm=1.0, path="gram") as engine:
        model(torch.randn(2, 6, 4)).mean().backward()
        (row,) = engine.explain()
        assert (row.path, "when the micro-batch is closed" in row.why) == ("", True)
        engine.finish()
        (row,) = engine.explain()
        assert (row.path, row.shapes) == (GRAM, "x (2, 8, 4), g (2, 8, 4)")


def test_a_tied_embedding_says_that_it_is_one():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, ids):
            return self.head(self.tokens(ids)).sin().sum((1, 2))

    with FlashEngine(Tied(), max_grad_norm=1.0, path="direct") as engine:
        step(engine, torch.randint(0, 11, (3, 5)))
        (row,) = engine.explain()
    assert (row.kind, row.path) == ("lookup + outer", DIRECT)
    assert "2 uses" in row.why
