"""Rows of a batch that belong to one sample: its augmented views (K each), or the rows of one user.

The gradient of such a sample is the mean over its rows, and is clipped as one. Layers and forward passes only know
rows. Their records are combined here as they arrive. A product treats the rows of a sample as more positions of it, so
with K rows each nothing is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpscope.errors import UserError
from dpscope.flash.gradients.contributions import Contribution
from dpscope.flash.gradients.paths import PathRules


class RowGroups:
    """Groups of K consecutive rows a sample, or those that `places` gives: (samples, K) row numbers, or -1."""

    def __init__(self, each: int, places: Tensor | None = None) -> None:
        if not isinstance(each, int) or each < 1:
            raise UserError(f"rows_per_sample must be a whole number of at least 1, not {each!r}")
        self.each = each
        self._places = places

    @classmethod
    def of_ids(cls, ids: Tensor) -> RowGroups:
        """Return the groups of rows with equal ids, (rows,)."""
        if ids.dim() != 1 or ids.is_floating_point() or not len(ids):
            raise UserError(f"rows are grouped by one whole number for each row, not by a tensor of {tuple(ids.shape)}")
        _, group, counts = torch.unique(ids, return_inverse=True, return_counts=True)
        order = group.argsort(stable=True)
        first = counts.cumsum(0) - counts  # of each group, among the sorted rows
        places = ids.new_full((len(counts), int(counts.max())), -1, dtype=torch.long)
        places[group[order], torch.arange(len(ids), device=ids.device) - first[group[order]]] = order
        return cls(places.shape[1], places)

    @property
    def is_plain(self) -> bool:
        """True if each row is a sample."""
        return self.each == 1 and self._places is None

    def put_together(self, contribution: Contribution, rules: PathRules) -> Contribution:
        """Return the record of a backward pass, sample by sample."""
        if self._places is not None:
            if contribution.batch_size != self.row_count(0):
                raise UserError(
                    f"{self.row_count(0)} rows were grouped, but the model was called with {contribution.batch_size}"
                )
            contribution = contribution.taken(self._places.flatten())
        elif contribution.batch_size % self.each:
            raise UserError(
                f"the model was called with {contribution.batch_size} rows, which is no multiple of rows_per_sample="
                f"{self.each}: give it the {self.each} rows of each sample beside one another"
            )
        return contribution.folded(self.each, rules)

    def row_count(self, samples: int) -> int:
        """Return the number of rows of so many samples."""
        return samples * self.each if self._places is None else int((self._places >= 0).sum())

    def multiplier(self, samples: int, *, mean: bool) -> float | Tensor:
        """Return the factor that turns a recorded gradient into the mean over a sample's rows."""
        rows = self.row_count(samples) if mean else 1
        if self._places is None:
            return rows / self.each
        return rows / (self._places >= 0).sum(1).double()
