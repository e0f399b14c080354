"""Small models trained privately, with padded batches or without."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from dpscope.flash import PrivacyEngine
from tests.unit.flash.private_training import make_data, make_model

CLASSES = 4


class Blocks(nn.Module):
    """Tied embedding and head, checkpointed blocks, a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight
        self.positions = nn.Parameter(torch.randn(5, 8))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(2))

    def forward(self, ids):
        x = self.table(ids) + self.positions
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x).mean(1)


def images():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class ByHand(nn.Module):
    """A layer's weight used by hand beside a parameter: not followed, which the first forward pass finds out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, CLASSES), nn.Parameter(torch.ones(CLASSES))

    def forward(self, x):
        return F.linear(x, self.layer.weight, self.layer.bias) * self.scale


MODELS = {
    "by hand": (ByHand, make_data),
    "mlp": (make_model, make_data),
    "images": (images, lambda: TensorDataset(torch.randn(48, 1, 6, 6), torch.arange(48) % CLASSES)),
    "blocks": (Blocks, lambda: TensorDataset(torch.randint(11, (48, 5)), torch.arange(48) % 11)),
    "recurrent": (Recurrent, lambda: TensorDataset(torch.randn(48, 4, 3), torch.arange(48) % CLASSES)),
}


def trained(model="mlp", *, optimizer=torch.optim.SGD, batch_size=8, epochs=1, physical=None, ahead=False, **options):
    """A model after some epochs, its optimizer, engine and loader."""
    make, data = MODELS[model]
    torch.manual_seed(0)
    dataset = data()
    torch.manual_seed(1)
    net = make()
    engine = PrivacyEngine(accountant="rdp")
    loader_options = {key: options.pop(key) for key in ("num_workers", "collate_fn") if key in options}
    generator = torch.Generator().manual_seed(2)
    net, optimizer, loader = engine.make_private(
        module=net,
        optimizer=optimizer(net.parameters(), lr=0.1),
        data_loader=DataLoader(dataset, batch_size=batch_size, generator=generator, **loader_options),
        **{
            "noise_multiplier": 0.5,
            "max_grad_norm": 0.3,
            "noise_generator": torch.Generator().manual_seed(3),
            **options,
        },
    )
    for _ in range(epochs):
        if physical is None:
            train(net, optimizer, list(loader) if ahead else loader)
        else:
            manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer)
            with manager as parts:
                train(net, optimizer, parts)
    return net, optimizer, engine, loader


def train(model, optimizer, batches, reduction="mean"):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x.to("cpu", copy=True)), y.to("cpu", copy=True), reduction=reduction).backward()
        optimizer.step()


def collate(samples):
    """Sorts the samples, writes into them, leaves the short ones out, and draws random numbers."""
    ids = []
    samples = [sample for sample in samples if len(sample["ids"]) > 1] or samples
    for sample in sorted(samples, key=lambda sample: -len(sample["ids"])):
        masked = torch.rand(sample["ids"].shape) < 0.2
        sample["ids"].masked_fill_(masked, 1)
        ids.append(sample.pop("ids"))
    samples.sort(key=lambda sample: -len(sample["text"]))
    return {
        "inputs": {"ids": pad_sequence(ids, batch_first=True)},
        "labels": torch.tensor([sample["label"] for sample in samples]),
        "table": torch.ones(5, 5),
        "names": [sample["text"] for sample in samples],
    }
