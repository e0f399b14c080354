"""Models whose blocks are checkpointed, and the truth about them: each sample's gradient in the batch's own forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpscope.flash import FlashEngine
from tests.unit.flash.agreement import Losses, max_grad_norm_for
from tests.unit.flash.flash_models import Decoder, token_losses


class CheckpointedDecoder(Decoder):
    """`kind`: None (no checkpoint), or `use_reentrant`; `options`: of checkpoint."""

    def __init__(self, *args: Any, kind: bool | None = False, dropout: float = 0.0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kind, self.options, self.dropout = kind, {}, nn.Dropout(dropout)

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        return self.dropout(block(self.dropout(x)))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device).unsqueeze(0))
        for block in self.blocks:
            if self.kind is None:
                x = self.run_block(block, x)
            else:
                x = checkpoint(self.run_block, block, x, use_reentrant=self.kind, **self.options)
        return self.head(self.norm(x))


def true_gradients(model: nn.Module, batch: Any, losses: Losses, seed: int = 0) -> list[dict[str, Tensor]]:
    """Of each sample, in one ordinary forward pass of the whole batch: random masks are those of the batch."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(seed)
    found = []
    for loss in losses(model, batch):
        gradients = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
        pairs = zip(named.items(), gradients, strict=True)
        found.append({name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs})
    return found


def norms_of(gradients: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack([torch.stack([g.double().norm() for g in each.values()]).norm() for each in gradients])


def clipped(gradients: list[dict[str, Tensor]], c: float) -> dict[str, Tensor]:
    factors = (c / norms_of(gradients)).clamp(max=1.0)
    return {
        name: sum(factor * each[name].double() for factor, each in zip(factors, gradients, strict=True))
        for name in gradients[0]
    }


def some_clipped(gradients: list[dict[str, Tensor]]) -> float:
    return max_grad_norm_for("some", norms_of(gradients))


def assert_sums(model: nn.Module, truth: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    size = torch.stack([total.norm() for total in truth.values()]).norm()
    for name, parameter in model.named_parameters():
        if name in truth:
            error = (parameter.grad.double() - truth[name]).norm()
            assert error <= tolerance * truth[name].norm() + 1e-2 * tolerance * size, f"{name}: {error:.1e}"


def how(engine: FlashEngine) -> list[str]:
    """Of each checkpointed block: held or recomputed."""
    return [row.how for row in engine.explain().blocks]


KINDS = pytest.mark.parametrize("reentrant", [False, True])


class OneBlock(nn.Module):
    """A block of two layers, checkpointed, and a layer. x: (B, T, 6)."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 6))
        self.last, self.reentrant = nn.Linear(6, 1), reentrant

    def forward(self, x):
        return self.last(checkpoint(self.block, x, use_reentrant=self.reentrant))


def decoder(**options) -> CheckpointedDecoder:
    torch.manual_seed(0)
    return CheckpointedDecoder(**options)


def step(engine, batch, losses=token_losses, seed=0) -> None:
    torch.manual_seed(seed)
    losses(engine.model, batch).mean().backward()
    engine.finish()


def truth_of(model, batch, losses=token_losses, seed=0):
    """The true gradients, and a C that clips some of them."""
    model.kind, kind = None, getattr(model, "kind", None)
    gradients = true_gradients(model, batch, losses, seed)
    model.kind = kind
    return gradients, some_clipped(gradients)
