"""Private training in an ordinary loop: the import changes, the loop does not.

    python examples/ordinary_loop.py

Runs in seconds on a CPU: a small classifier on random data that can be learned.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpscope.flash import PrivacyEngine  # instead of: from opacus import PrivacyEngine

CLIP_NORM = 1.0


def make_data(samples: int = 1024) -> TensorDataset:
    """The class is the largest of three projections."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 16, generator=generator)
    return TensorDataset(x, (x @ torch.randn(16, 3, generator=generator)).argmax(1))


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    x, y = data.tensors
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def main() -> None:
    torch.manual_seed(0)
    data = make_data()
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    privacy_engine = PrivacyEngine()
    model, optimizer, loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=64),  # 64 is what a Poisson batch has on average
        noise_multiplier=1.0,
        max_grad_norm=CLIP_NORM,
    )
    before = accuracy(model, data)
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()  # the mean over samples
            optimizer.step()

    # What is promised: no sample's share of the sum is larger than the clip norm.
    shares = optimizer.engine.norms * optimizer.engine.factors
    assert float(shares.max()) <= CLIP_NORM * (1 + 1e-3)
    after = accuracy(model, data)
    assert after > before + 0.2, "private training should have learned something"
    print(f"accuracy {before:.2f} -> {after:.2f}, largest share of a sample {float(shares.max()):.3f}")
    print(f"(ε = {privacy_engine.get_epsilon(delta=1e-5):.2f}, δ = 1e-5)-differentially private")


if __name__ == "__main__":
    main()
