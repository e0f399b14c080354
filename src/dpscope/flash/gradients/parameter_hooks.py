"""Hooks on parameters (`p.register_hook`, `p.register_post_accumulate_grad_hook`).

Hooks are called with the ordinary gradient of a parameter, which flash clipping never computes. A hook that scales,
masks or logs it would silently not run, so hooks are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from dpscope.errors import UserError
from dpscope.flash.gradients.slots import Slot


class OwnGradients:
    """Gradients of parameters that the engine asks autograd for itself: hooks on parameters see them, too."""

    are_taken = False  # not by thread: autograd calls hooks in threads of its own

    @contextmanager
    def taken(self) -> Iterator[None]:
        before, self.are_taken = self.are_taken, True
        try:
            yield
        finally:
            self.are_taken = before


OWN_GRADIENTS = OwnGradients()


def refuse_hooks(slots: Iterable[Slot], *, guards: int) -> None:
    """Raise UserError if a parameter has a hook. `guards`: how many are the engine's own."""
    for slot in slots:
        parameter = slot.parameter
        hooks = len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())
        if hooks > guards:
            raise UserError(
                f"{slot.name} has a gradient hook, which flash clipping would never call because it makes no ordinary "
                "gradient: remove the hook, and change the private gradient before the optimizer's update instead"
            )
