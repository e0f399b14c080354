"""Random states of a process: torch's on the CPU and on some GPUs, Python's and NumPy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class RandomStates(NamedTuple):
    """Snapshot of all of them."""

    cpu: Tensor
    cuda: dict[torch.device, Tensor]
    python: Any
    numpy: Any

    @classmethod
    def now(cls, devices: Sequence[torch.device] = (), *, numpy_state: bool = True) -> RandomStates:
        """Take a snapshot. NumPy's state takes longest to read: `numpy_state=False` leaves it out."""
        numpy = sys.modules.get("numpy") if numpy_state else None
        return cls(
            torch.get_rng_state(),
            {device: torch.cuda.get_rng_state(device) for device in devices},
            random.getstate(),
            None if numpy is None else numpy.random.get_state(),
        )

    def equals(self, other: RandomStates) -> bool:
        """Return whether nothing was drawn between two looks at the same generators."""
        same = torch.equal(self.cpu, other.cpu) and self.python == other.python
        same = same and all(torch.equal(state, other.cuda[device]) for device, state in self.cuda.items())
        numpy = zip(self.numpy or (), other.numpy or (), strict=True)
        return same and all(bool(torch.all(torch.as_tensor(one == another))) for one, another in numpy)

    def put_back(self) -> None:
        """Restore all of them."""
        torch.set_rng_state(self.cpu)
        for device, state in self.cuda.items():
            torch.cuda.set_rng_state(state, device)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


@contextmanager
def random_states_kept(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Restore random states after the block."""
    before = RandomStates.now(devices)
    try:
        yield
    finally:
        before.put_back()


def seed_all(seed: int, devices: Sequence[torch.device] | None = None) -> None:
    """Seed Python, NumPy and torch on the CPU and on these GPUs; on all of them by default."""
    random.seed(seed)
    if devices is None:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device.index].manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def all_gpus() -> list[torch.device]:
    """Return every GPU that torch can use."""
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def cuda_devices(model: nn.Module) -> list[torch.device]:
    """Return the GPUs that hold parameters of the model."""
    return list({p.device for p in model.parameters() if p.device.type == "cuda"})
