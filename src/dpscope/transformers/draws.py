"""A loader that gives one Poisson draw at a time, as a list of physical batches; and privacy.json in a checkpoint.

The Trainer takes one item of a loader for one step. So an item is the whole draw of a step, cut into batches that fit
into memory. Draws depend on a seed and the epoch alone: a resumed run skips the draws that were used. A checkpoint
holds that seed: anyone who has it knows who took part in which step, and the privacy of sampling is lost. Keep
checkpoints; publish the model that `save_model` writes, which has no such file.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from dpscope.batches import tensors_of
from dpscope.errors import UserError
from dpscope.flash.padding.loader import PaddingSampler
from dpscope.flash.torch_side.derived_loaders import WrappedDataset, derive_loader

Parts = list[list[int]]  # of a draw: the indices of each physical batch


def new_seed(given: int | None = None, training: int = 0) -> int:
    """Return the seed of a training's draws: unpredictable, or made of a given one. No two trainings share draws."""
    if given is None:
        return secrets.randbits(63)
    return _mixed(given, training) if training else given


def _mixed(*numbers: int) -> int:
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class StepDraw(list[Any]):
    """The physical batches of one draw. An empty draw has none: its step is noise alone."""


class DrawSampler(Sampler[Parts]):
    """The draws of a Poisson sampler, cut into physical batches.

    sampler     gives lists of indices, of a padded loader already cut into batches
    size        of a physical batch, at most
    generator   that `sampler` draws from
    seed        of all draws; unpredictable unless given, because privacy by sampling needs secret draws
    """

    def __init__(self, sampler: Any, size: int, generator: torch.Generator, seed: int | None) -> None:
        self.sampler = sampler
        self.size = size
        self.generator = generator
        self.seed = new_seed() if seed is None else seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Parts]:
        self.generator.manual_seed(_mixed(self.seed, self.epoch))
        if not isinstance(self.sampler, PaddingSampler):
            for drawn in self.sampler:
                yield [list(drawn[start : start + self.size]) for start in range(0, len(drawn), self.size)]
            return
        parts: Parts = []
        for batch in self.sampler:
            parts.append(batch)
            _, rows = self.sampler.code.decode(batch)
            if not rows.more:
                yield parts
                parts = []


class DrawDataset(WrappedDataset):
    """A data set that reads the physical batches of a draw."""

    def __getitems__(self, parts: Parts) -> list[Any]:
        """Return the samples of each part; torch's loader calls this with an item of the sampler."""
        read = getattr(self.dataset, "__getitems__", None)
        return [self.samples_at(part) if read is None or not part else read(part) for part in parts]


def collate_draw(collate: Callable[[Any], Any], parts: Sequence[Any]) -> StepDraw:
    """Apply the user's collate function to each physical batch."""
    return StepDraw(collate(samples) for samples in parts)


def collate_rows(collate: Callable[[Any], Any], samples: Sequence[Any]) -> Any:
    """Apply the user's collate function; raise UserError unless there is a row for each sample."""
    batch = collate(samples)
    rows = {len(tensor) for tensor in tensors_of(batch) if tensor.dim()}
    if rows and len(samples) not in rows:
        raise UserError(
            f"the data collator makes {' or '.join(map(str, sorted(rows)))} rows of {len(samples)} samples, and what "
            "shares a row is clipped as one: use a collator that gives each sample a row of its own (no packing, no "
            "flattening)"
        )
    return batch


class DrawLoader(DataLoader[Any]):
    """Loader of draws; see `loader_of_draws`."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that is drawn next, as the Trainer does."""
        sampler: Any = self.batch_sampler
        sampler.set_epoch(epoch)


def loader_of_draws(loader: DataLoader[Any], *, size: int, seed: int | None = None) -> DrawLoader:
    """Return a loader of whole draws, made of the private loader that make_private gave."""
    assert loader.generator is not None
    sampler = DrawSampler(loader.batch_sampler, size, loader.generator, seed)
    return derive_loader(
        DrawLoader, loader, DrawDataset(loader.dataset), sampler, partial(collate_draw, loader.collate_fn)
    )


PRIVACY_FILE = "privacy.json"
VERSION = 1


@dataclass(frozen=True)
class PrivacyRecord:
    """Spent privacy and state of the draws; `history`: (noise multiplier, sample rate, steps) of the accountant."""

    history: list[tuple[float, float, int]]
    mechanism: str
    noise_multiplier: float
    sample_rate: float
    draw_seed: int

    def save(self, folder: Path) -> None:
        text = json.dumps({"version": VERSION, **asdict(self)}, indent=2)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PRIVACY_FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> PrivacyRecord:
        """Raise UserError if the checkpoint does not say what privacy its run has spent."""
        try:
            saved: dict[str, Any] = json.loads((folder / PRIVACY_FILE).read_text(encoding="utf-8"))
            version = saved.pop("version")
            saved["history"] = [(float(sigma), float(rate), int(steps)) for sigma, rate, steps in saved["history"]]
            record = cls(**saved)
        except (OSError, ValueError, TypeError, KeyError):
            raise UserError(
                f"{folder} has no readable {PRIVACY_FILE}, so the privacy that its run has spent is not known and ε "
                "would come out too small: resume from a checkpoint of a private trainer"
            ) from None
        if version != VERSION:
            raise UserError(f"{folder / PRIVACY_FILE} is of version {version}, and this dpscope reads {VERSION}")
        return record
