"""The largest tensors at the peak: each with its shape, what it is for, and the line of code that made it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

from dpscope.flash import FlashEngine
from dpscope.instruments.memory import attribute, track
from dpscope.vocabulary.phases import phase
from tests.unit.instruments.memory.steps import METHODS, tracked_step, trainer_of

KB = 1024


def line_of(function, text):
    """`test_code_lines.py:NN function` of the line of a function that holds the text."""
    lines, first = inspect.getsourcelines(function)
    number = next(first + place for place, line in enumerate(lines) if text in line)
    return f":{number} {function.__name__}"


def largest(step, *, model=None, limit=30):
    use = attribute(track(step, device="cpu", model=model or nn.Identity(), holdings=list))
    return use, use.tensors_at_peak(limit)


def test_the_largest_comes_first_with_shape_dtype_operator_and_line():
    def step():
        small = torch.zeros(8, 16)
        large = torch.ones(64, 16, dtype=torch.float64)
        return small, large

    use, tensors = largest(step)
    first, second = tensors["largest"]
    assert (first["bytes"], first["shape"], first["dtype"]) == (8 * KB, [64, 16], "float64")
    assert (first["operator"], first["by_autograd"]) == ("aten::ones", False)
    assert first["line"].endswith("test_code_lines.py" + line_of(step, "torch.ones"))
    assert second["line"].endswith(line_of(step, "torch.zeros"))
    assert use.peak_bytes == sum(each["bytes"] * each["count"] for each in tensors["largest"])


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        x = self.inner(x)
        return x.exp().sin()


def test_what_a_backward_pass_makes_has_the_line_of_the_forward_pass():
    model, x = Square(), torch.ones(32, 16)

    def step():
        model(x).sum().backward()

    record = track(step, device="cpu", model=model, holdings=list)
    births = {life.birth.operator: life.birth for life in record.lives if life.birth.by_autograd}
    exponential = next(birth for name, birth in births.items() if name == "aten::mul")
    assert str(exponential.line).endswith(line_of(Square.forward, "x.exp()"))
    product = births["aten::mm"]  # the gradient of the weight
    assert str(product.line).endswith(line_of(Square.forward, "self.inner(x)"))
    assert all(
        birth.line is not None for name, birth in births.items() if name in ("aten::mm", "aten::mul", "aten::cos")
    )


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_python_that_runs_in_a_backward_pass_is_the_line_itself():
    x = torch.ones(32, 16, requires_grad=True)
    record = track(lambda: Doubled.apply(x).sum().backward(), device="cpu", model=nn.Identity(), holdings=list)
    lines = [str(life.birth.line) for life in record.lives if not life.birth.by_autograd and life.birth.line]
    assert any(line.endswith(line_of(Doubled.backward, "gradient * 2")) for line in lines)


def lines_of_layers(engine_of, *, autocast=False):
    """The lines that asked for what a forward, a backward and a closing make, by kind, with or without an engine."""
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(8, 3, 16)
    engine = engine_of(model)

    def step():
        with phase("forward"), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x)
        with phase("backward"):
            y.float().sum().backward()
        if engine is not None:
            with phase("clip"):
                engine.finish()

    for _ in range(2):
        step()
        model.zero_grad()
    if engine is not None:
        engine.verification.schedule.pause()  # the third has no checks
    record = track(step, device="cpu", model=model, holdings=list)
    lines = {}
    for life in record.lives:
        if life.birth.operator and life.birth.line is not None:
            lines.setdefault(life.birth.phase, set()).add(str(life.birth.line))
    return lines


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.inner = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        x = self.inner(x) * self.scale
        x = self.norm(x)
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("autocast", [False, True])
def test_what_taps_make_in_place_of_layers_has_the_line_that_calls_the_layer(autocast):
    standard = lines_of_layers(lambda model: None, autocast=autocast)
    flash = lines_of_layers(lambda model: FlashEngine(model, max_grad_norm=1.0), autocast=autocast)
    assert flash["forward"] == standard["forward"]
    assert any("/flash/" in line for line in flash["backward"])  # what it does there, nobody's forward has asked for
    assert all("/flash/" in line for line in flash["clip"])


def test_alike_tensors_of_several_layers_are_one_entry_with_their_number():
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
    x, kept = torch.ones(64, 16), []

    def step():
        kept.append(model(x))

    _, tensors = largest(step, model=model)
    entry = next(each for each in tensors["largest"] if each["operator"] == "aten::mm")
    assert (entry["count"], entry["bytes"], entry["module"]) == (
        2,
        4 * KB,
        "*",
    )  # the first is freed, the loop names one
    assert entry["shape"] == [64, 16]


def test_what_is_not_listed_is_added_up():
    def step():
        return [torch.zeros(count) for count in range(1, 41)]

    use, tensors = largest(step, limit=5)
    assert len(tensors["largest"]) == 5 and tensors["rest"]["count"] == 35
    listed = sum(each["bytes"] * each["count"] for each in tensors["largest"])
    assert listed + tensors["rest"]["bytes"] == use.peak_bytes


@pytest.mark.parametrize("method", METHODS)
def test_every_method_s_tensors_add_up_to_its_peak_and_have_lines(method):
    trainer, batch = trainer_of(method)
    trainer.train_step(batch)
    use = tracked_step(trainer, batch)
    tensors = use.tensors_at_peak(10)
    listed = sum(each["bytes"] * each["count"] for each in tensors["largest"])
    assert listed + tensors["rest"]["bytes"] == use.peak_bytes
    made = [each for each in tensors["largest"] if each["operator"]]
    assert made and all(each["line"] for each in made)
    assert not any(str(Path.home()) in each["line"] or each["line"].startswith("/") for each in made)
    sizes = [each["bytes"] for each in tensors["largest"]]
    assert sizes == sorted(sizes, reverse=True)
