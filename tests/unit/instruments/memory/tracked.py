"""Small steps, tracked and attributed."""

from __future__ import annotations

import torch
from torch import nn

from dpscope.instruments.memory import attribute, track


def use_of(step, *, model=None, holdings=(), rules=()):
    held = holdings if callable(holdings) else lambda: holdings
    return attribute(track(step, device="cpu", model=model or nn.Identity(), holdings=held), rules)


def linear_chain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8, bias=False))
