"""Private training with Accelerate: `prepare_private` in place of `accelerator.prepare`.

pip install accelerate
python examples/accelerate_loop.py      # or: accelerate launch examples/accelerate_loop.py
"""

import tempfile

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpscope.accelerate import prepare_private


def make_data(samples: int = 512) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 16, generator=generator)
    return TensorDataset(x, (x @ torch.randn(16, 4, generator=generator)).argmax(1))


def train(accelerator, model, optimizer, loader) -> float:
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())

    def start():
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
        loader = DataLoader(make_data(), batch_size=64)  # the batch size of all processes
        return prepare_private(accelerator, model, optimizer, loader, noise_multiplier=1.0, max_grad_norm=1.0)

    model, optimizer, loader, privacy_engine = start()
    first = train(accelerator, model, optimizer, loader)
    for _ in range(3):
        last = train(accelerator, model, optimizer, loader)
    assert last < first, "private training should have learned something"
    spent = privacy_engine.get_epsilon(delta=1e-5)

    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        accelerator.free_memory()
        accelerator._custom_objects.clear()
        model, optimizer, loader, resumed = start()
        accelerator.load_state(folder)
    assert resumed.get_epsilon(delta=1e-5) == spent, "a loaded state knows what was spent"
    train(accelerator, model, optimizer, loader)
    assert resumed.get_epsilon(delta=1e-5) > spent
    print(f"loss {first:.2f} -> {last:.2f}")
    print(f"saved at ε = {spent:.2f}, resumed to ε = {resumed.get_epsilon(delta=1e-5):.2f} at δ = 1e-5")


if __name__ == "__main__":
    main()
