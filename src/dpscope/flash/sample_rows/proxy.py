"""Interfaces of modules that are given samples, and of proxies for parameters that a module uses itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from torch import Tensor, nn

from dpscope.errors import UserError


class Sampled(Protocol):
    """A module whose input has a row for each sample (`known`), or one for all of them (`shared`).

    Both hold the numbers of dimensions of x for which this is known.
    """

    name: str
    module: nn.Module
    known: set[int]
    shared: set[int]


class Proxy(Tensor):
    """Proxy for a tensor that is made of parameters alone (layers/bare.py)."""

    plain: Tensor  # the tensor it stands for, with its history

    def samples(self, consumer: nn.Module | None = None) -> Tensor:
        """Return an ordinary tensor with a row for each sample, which the layer `consumer` is given."""
        raise NotImplementedError

    def returned(self) -> Tensor:
        """Return what the model returns for it: rows of samples, or if it has none, a tensor not to be trained on.

        A penalty on weights is no function of samples. Its backward pass is refused, unless nothing hangs on it.
        """
        if self.plain.dim() and self.plain.shape[0] == self.batch():
            return self.samples()
        value = self.plain.detach().requires_grad_()

        def refuse(gradient: Tensor) -> None:
            if gradient.any():
                raise UserError(
                    "the model returns a tensor that is made of parameters alone, and it has no gradient for each "
                    "sample: return a row of it for each (x.expand(batch_size, ...)), or leave it out of the loss (the "
                    "optimizer's weight decay needs no private gradient)"
                )

        value.register_hook(refuse)  # type: ignore[no-untyped-call]
        return value

    def batch(self) -> int:
        """Return the number of samples."""
        raise NotImplementedError

    def derive(self, tensor: Tensor) -> Tensor:
        """Return a proxy for another tensor that is made of parameters alone."""
        raise NotImplementedError


class NotFollowed(BaseException):
    """The way `modules` are tapped does not fit what they do. Not an Exception: no model may catch it.

    climb   nothing else would fit them either: the modules around them have to be tapped as wholes
    strays  parameters that are used outside of the modules that own them
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        reason: str,
        *,
        climb: bool = False,
        strays: Collection[nn.Parameter] = (),
    ) -> None:
        super().__init__(reason)
        self.modules = modules
        self.climb = climb
        self.strays = strays


class RanOutOfMemory(BaseException):
    """Memory ran out in a run of verification, which answers no question. `error` is what the run ended with."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Unclipped(UserError):
    """A parameter received an ordinary gradient, past all taps."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} received an ordinary, unclipped gradient: it is used outside the forward of its module, or "
            "was unfrozen later. Call the module instead, or attach a new engine; other causes are in "
            "docs/sharp-edges.md#unclipped-gradient"
        )
        self.name = name


class Mismatch(NotFollowed):
    """The taps of `modules` do something else than the modules do, as the self-test has found."""
