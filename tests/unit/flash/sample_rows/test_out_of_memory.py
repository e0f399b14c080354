"""Memory that runs out while a model is verified is said to have run out, wherever it does; the next step trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from tests.unit.flash.agreement import private_step
from tests.unit.flash.sample_rows.verified_models import losses, rows

ERRORS = {
    "GPU": lambda: torch.OutOfMemoryError("no room"),
    "cuBLAS": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "CPU": lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
    "Python": MemoryError,
}


class Filling(nn.Module):
    """Runs out of memory when it is told to."""

    def __init__(self, is_full, mixed=0.0):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.is_full, self.mixed = is_full, mixed

    def forward(self, x):
        h = self.first(x)
        error = self.is_full(h)
        if error is not None:
            raise error
        return self.last(h.tanh()) + self.mixed * h.detach().mean()


@pytest.mark.parametrize("kind", ERRORS)
def test_memory_that_runs_out_in_any_run_of_a_model_is_the_error(kind):
    runs = []

    def is_full(h, full_at=None):
        runs.append(h.dtype)
        return ERRORS[kind]() if len(runs) == full_at else None

    with FlashEngine(Filling(is_full), max_grad_norm=1.0) as engine:
        private_step(engine, rows(), losses)
    wide = [dtype == torch.float64 for dtype in runs]  # without which a model is verified, too
    assert not all(wide)
    for full_at in (place for place, is_wide in enumerate(wide, 1) if not is_wide):
        runs.clear()
        model = Filling(lambda h, full_at=full_at: is_full(h, full_at))
        with FlashEngine(model, max_grad_norm=1.0) as engine:
            with pytest.raises(type(ERRORS[kind]())) as raised:
                private_step(engine, rows(), losses)
            assert not isinstance(raised.value, UserError)
            assert str(raised.value) == str(ERRORS[kind]())
            engine.zero_grad()
            private_step(engine, rows(), losses)


@pytest.mark.parametrize("kind", ERRORS)
def test_without_memory_for_float64_a_model_trains_and_one_that_seems_to_mix_is_not_said_to(kind):
    def is_full(h):
        return ERRORS[kind]() if h.dtype == torch.float64 else None

    with FlashEngine(Filling(is_full), max_grad_norm=1.0) as engine:
        private_step(engine, rows(), losses)
    with FlashEngine(Filling(is_full, mixed=1e-2), max_grad_norm=1.0) as engine:
        with pytest.raises(type(ERRORS[kind]())) as raised:
            private_step(engine, rows(), losses)
        assert not isinstance(raised.value, UserError)
