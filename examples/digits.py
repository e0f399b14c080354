"""Real data: handwritten digits at ε = 3 and ε = 8, by ordinary training, Opacus and flash clipping.

    pip install scikit-learn
    python examples/digits.py            # five seeds, about half a minute on a CPU
    SEEDS=20 python examples/digits.py digits.png

scikit-learn ships UCI's digits: 1,797 images of 8 × 8, a fifth of which is held out here. Privacy costs accuracy; the
engine that clips does not: Opacus and flash clipping take the same steps and end at the same accuracy, within noise.
"""

import os
import statistics
import sys
import warnings
from functools import cache

import torch
import torch.nn.functional as F
from opacus import PrivacyEngine as OpacusEngine
from opacus.accountants.utils import get_noise_multiplier
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpscope.flash import PrivacyEngine as FlashEngine

warnings.filterwarnings("ignore")
SEEDS = int(os.environ.get("SEEDS", "5"))
BATCH, DELTA = 512, 1e-4
ORDINARY = {"epochs": 60, "lr": 0.2}  # each with settings that suit it
PRIVATE = {"epochs": 15, "lr": 1.0}
ENGINES = {"Opacus": OpacusEngine, "flash clipping": FlashEngine}
BUDGETS = (3.0, 8.0)


def load(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Training and held-out images, split anew for each seed."""
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    held_out, rest = order[: len(x) // 5], order[len(x) // 5 :]
    return TensorDataset(x[rest], y[rest]), TensorDataset(x[held_out], y[held_out])


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


@cache
def noise_for(epsilon: float, steps_of_an_epoch: int) -> float:
    """The noise with which all epochs together spend ε."""
    return get_noise_multiplier(
        target_epsilon=epsilon, target_delta=DELTA, sample_rate=1 / steps_of_an_epoch, epochs=PRIVATE["epochs"]
    )


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    x, y = data.tensors
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def train(seed: int, engine: type | None = None, epsilon: float = 0.0) -> float:
    """The accuracy on held-out images after one training."""
    data, held_out = load(seed)
    model = make_model(seed)
    settings = ORDINARY if engine is None else PRIVATE
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=settings["lr"], momentum=0.9)
    loader: DataLoader[tuple[Tensor, Tensor]] = DataLoader(data, batch_size=BATCH, shuffle=True)
    if engine is not None:
        privacy_engine = engine()
        model, optimizer, loader = privacy_engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=noise_for(epsilon, len(loader)),
            max_grad_norm=1.0,
        )
    model.train()
    for _ in range(settings["epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    if engine is not None:
        assert privacy_engine.get_epsilon(DELTA) <= epsilon
    return accuracy(model.eval(), held_out)


def draw(found: dict[str, list[float]], file: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    for place, values in enumerate(found.values()):
        axes.plot(values, [place] * len(values), "o", color="0.4", alpha=0.6)
        axes.plot(statistics.mean(values), place, "|", color="black", markersize=16, markeredgewidth=2)
    axes.set_yticks(range(len(found)), found)
    axes.invert_yaxis()
    axes.set_xlabel(f"accuracy on held-out digits, {SEEDS} seeds, and their mean")
    figure.savefig(file)


def main() -> None:
    found = {"ordinary training": [train(seed) for seed in range(SEEDS)]}
    for epsilon in BUDGETS:
        for name, engine in ENGINES.items():
            found[f"{name}, ε = {epsilon:g}"] = [train(seed, engine, epsilon) for seed in range(SEEDS)]
    for name, values in found.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{name:24} {statistics.mean(values):.1%} ± {spread:.1%}")
    for epsilon in BUDGETS:
        opacus, flash = (found[f"{name}, ε = {epsilon:g}"] for name in ENGINES)
        noise = statistics.stdev([*opacus, *flash]) * (2 / SEEDS) ** 0.5  # of the difference of two means
        difference = statistics.mean(flash) - statistics.mean(opacus)
        assert abs(difference) < 3 * noise + 0.01, "the engine that clips does not change the result"
    assert statistics.mean(found["flash clipping, ε = 8"]) > 0.9
    if sys.argv[1:] and sys.argv[1].endswith(".png"):
        draw(found, sys.argv[1])


if __name__ == "__main__":
    main()
