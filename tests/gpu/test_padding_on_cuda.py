"""Padded Poisson batches on a GPU: pinned memory, copies ahead of use, the fused update, compiled models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpscope.flash import PrivacyEngine, real_rows

CUDA = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]
DEVICE = "cuda" if CUDA else "cpu"


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(128, 64), nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.head = nn.Linear(64, 128, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


def ahead(batches, device):
    """Each batch is on its way to the device while the one before is trained on."""
    last = None
    for (ids,) in batches:
        on_its_way = ids.to(device, non_blocking=True)
        if last is not None:
            yield last
        last = on_its_way
    yield last


def trained(*, compile=None, **options):
    torch.manual_seed(0)
    model = Decoder().to(DEVICE)
    called = model if compile is None else torch.compile(model, mode=compile, dynamic=False)
    data = TensorDataset(torch.randint(128, (640, 33), generator=torch.Generator().manual_seed(1)))
    called, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
        module=called,
        optimizer=torch.optim.AdamW(called.parameters(), lr=1e-3),
        data_loader=DataLoader(
            data, batch_size=32, pin_memory=CUDA, num_workers=2, generator=torch.Generator().manual_seed(2)
        ),
        noise_multiplier=0.3,
        max_grad_norm=0.5,
        noise_generator=torch.Generator().manual_seed(3),
        **options,
    )
    for ids in ahead(loader, DEVICE):
        optimizer.zero_grad()
        logits = called(ids[:, :-1])
        losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)
        assert real_rows(ids) <= len(losses)
        losses.mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("compile", [None, "default", "reduce-overhead"])
def test_padded_training_is_unpadded_training(compile):
    plain, _ = trained()
    padded, optimizer = trained(compile=compile, pad_batches=True)
    for (name, a), b in zip(plain.named_parameters(), padded.parameters(), strict=True):
        # AdamW divides by the size of small gradients: rounding in another order moves a weight by a part of lr = 1e-3.
        torch.testing.assert_close(b, a, rtol=1e-3, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")
    assert 0 < optimizer.padding_share < 0.1
