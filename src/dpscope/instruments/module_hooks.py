"""Functions that are called around the forward pass of every module of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn


@contextmanager
def module_hooks(
    model: nn.Module,
    *,
    before: Callable[[str], None] | None = None,
    after: Callable[[str, nn.Module, Any, Any], None],
    always: bool = False,
) -> Iterator[None]:
    """Call `before(name)` and `after(name, module, args, output)`; `always`: also after a forward that raised."""
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if before is not None:
                hooks.callback(module.register_forward_pre_hook(partial(_before, before, name)).remove)
            hooks.callback(module.register_forward_hook(partial(after, name), always_call=always).remove)
        yield


def _before(before: Callable[[str], None], name: str, module: nn.Module, args: Any) -> None:
    before(name)
