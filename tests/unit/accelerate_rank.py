"""One rank of a private loop by Accelerate."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from dpscope.accelerate import prepare_private
from tests.unit.flash.private_training import make_data, make_model, sgd

PRIVACY = {"noise_multiplier": 1.0, "max_grad_norm": 0.5}


def prepared(accelerator: Any, *, seed: int = 1, model: Any = None, **changed: Any) -> Any:
    torch.manual_seed(0)
    model = make_model() if model is None else model
    loader = DataLoader(make_data(), batch_size=16, generator=torch.Generator().manual_seed(seed))
    noise = {"noise_generator": torch.Generator().manual_seed(seed)}
    return prepare_private(accelerator, model, sgd(model), loader, **{**PRIVACY, **noise, **changed})


def train(accelerator: Any, model: Any, optimizer: Any, batches: Any) -> None:
    for x, y in batches:
        accelerator.backward(F.cross_entropy(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 1e-6)  # what many loops do, and must not matter
        optimizer.step()
        optimizer.zero_grad()


def main(folder: str) -> None:
    accelerate.state.AcceleratorState._reset_state(True)  # this process is a copy of one that was alone
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, loader, engine = prepared(accelerator)
    train(accelerator, model, optimizer, loader)
    weights = [weight.detach().clone() for weight in model.parameters()]
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    if accelerator.is_main_process:
        state = {"weights": weights, "processes": accelerator.num_processes, "history": engine.accountant.history}
        torch.save(state, Path(folder) / "two.pt")
    accelerator.wait_for_everyone()
    sys.stdout.flush()
    os._exit(0)  # a rank may abort when gloo is taken down
