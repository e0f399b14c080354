"""Convolutions, normalised weights and recurrent layers on a GPU, where cuDNN rounds operands by default."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpscope.flash import FlashEngine, run_oracle
from dpscope.flash.layers.row_derivatives import Verdict

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"


class StandardisedConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.flatten(1)
        flat = (flat - flat.mean(1, keepdim=True)) / (flat.std(1, keepdim=True) + 1e-5)
        return F.conv2d(x, flat.view_as(self.weight), self.bias, self.stride, self.padding)


class Recurrent(nn.Module):
    def __init__(self, cls: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = cls(24, 32, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.rnn(x)[0]
        return y


def convolutions(conv: type[nn.Conv2d]) -> nn.Module:
    """Kernels of 3 and 1, strides, 49 and 196 positions, groups and a depthwise layer."""
    return nn.Sequential(
        conv(3, 16, 3, 1, 1), nn.GroupNorm(4, 16), nn.ReLU(), conv(16, 32, 1), conv(32, 32, 3, 2, 1), nn.Tanh(),
        nn.Conv2d(32, 32, 3, 1, 1, groups=32), nn.Conv2d(32, 16, 3, 1, 1, groups=4), conv(16, 8, 1, 2),
    )  # fmt: skip


def equal_layers() -> nn.Module:
    """Layers of equal shapes, which share launches."""
    layers = (nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1), nn.GELU(), nn.Conv2d(16, 16, 1)) for _ in range(3))
    return nn.Sequential(nn.Conv2d(3, 16, 3), *layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (lambda: convolutions(nn.Conv2d), (6, 3, 14, 14)),
    "equal": (equal_layers, (6, 3, 14, 14)),
    "standardised": (lambda: convolutions(StandardisedConv), (6, 3, 14, 14)),
    "lstm": (lambda: Recurrent(nn.LSTM), (6, 40, 24)),
    "gru": (lambda: Recurrent(nn.GRU), (6, 40, 24)),
}


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).tanh().flatten(1).sum(1)


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    return make().to(DEVICE), torch.randn(shape, device=DEVICE)


def errors(model: nn.Module, x: Tensor, c: float, path: str | None, layout: torch.memory_format) -> list[float]:
    """Relative distances of clipped sums from micro-batches of one in float64, parameter by parameter."""
    truth = run_oracle(
        copy.deepcopy(model).double(), x.double(), lambda m, b: losses(m, b).sum(), max_grad_norm=c
    ).clipped_sums
    if x.dim() == 4:
        x = x.to(memory_format=layout)
    with FlashEngine(model, max_grad_norm=c, path=path, loss_reduction="sum") as engine:
        losses(model, x).sum().backward()
        engine.finish()
    return [
        float((p.grad.double() - truth[name].to(DEVICE)).norm() / truth[name].norm())
        for name, p in model.named_parameters()
    ]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("path", [None, "gram", "direct", "keep"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_float32_agrees_with_micro_batches_of_one(
    name: str, path: str | None, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert max(errors(*made(name), 0.5, path, layout)) < 2e-5


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("path", [None, "gram", "direct", "keep"])
def test_shares_are_bounded_where_cudnn_rounds(name: str, path: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal samples, all clipped: their sum is B times one share. Positions that round alike would add up."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    model, x = made(name)
    x, c = x[:1].expand_as(x).contiguous(), 1e-3
    with FlashEngine(model, max_grad_norm=c, path=path, loss_reduction="sum") as engine:
        losses(model, x).sum().backward()
        engine.finish()
    total = float(sum(p.grad.double().square().sum() for p in model.parameters()) ** 0.5)
    assert total == pytest.approx(len(x) * c, rel=1e-3)
    assert not torch.backends.cuda.matmul.allow_tf32
    model.zero_grad()
    assert max(errors(*made(name), 0.5, path, torch.contiguous_format)) < 2e-2


def test_more_groups_in_a_batch_than_a_launch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = nn.Sequential(nn.Conv2d(1, 32, 1), nn.GroupNorm(32, 32)).to(DEVICE)
    x = torch.randn(2100, 1, 2, 3, device=DEVICE)
    losses(model, x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with FlashEngine(model, max_grad_norm=1e9, loss_reduction="sum") as engine:
        losses(model, x).sum().backward()
        engine.finish()
    for p, want in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, want, rtol=1e-3, atol=1e-2)


def test_a_verdict_of_the_device_comes() -> None:
    for answer in (True, False):
        verdict = Verdict(torch.tensor([answer], device=DEVICE))
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        assert verdict.has_come()
        assert verdict.is_no() is not answer
