"""A data loader made of the user's: other batches, a data set around theirs, and every other setting as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch.utils.data import DataLoader, Dataset

Loader = TypeVar("Loader", bound=DataLoader[Any])

_KEPT = (  # of a loader's settings
    *("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers"),
)


class WrappedDataset(Dataset[Any]):
    """The user's data set, whose batches are read in another way: see `__getitems__` of its subclasses."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def samples_at(self, indices: Sequence[int]) -> list[Any]:
        """Return the user's samples, in one read if their data set can do that."""
        read = getattr(self.dataset, "__getitems__", None)
        return list(read(indices)) if read is not None and indices else [self.dataset[index] for index in indices]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


def derive_loader(
    kind: type[Loader], loader: DataLoader[Any], dataset: Dataset[Any], batch_sampler: Any, collate: Any
) -> Loader:
    """Return a loader of class `kind` over these batches of this data set, with the other settings of `loader`."""
    kept = {name: getattr(loader, name) for name in _KEPT}
    return kind(dataset, batch_sampler=batch_sampler, collate_fn=collate, **kept)
