"""Recurrent layers by their rule: how often a layer runs, and what it holds."""

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpscope.flash import FlashEngine
from dpscope.flash.layers import recurrent
from tests.unit.flash.agreement import assert_exact


class Tagger(nn.Module):
    def __init__(self, cls: type[nn.RNNBase], checkpointed: bool = False) -> None:
        super().__init__()
        self.inner, self.rnn, self.checkpointed = nn.Linear(3, 3), cls(3, 4, batch_first=True), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        y: Tensor = checkpoint(self.rnn, x, use_reentrant=False)[0] if self.checkpointed else self.rnn(x)[0]
        return y


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).float().square().flatten(1).sum(1)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The kernel's runs, by the dtype of its input."""
    seen: list[torch.dtype] = []
    kernel = recurrent.RecurrentTap.kernel

    def counted(self, x, *rest):
        seen.append(x.dtype)
        return kernel(self, x, *rest)

    monkeypatch.setattr(recurrent.RecurrentTap, "kernel", counted)
    return seen


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("half", [False, True])
def test_a_layer_runs_once_in_float32_and_twice_where_gates_would_be_rounded(cls, half, runs):
    model, x = Tagger(cls), torch.randn(3, 5, 3)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for step in range(2):  # the first is verified
            if step:
                engine.verification.schedule.pause()
            runs.clear()
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = losses(model, {"x": x}).mean()
            loss.backward()
            engine.finish()
    assert len(runs) == (2 if half else 1)


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU])
def test_a_layer_inside_a_checkpoint_is_exact(cls):
    assert_exact(Tagger(cls, checkpointed=True), {"x": torch.randn(3, 5, 3)}, losses)


def test_backward_lets_go_of_the_run_while_the_loss_lives():
    model = Tagger(nn.LSTM)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        y = model(torch.randn(3, 5, 3))
        held = weakref.ref(y.grad_fn.next_functions[0][0].run.u)
        assert held() is not None
        y.sum().backward()
        engine.finish()
    assert held() is None
