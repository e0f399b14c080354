"""Poisson sampling over several ranks: one draw over the whole data set, split over the ranks.

The draw is that of one process: each sample is in a batch with the sample rate, independently. Rank r of R has the
drawn samples number r, r + R, r + 2R, … in the order of the data set. Every rank takes every step, even with an empty
share. All lists of indices are equally long: missing samples are marked as absent and left out when the data set is
read. So Opacus's BatchMemoryManager cuts the lists of all ranks into equally many physical batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler
from torch.utils.data import DataLoader

from dpscope.errors import UserError
from dpscope.flash.ranks.agreement import WHAT, Control
from dpscope.flash.torch_side.derived_loaders import WrappedDataset, derive_loader

ABSENT_SAMPLE = -1


class RankSampler(DistributedUniformWithReplacementSampler):  # type: ignore[misc]
    """The batches of one rank: lists of indices, as long as those of the others."""

    def __init__(
        self, control: Control, *, total_size: int, sample_rate: float, steps: int, generator: torch.Generator | None
    ) -> None:
        super().__init__(total_size=total_size, sample_rate=sample_rate, steps=steps, generator=generator)
        self.control = control
        self.epochs = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.epochs += 1
        self.control.meet({WHAT: f"draw the batches of epoch {self.epochs}"})
        generator = self._common_generator()
        for _ in range(self.num_batches):
            drawn = torch.rand(self.total_size, generator=generator) < self.sample_rate
            yield share_of(drawn.nonzero().flatten().tolist(), self.control.rank, self.control.size)

    def _common_generator(self) -> torch.Generator:
        """Return a generator with the state of rank 0's, on every rank."""
        if self.generator is None:
            seed = self.control.broadcast_(torch.randint(2**63 - 1, (1,)))
            return torch.Generator().manual_seed(int(seed))
        generator: torch.Generator = self.generator
        generator.set_state(self.control.broadcast_(generator.get_state()))
        return generator


def share_of(drawn: Sequence[int], rank: int, ranks: int) -> list[int]:
    """Return one rank's share of a batch. Shares have the same length on all ranks."""
    share = list(drawn[rank::ranks])
    return share + [ABSENT_SAMPLE] * (-(-len(drawn) // ranks) - len(share))


class PresentSamples(WrappedDataset):
    """Data set that leaves out absent samples when a batch is read."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the present samples of a batch. torch's loader calls this with the batch's indices."""
        return self.samples_at([index for index in indices if index != ABSENT_SAMPLE])


class ShareLoader(DataLoader[Any]):
    """Counts the shares given to the loop, so that ranks can compare: a rank that skips some is at another draw."""

    control: Control

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for share in super().__iter__():
            self.control.shares_given += 1
            yield share


def loader_of_rank(loader: DataLoader[Any], control: Control) -> DataLoader[Any]:
    """Return this rank's share of the batches of `loader`, a Poisson loader of Opacus over the whole data set."""
    sampler: Any = loader.batch_sampler
    generator = sampler.generator
    if generator is not None and generator.device.type != "cpu":
        raise UserError("the data loader's generator is on a device: over several processes it has to be on the CPU")
    # Draws of other lengths or rates would put a sample on two ranks, or on none.
    facts = (f"{len(loader.dataset)} samples", f"sample rate {sampler.sample_rate:.6g}", f"{len(sampler)} steps")  # type: ignore[arg-type]
    control.agree("the data loader (each rank gets the whole data set, and the batch size of all)", facts)
    collate: Any = loader.collate_fn
    collate([loader.dataset[0]])  # an empty share has the structure of this batch, also where it is the first
    batches = RankSampler(
        control,
        total_size=len(loader.dataset),  # type: ignore[arg-type]
        sample_rate=sampler.sample_rate,
        steps=len(sampler),
        generator=generator,
    )
    shares = derive_loader(ShareLoader, loader, PresentSamples(loader.dataset), batches, collate)
    shares.control = control
    return shares
