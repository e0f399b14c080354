"""Stand-ins for parameters that a module uses itself, as far as layers and forward passes know of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class StandIn(Tensor):
    """Stands for a tensor that is made of parameters alone (layers/bare.py)."""

    plain: Tensor  # the tensor it stands for, with its history

    def samples(self) -> Tensor:
        """An ordinary tensor with a row for each sample."""
        raise NotImplementedError


class NotFollowed(BaseException):
    """What `modules` do with their parameters is beyond following. Not an Exception: no model may catch it."""

    def __init__(self, modules: Sequence[nn.Module], reason: str) -> None:
        super().__init__(reason)
        self.modules = modules
