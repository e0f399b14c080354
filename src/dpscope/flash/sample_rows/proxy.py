"""Interface of the proxies for parameters that a module uses itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor, nn


class Proxy(Tensor):
    """Proxy for a tensor that is made of parameters alone (layers/bare.py)."""

    plain: Tensor  # the tensor it stands for, with its history

    def samples(self, consumer: nn.Module | None = None) -> Tensor:
        """Return an ordinary tensor with a row for each sample, which the layer `consumer` is given."""
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


class Mismatch(NotFollowed):
    """The taps of `modules` do something else than the modules do, as the self-test has found.

    suspects  every module whose gradients are wrong, perhaps because of another one behind it
    """

    def __init__(self, modules: Sequence[nn.Module], reason: str, *, suspects: Sequence[nn.Module] = ()) -> None:
        super().__init__(modules, reason)
        self.suspects = suspects
