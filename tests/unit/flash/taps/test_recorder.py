"""A call is recorded by the recorder that the engine had in its forward pass, whatever kind of module it is."""

import pytest
import torch
from torch import nn

from dpscope.flash import FlashEngine
from dpscope.flash.taps.recorder import Recorder


class Shift(nn.Module):
    """Uses a parameter of its own, which is followed to the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x + self.shift


class Last(nn.Module):
    """A recurrent layer, which has a rule of its own, or runs sample by sample if it projects."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True, **options)

    def forward(self, x):
        return self.lstm(x)[0]


class Noting(Recorder):
    def __init__(self, engine) -> None:
        super().__init__(engine)
        self.noted = set()

    def add(self, slot, contribution):
        assert self.engine.recorder is self
        self.noted.add(slot.name)
        super().add(slot, contribution)


KINDS = {"family": lambda: nn.Linear(4, 4), "followed": Shift, "rule": Last, "by sample": lambda: Last(proj_size=3)}


@pytest.mark.parametrize("kind", KINDS)
def test_backward_records_with_the_recorder_of_the_forward_pass(kind):
    module, x = KINDS[kind](), torch.randn(3, 2, 4)
    model = nn.Sequential(module, nn.Tanh())
    with FlashEngine(model) as engine:
        usual, recorder = engine.recorder, Noting(engine)
        with recorder.entered():
            output = model(x)
        recorder.noted.clear()  # what was tried out
        assert engine.recorder is usual
        output.square().sum().backward()
        assert engine.recorder is usual
        assert recorder.noted == {name for name, _ in model.named_parameters()}


def test_a_layer_records_only_the_parameters_that_its_recorder_wants():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    with FlashEngine(model) as engine:
        model(x).sum().backward()
        engine.finish()
        engine.zero_grad()
        recorder = Noting(engine)
        recorder.wanted = {engine.slot(model[0].bias)}
        with recorder.entered():
            output = model(x)
        recorder.noted.clear()
        output.sum().backward()
        assert recorder.noted == {"0.bias"}
