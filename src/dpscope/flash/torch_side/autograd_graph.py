"""Autograd's graph: where tensors come from, the leaf that stands for all parameters, and what is saved for backward.

Hooks on saved tensors are those of a checkpoint, of `save_on_cpu` or of the user. Up to 2.7 torch does not expose them,
so the context manager that all of them enter is made to note them.

A checkpoint that runs its block again stops at the last tensor that backward needs. Torch's own operators save their
inputs first and compute then, so the product of a block's last layer is not made again (a third of the products of a
transformer block's forward). An autograd.Function saves when its forward has returned, too late for that: inside a
checkpoint taps call its hooks themselves (`save`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dpscope.flash.torch_side.attributes import temporarily


def in_backward() -> bool:
    """Return True during a backward pass. A forward in it is a checkpoint's rerun."""
    return torch._C._current_graph_task_id() != -1


def in_reentrant_checkpoint() -> bool:
    """Return True while backward runs the function of a reentrant checkpoint, whose forward had no gradients."""
    return type(torch._C._current_autograd_node()).__name__ == "CheckpointFunctionBackward"


def nodes_behind(tensors: list[Tensor]) -> list[Any]:
    """Return the nodes of autograd's graph that tensors come from."""
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen, found = set(nodes), []
    while nodes:
        node = nodes.pop()
        found.append(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return found


def leaves_behind(tensors: list[Tensor]) -> list[Tensor]:
    """Return the leaves that autograd reaches from tensors."""
    return [node.variable for node in nodes_behind(tensors) if hasattr(node, "variable")]


class Anchor:
    """Leaf `tensor` that is an input of every tapped call.

    A backward that records calls `begin_backward` first; and what that returns last, unless it ends with an error.
    `recording` is of the backward pass `graph_task`.
    """

    tensor: Tensor

    def __init__(self, begin_backward: Callable[[], Callable[[], None]]) -> None:
        self._begin_backward = begin_backward
        self.recording = False
        self._set(_leaf())

    def _set(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._node = torch.autograd.graph.get_gradient_edge(tensor).node
        self.graph_task = -1

    @contextmanager
    def renewed(self) -> Iterator[Tensor]:
        """Replace the tensor inside the block by a new one, which no earlier graph leads to."""
        before = self.tensor
        self._set(_leaf())
        try:
            yield self.tensor
        finally:
            self._set(before)

    def is_recording(self) -> bool:
        """Return True if the running backward pass accumulates the gradients of parameters.

        `torch.autograd.grad(loss, x)` and `backward(inputs=[x])` do not: autograd then skips the anchor.
        """
        task = torch._C._current_graph_task_id()
        if task != self.graph_task:
            self.recording = torch._C._will_engine_execute_node(self._node)
            self.graph_task = task
            if self.recording:
                end: Callable[[], None] = self._begin_backward()
                torch.autograd.Variable._execution_engine.queue_callback(end)
        return self.recording


def _leaf() -> Tensor:
    return torch.zeros((), requires_grad=True, device="cpu")


Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]

_top: Callable[[bool], Hooks | None] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


class Entered(threading.local):
    """The hooks that this thread entered and has not left, the innermost last."""

    def __init__(self) -> None:
        self.hooks: list[Hooks] = []


_entered = Entered()


def current_hooks() -> Hooks | None:
    """Return the innermost hooks that pack and unpack saved tensors here; None if there are none."""
    if _top is not None:
        return _top(True)
    return _entered.hooks[-1] if _entered.hooks else None


def without_hooks() -> AbstractContextManager[None]:
    """Return a context in which hooks on saved tensors, of a checkpoint or of the user, see nothing."""
    return nullcontext() if current_hooks() is None else _hooks_taken()


@contextmanager
def _hooks_taken() -> Iterator[None]:
    taken: list[Hooks] = []
    while (hooks := current_hooks()) is not None:
        taken.append(hooks)
        torch._C._autograd._pop_saved_tensors_default_hooks()
        del _entered.hooks[-1:]
    try:
        yield
    finally:
        for hooks in reversed(taken):
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
            if _top is None:
                _entered.hooks.append(hooks)


@contextmanager
def saved_tensors_packed(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Iterator[None]:
    """Put hooks on what autograd saves inside the block, except while torch.func.grad runs, which refuses hooks."""
    graph = torch.autograd.graph
    disable = graph.disable_saved_tensors_hooks

    @contextmanager
    def without_ours(message: str) -> Iterator[None]:
        with without_hooks(), disable(message):
            yield

    with saved_tensors_hooks(pack, unpack), temporarily(graph, disable_saved_tensors_hooks=without_ours):
        yield


def nothing_saved() -> AbstractContextManager[object]:
    """Return a context in which autograd's graph is made and saves no tensors for a backward pass."""
    return saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)


def note_entries(manager: type[saved_tensors_hooks], entered: Entered) -> None:
    """Have the context manager note in `entered` which hooks were entered and not left."""
    enter, leave = manager.__enter__, manager.__exit__

    @wraps(enter)
    def noted_enter(self: saved_tensors_hooks) -> None:
        enter(self)
        entered.hooks.append((self.pack_hook, self.unpack_hook))

    @wraps(leave)
    def noted_leave(self: saved_tensors_hooks, *error: object) -> None:
        entered.hooks.pop()
        leave(self, *error)

    manager.__enter__, manager.__exit__ = noted_enter, noted_leave  # type: ignore[method-assign]


if _top is None:
    note_entries(saved_tensors_hooks, _entered)


# Whether the backward pass that runs was asked to retain its graph; None where torch does not tell.
keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


def save(ctx: Any, *tensors: Tensor | None) -> None:
    """Save tensors like ctx.save_for_backward. Call this before the layer computes."""
    hooks = None if keeps_graph is None else current_hooks()
    if hooks is None or getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint":
        ctx.save_for_backward(*tensors)
    else:
        pack, ctx.unpack = hooks
        ctx.packed = [None if tensor is None else pack(tensor.detach()) for tensor in tensors]


def saved(ctx: Any) -> tuple[Any, ...]:
    """Return the saved tensors like ctx.saved_tensors, and None in place of each None."""
    if ctx.packed is None:
        tensors: tuple[Any, ...] = ctx.saved_tensors
        return tensors
    if ctx.unpack is None:
        raise RuntimeError(
            "a layer is to run backward a second time, and what it saved has been freed: say retain_graph=True the "
            "first time"
        )
    found = tuple(None if each is None else ctx.unpack(each) for each in ctx.packed)
    assert keeps_graph is not None
    if not keeps_graph():  # the hooks hold the checkpoint's input; the loss, alive, holds this node
        ctx.packed, ctx.unpack = (), None
    return found
