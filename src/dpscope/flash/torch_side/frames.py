"""Frames that torch.compile traces: the model's forward as one graph, and none of the engine's bookkeeping."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch._dynamo import decorators, eval_frame

from dpscope.errors import UserError
from dpscope.flash.combinations import COMPILED_FORWARD
from dpscope.flash.torch_side.torch_version import OLDEST_COMPILED, is_at_least

_Function = TypeVar("_Function", bound=Callable[..., Any])

_skip: Callable[[Any], Any] | None = getattr(decorators, "skip", None)
# Sets what looks at each new Python frame and gives back what did before. None: frames run as they are.
set_callback: Callable[[Any], Any] | None = _skip and getattr(eval_frame, "set_eval_frame", None)
skip_frame: Callable[[_Function], _Function] = _skip or (lambda function: function)  # what it calls may be compiled


def outside_graphs(reason: str) -> Callable[[_Function], _Function]:
    """Decorate a function that breaks graphs: it runs uncompiled, with all that it calls."""
    disable: Any = torch.compiler.disable

    def decorate(function: _Function) -> _Function:
        try:
            return disable(function, reason=reason)  # type: ignore[no-any-return]
        except TypeError:  # before torch 2.7
            return disable(function)  # type: ignore[no-any-return]

    return decorate


@outside_graphs(
    "flash clipping: capture leaves do not fit this call of a layer, or it runs sample by sample; it runs eagerly"
)
def break_graph(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function uncompiled."""
    return call(*args, **kwargs)


in_graph = torch.compiler.is_dynamo_compiling  # whether torch.compile traces the code that asks


def eagerly() -> AbstractContextManager[Any]:
    """Return a context in which compiled modules run as they were before.

    Where they are refused there is nothing to do, and torch 2.6 loses references to None here, until Python ends.
    """
    if not is_at_least(OLDEST_COMPILED):
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


def uncut_graphs() -> AbstractContextManager[Any]:
    """Return a context in which graphs are not cut where DDP reduces gradients (optimize_ddp)."""
    return torch._dynamo.config.patch(optimize_ddp=False)  # type: ignore[no-any-return]


def is_wrapper(module: object) -> bool:
    """Return True if it is the result of torch.compile(module)."""
    return isinstance(module, eval_frame.OptimizedModule)


def original_of(module: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of torch.compile, if there are any."""
    while is_wrapper(module):
        module = module._orig_mod  # type: ignore[assignment]
    return module


def require_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        compiled = ": torch.compile of a compiled model gives a function; compile it once" if callable(model) else ""
        raise UserError(f"the model must be an nn.Module, but it is a {type(model).__name__}{compiled}")


def refuse_compiled_forwards(model: nn.Module, layers: Collection[nn.Module], around: Collection[nn.Module]) -> None:
    """Raise UserError if the forward of a module with trained `layers` inside was compiled instead of the module.

    Nothing runs before such a function that could give the layers their capture leaves. Not so in the modules `around`
    whose forward is a tap: it calls the compiled function, outside of graphs.
    """
    trained = {layer for layer in layers if any(parameter.requires_grad for parameter in layer.parameters())}
    for name, module in model.named_modules():
        if is_wrapper(module) or module in around or not _is_compiled_function(module.forward):
            continue
        if not trained.isdisjoint(module.modules()):
            raise COMPILED_FORWARD.error(name=name or "the model")


def _is_compiled_function(function: object) -> bool:
    """Return True for results of torch.compile, also behind functools.wraps, but not of torch.compiler.disable."""
    return hasattr(function, "_torchdynamo_orig_callable") and not getattr(function, "_torchdynamo_disable", False)
