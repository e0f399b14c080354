"""A callable in a module's instance dictionary, in place of one of its methods.

The module keeps its class, its names and its state_dict; pickling or copying it gives an ordinary module, because the
callable reduces to the method it stands in for.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, ClassVar

from torch import nn


class InstanceMethod:
    """A callable that stands in a module's instance dictionary for the method `attribute`, until `restore()`."""

    attribute: ClassVar[str] = "forward"

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.replaced = vars(module).get(self.attribute)
        self.original = getattr(module, self.attribute)
        self.__wrapped__ = self.original  # so that inspect.signature(model.forward) stays what it was
        self.__doc__ = self.original.__doc__
        self.__name__ = self.attribute

    def install(self) -> None:
        vars(self.module)[self.attribute] = self

    def install_bound(self) -> None:
        """Install this object as a bound method: torch.compile then guards on the function, not on the object.

        So modules of one class share a graph, each with an instance method of its own. A pickled method is looked up by
        its name, `__call__`, on what the instance method reduces to; a copied one has that for its `self`.
        """
        vars(self.module)[self.attribute] = MethodType(type(self).__call__, self)

    def restore(self) -> None:
        if self.replaced is None:
            vars(self.module).pop(self.attribute, None)
        else:
            vars(self.module)[self.attribute] = self.replaced

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        # While a module is unpickled or copied its instance dictionary is still empty: this finds the class's method.
        return (getattr, (self.module, self.attribute)) if self.replaced is None else (_itself, (self.replaced,))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def instance_method(module: nn.Module, attribute: str = "forward") -> InstanceMethod | None:
    """Return the instance method that replaces the module's method, if there is one."""
    found = vars(module).get(attribute)
    found = getattr(found, "__self__", found)
    return found if isinstance(found, InstanceMethod) else None


class InertHook:
    """A hook on a private module. Copied or pickled with the module, it does nothing: the copy is not private."""

    def __init__(self, run: Callable[[], None] | None = None) -> None:
        self.run = run

    def __call__(self, *call: object) -> None:
        if self.run is not None:
            self.run()

    def __reduce__(self) -> tuple[type[InertHook], tuple[()]]:
        return InertHook, ()


def _itself(value: Any) -> Any:
    return value
