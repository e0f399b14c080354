"""Private training of a sharded model (FSDP2), each rank on its share of every Poisson batch.

    torchrun --nproc-per-node 2 examples/fsdp.py

On a CPU as well, and with any number of processes; `python examples/fsdp.py` is a world of one.
"""

import os
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from dpscope.flash import PrivacyEngine  # from opacus import PrivacyEngine

warnings.filterwarnings("ignore", message="Secure RNG turned off")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def start() -> None:
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())


def sharded_model() -> nn.Module:
    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(nn.Linear(16, 32), Block(32), Block(32), nn.Linear(32, 4)).to(DEVICE)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, Block):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main() -> None:
    start()
    model = sharded_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :4].argmax(1))
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=64),  # of all ranks together
        noise_multiplier=0.6,
        max_grad_norm=1.0,
    )
    steps, seen = 0, 0
    for _ in range(6):
        for inputs, labels in loader:  # a rank's share may be empty: it takes the step all the same
            optimizer.zero_grad()
            F.cross_entropy(model(inputs.to(DEVICE)), labels.to(DEVICE)).backward()
            optimizer.step()
            steps, seen = steps + 1, seen + len(inputs)
    with torch.no_grad():
        accuracy = (model(x.to(DEVICE)).argmax(1).cpu() == data.tensors[1]).float().mean().item()
    counts = torch.tensor([steps, seen], device=DEVICE)
    dist.all_reduce(counts)
    assert counts[0] == steps * dist.get_world_size(), "a rank took another number of steps"
    assert accuracy > 0.5, "the model has not learned"
    if dist.get_rank() == 0:
        print(f"{steps} steps on {dist.get_world_size()} ranks, {counts[1] / steps:.1f} samples a step (64 expected)")
        print(f"accuracy {accuracy:.2f}, ({engine.get_epsilon(delta=1e-3):.2f}, 1e-3)-differentially private")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
