"""Recomputed blocks on a GPU: the sums of held ones, with dropout's masks of the device, in less memory."""

from __future__ import annotations

import pytest
import torch

from dpscope.flash import FlashEngine
from tests.unit.flash.checkpointed_models import CheckpointedDecoder, how
from tests.unit.flash.flash_models import token_batch, token_losses

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def steps(
    budget: float | str | None,
    *,
    kind: bool = False,
    dtype: torch.dtype | None = None,
    width: int = 64,
    samples: int = 6,
) -> tuple[FlashEngine, dict[str, torch.Tensor], int]:
    """The engine after three steps, the sums of the last, and the peak of the last two."""
    torch.manual_seed(0)
    model = CheckpointedDecoder(vocabulary=64, width=width, layers=4, kind=kind, dropout=0.1).cuda()
    batch = {key: value.cuda() for key, value in token_batch(samples, 64, 64).items()}
    with FlashEngine(model, max_grad_norm=0.1, memory_budget=budget) as engine:
        for step in range(3):
            if step == 1:
                torch.cuda.reset_peak_memory_stats()
            model.zero_grad()
            torch.manual_seed(5)
            with torch.autocast("cuda", dtype, enabled=dtype is not None):
                losses = token_losses(model, batch)
            losses.mean().backward()
            engine.finish()
    return engine, {name: p.grad for name, p in model.named_parameters()}, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("kind", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 1e-4), (torch.bfloat16, 2e-2)])
def test_recomputed_blocks_give_the_sums_of_held_ones(kind: bool, dtype: torch.dtype | None, tolerance: float) -> None:
    """Attention's kernels may add in another order the second time, which bf16 rounds."""
    with_held, held, _ = steps(None, kind=kind, dtype=dtype)
    engine, recomputed, _ = steps(1.0, kind=kind, dtype=dtype)
    assert how(engine) == ["recomputed"] * 4
    assert with_held.norms is not None and engine.norms is not None
    torch.testing.assert_close(engine.norms, with_held.norms, rtol=tolerance, atol=0)
    whole = torch.stack([total.norm() for total in held.values()]).norm()
    for name, total in held.items():
        assert (recomputed[name] - total).norm() <= tolerance * (total.norm() + 0.01 * whole), name


def test_the_leanest_step_peaks_lower_and_a_number_of_bytes_lies_between() -> None:
    size = {"width": 256, "samples": 128, "dtype": torch.bfloat16}
    peaks = {}
    for budget in (1.0, None):
        _, _, peaks[budget] = steps(budget, **size)
        torch.cuda.empty_cache()
    assert peaks[1.0] < 0.9 * peaks[None]
    between = (peaks[1.0] + peaks[None]) / 2
    engine, _, peak = steps(between, **size)
    assert set(how(engine)) == {"held", "recomputed"}
    assert peak <= 1.05 * between


def test_lean_holds_blocks_up_to_the_peak_of_ordinary_training() -> None:
    """The peak is at the logits of a large vocabulary: blocks are held in what they leave."""
    torch.manual_seed(0)
    model = CheckpointedDecoder(vocabulary=8192, width=256, layers=6, kind=False).cuda()
    batch = {key: value.cuda() for key, value in token_batch(64, 64, 8192).items()}

    def peak_of_last(engine: FlashEngine | None) -> int:
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                losses = token_losses(model, batch)
            losses.mean().backward()
            if engine is not None:
                engine.finish()
            del losses
        return torch.cuda.max_memory_allocated()

    ordinary = peak_of_last(None)
    model.zero_grad()
    with FlashEngine(model, max_grad_norm=0.1, memory_budget="lean") as engine:
        assert peak_of_last(engine) <= 1.05 * ordinary
    assert "held" in how(engine)
