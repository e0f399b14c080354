"""Several processes on gloo, forked from the test's own, and a small model that is trained in them.

Processes are costly on a small machine: a world is started once a file and runs many cases.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpscope.flash import PrivacyEngine
from dpscope.flash.ranks.ranks import release_weights
from dpscope.flash.torch_side.frames import original_of
from tests.torch_here import CAN_SHARD

SAMPLES, LENGTH, WORDS, WIDTH, CLASSES = 40, 5, 11, 6, 3  # odd sizes: shards are uneven, and some are empty
EXPECTED = 8
CLIP = 0.3
# Sums of the same shares in another order: a few units of float32's last place, over five steps.
ROUNDING = 1e-5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 10)
        self.down = nn.Linear(10, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
    return TensorDataset(ids, ids.sum(1) % CLASSES)


def shard(
    model: nn.Module, mesh: Any, *, reshard: bool = True, policy: MixedPrecisionPolicy | None = None
) -> nn.Module:
    """As PyTorch's documentation says: blocks, then the root."""
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard}
    if policy is not None:
        options["mp_policy"] = policy
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def _mesh(*names: str) -> Any:
    world = dist.get_world_size()
    shape = (world,) if len(names) < 2 else (2, world // 2) if world > 1 else (1, 1)
    return init_device_mesh("cpu", shape, mesh_dim_names=names or None)


def _shard_partly(model: nn.Module) -> nn.Module:
    """Blocks alone, without one parameter: it and the rest stay whole on every rank."""
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=_mesh(), ignored_params={block.up.weight})  # type: ignore[arg-type,union-attr]
    return model


_WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "alone": lambda model: model,
    "ddp": lambda model: DistributedDataParallel(model, bucket_cap_mb=2e-4),
    "opacus": DifferentiallyPrivateDistributedDataParallel,
    "fsdp": lambda model: shard(model, _mesh()),
    "fsdp kept": lambda model: shard(model, _mesh(), reshard=False),
    "hsdp": lambda model: shard(model, _mesh("replicate", "shard")),
    "partly": _shard_partly,
}

_WHOLE = ("alone", "ddp", "opacus")  # the model is whole on each rank


def possible(*ways: str) -> list[str]:
    """Those in which this torch can spread a model: an older one shards none on a CPU."""
    return [way for way in ways if CAN_SHARD or way in _WHOLE]


FSDP_OR_DDP = possible("fsdp", "ddp")[0]


def spread(model: nn.Module, way: str) -> nn.Module:
    return _WAYS[way](model)


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.05)


class Wide(Model):
    """Large enough for what ranks tell one another beside gradients to be little next to them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2000, WIDTH)


def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    engine: PrivacyEngine | None = None,
    batch_size: int = EXPECTED,
    data: Dataset[Any] | None = None,
    **options: Any,
) -> Any:
    values = {
        "noise_multiplier": 0.7,
        "max_grad_norm": CLIP,
        "poisson_sampling": False,
        "noise_generator": torch.Generator().manual_seed(5),
        **options,
    }
    loader = DataLoader(data or make_data(), batch_size=batch_size, generator=torch.Generator().manual_seed(3))
    return (engine or PrivacyEngine()).make_private(module=model, optimizer=optimizer, data_loader=loader, **values)


# The samples of each step, and which rank of four has how many of them: uneven and empty shares.
STEPS = [
    (range(8), (2, 2, 2, 2)),
    (range(8, 17), (5, 0, 1, 3)),
    (range(17, 20), (0, 3, 0, 0)),
    (range(0), (0, 0, 0, 0)),
]
STEPS = [*STEPS, (range(20, 33), (1, 1, 10, 1))]


def share(step: int, rank: int, world: int) -> list[int]:
    """Rank r of two has the shares of ranks 2r and 2r + 1 of four, and one alone has all of them."""
    samples, sizes = list(STEPS[step][0]), STEPS[step][1]
    each = 4 // world
    first = sum(sizes[: rank * each])
    return samples[first : first + sum(sizes[rank * each : (rank + 1) * each])]


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def train(model: nn.Module, optimizer: Any, steps: Sequence[int]) -> None:
    ids, labels = make_data().tensors
    for step in steps:
        rows = share(step, *rank_and_world())
        optimizer.zero_grad()
        F.cross_entropy(model(ids[rows]).float(), labels[rows]).backward()
        optimizer.step()


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """All of every parameter, on every rank."""
    release_weights(model)
    named = original_of(getattr(model, "module", model)).named_parameters()
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for name, p in named}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = ROUNDING) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=tolerance, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


def trained(way: str, name: str, steps: Sequence[int] = range(len(STEPS)), **options: Any) -> dict[str, Tensor]:
    model = spread(make_model(), way)
    model, optimizer, _ = make_private(model, optimizer_of(model, name), **options)
    train(model, optimizer, steps)
    return whole_parameters(model)


def in_world(
    world: int,
    case: Callable[..., Any],
    *args: Any,
    lost: Sequence[int] = (),
    timeout: float = 300.0,
    tries: int = 2,
) -> list[Any]:
    """What `case(*args)` returns on each rank of a world on gloo that is not `lost`; their errors are raised here.

    tries  a rank that a signal ended, and no error of Python's, is tried again: gloo's threads abort now and then
    """
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=_rank, args=(r, world, Path(folder), case, args)) for r in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout)
            if process.is_alive():
                for each in ranks:
                    each.kill()
                raise TimeoutError(f"{case.__name__} in a world of {world} did not end in {timeout:g} s")
        kept = [rank for rank in range(world) if rank not in lost]
        paths = [Path(folder) / f"{rank}.pt" for rank in kept]
        if all(path.exists() for path in paths):
            return [torch.load(path, weights_only=False) for path in paths]
        crashed = any((ranks[rank].exitcode or 0) < 0 for rank in kept)
        ends = {rank: f"exit code {process.exitcode}" for rank, process in enumerate(ranks)}
        told = {int(text.stem): text.read_text() for text in Path(folder).glob("*.txt")}
    if crashed and tries > 1:
        return in_world(world, case, *args, lost=lost, timeout=timeout, tries=tries - 1)
    raise AssertionError("\n".join(f"rank {rank}: {said}" for rank, said in {**ends, **told}.items()))


def _rank(rank: int, world: int, folder: Path, case: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    code = 1
    try:
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
        torch.save(case(*args), folder / f"{rank}.tmp")
        (folder / f"{rank}.tmp").rename(folder / f"{rank}.pt")
        dist.barrier()
        code = 0
    except BaseException:
        (folder / f"{rank}.txt").write_text(traceback.format_exc())
    finally:
        os._exit(code)  # gloo's threads abort now and then when a process ends by itself
