"""Whole programs in the manner of Opacus's examples, written once and run with either engine.

Without noise and with the same batches both engines have to end at the same weights.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine as OpacusPrivacyEngine
from opacus.layers import DPGRU, DPLSTM, DPRNN
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from dpscope.flash import PrivacyEngine

Engine = type[OpacusPrivacyEngine]
OPTIONS = {"noise_multiplier": 0.0, "max_grad_norm": 0.5, "poisson_sampling": False}


def images(channels: int, size: int, count: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(
        torch.randn(count, channels, size, size, generator=generator),
        torch.randint(10, (count,), generator=generator),
    )


def epsilon_is_spent(engine: OpacusPrivacyEngine, steps: int) -> None:
    assert sum(count for _, _, count in engine.accountant.history) == steps


def digits(engine_class: Engine) -> nn.Module:
    """A small convolutional network, functional pooling, SGD, evaluation after every epoch."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(1, 4, 5, 2, padding=2)
            self.conv2 = nn.Conv2d(4, 6, 3, 2)
            self.fc1 = nn.Linear(6, 10)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
            x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
            return self.fc1(x.mean((2, 3)))

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    engine = engine_class()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(images(1, 14), batch_size=8), **OPTIONS
    )
    for _ in range(2):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            model(images(1, 14).tensors[0])
    epsilon_is_spent(engine, 6)
    return model


def objects(engine_class: Engine) -> nn.Module:
    """The mode in so many words, RMSprop, zero_grad after the step, a learning rate that changes, a saved state."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    engine = engine_class(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(images(3, 8), batch_size=8),
        clipping="flat",
        grad_sample_mode="hooks",
        **OPTIONS,
    )
    for epoch in range(2):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (epoch + 1)
        for x, y in loader:
            loss = nn.CrossEntropyLoss()(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    engine.get_epsilon(1e-5)
    return model


def reviews(engine_class: Engine) -> nn.Module:
    """Padded token ids, the mean of an embedding over positions, Adam."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(50, 8)
            self.pool = nn.AdaptiveAvgPool1d(1)
            self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, ids):
            x = self.pool(self.emb(ids).transpose(1, 2)).squeeze(2)
            return self.fc2(F.relu(self.fc1(x)))

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    return trained_on_text(engine_class, model, optimizer)


def names(recurrent: type[nn.Module]) -> Callable[[Engine], nn.Module]:
    """Characters through one of Opacus's recurrent layers; the last position is classified."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(50, 6)
            self.rnn = recurrent(6, 5, num_layers=1, batch_first=True)
            self.out = nn.Linear(5, 2)

        def forward(self, ids, hidden=None):
            x, _ = self.rnn(self.emb(ids), hidden)
            return self.out(x[:, -1, :])

    def program(engine_class: Engine) -> nn.Module:
        model = Net()
        return trained_on_text(engine_class, model, torch.optim.SGD(model.parameters(), lr=1.0))

    return program


def trained_on_text(engine_class: Engine, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 9, (24,), generator=generator).tolist()
    rows = [(torch.randint(1, 50, (length,), generator=generator), i % 2) for i, length in enumerate(lengths)]

    def padded(batch):
        return pad_sequence([ids for ids, _ in batch], batch_first=True), torch.tensor([label for _, label in batch])

    engine = engine_class()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(rows, batch_size=6, collate_fn=padded),
        **OPTIONS,
    )
    for ids, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(ids), labels).backward()
        optimizer.step()
    epsilon_is_spent(engine, 4)
    return model


def adversaries(engine_class: Engine) -> nn.Module:
    """A private discriminator called twice before a backward, an ordinary generator whose loss goes through it."""
    discriminator = nn.Sequential(
        nn.Conv2d(1, 4, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2),
        nn.Conv2d(4, 8, 4, 2, 1, bias=False),
        nn.GroupNorm(4, 8),
        nn.LeakyReLU(0.2),
        nn.Conv2d(8, 1, 2, 1, 0, bias=False),
        nn.Sigmoid(),
        nn.Flatten(0),
    )
    generator = nn.Sequential(nn.ConvTranspose2d(3, 4, 4, 1, 0), nn.ReLU(True), nn.ConvTranspose2d(4, 1, 4, 2, 1))
    ordinary = torch.optim.Adam(generator.parameters(), lr=0.01)
    optimizer = torch.optim.Adam(discriminator.parameters(), lr=0.01, betas=(0.5, 0.999))
    engine = engine_class()
    discriminator, optimizer, loader = engine.make_private(
        module=discriminator, optimizer=optimizer, data_loader=DataLoader(images(1, 8), batch_size=6), **OPTIONS
    )
    for real, _ in loader:
        optimizer.zero_grad(set_to_none=True)
        judged = discriminator(real)
        loss = F.binary_cross_entropy(judged, torch.ones(len(real)))
        fake = generator(torch.randn(len(real), 3, 1, 1))
        judged = discriminator(fake.detach())
        (loss + F.binary_cross_entropy(judged, torch.zeros(len(real)))).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ordinary.zero_grad()
        F.binary_cross_entropy(discriminator(fake), torch.ones(len(real))).backward()
        ordinary.step()
    epsilon_is_spent(engine, 4)
    return nn.ModuleList([discriminator, generator])


PROGRAMS = {
    "digits": digits,
    "objects": objects,
    "reviews": reviews,
    "adversaries": adversaries,
    "names by DPLSTM": names(DPLSTM),
    "names by DPGRU": names(DPGRU),
    "names by DPRNN": names(DPRNN),
}


@pytest.mark.filterwarnings("ignore:.*'hooks' was asked for:UserWarning", "ignore:Optimal order:UserWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_at_the_same_weights_with_the_import_changed(name: str) -> None:
    trained = []
    for engine_class in (OpacusPrivacyEngine, PrivacyEngine):
        torch.manual_seed(5)
        trained.append(list(PROGRAMS[name](engine_class).parameters()))
    for expected, got in zip(*trained, strict=True):
        # Adam and RMSprop divide by the root of a gradient's square: rounding of 1e-7 in a tiny gradient shows as 1e-4.
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=2e-4)
