"""One capture: forward, loss, backward, norms, factors and clipped sums of a micro-batch as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash.engine import FlashEngine
from dpscope.flash.padding.rows import Rows, mark_batch
from dpscope.flash.step.captured import StaticInputs
from dpscope.flash.torch_side.arguments import leaves_in, replace_leaves
from dpscope.flash.torch_side.captures import OwnCapture, capturing

Loss = Callable[..., Tensor]  # of a batch


class CapturedStep:
    """A graph, the tensors that it reads and those that it fills.

    call  (args, kwargs) of the loss, without marks of padding; its tensors are copied for each replay
    base  the captured micro-batch to whose sums this one is added; None if it begins the sums
    """

    def __init__(
        self,
        engine: FlashEngine,
        loss: Loss,
        call: tuple[Any, Any],
        size: int,
        rows: Rows | None,
        *,
        base: CapturedStep | None,
        pool: Any,
    ) -> None:
        self.engine, self.size, self.base = engine, size, base
        self._call = replace_leaves(call, lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf)
        self._static = StaticInputs(engine.clip, size, device_of(engine))
        self._own = OwnCapture(device_of(engine))
        with capturing(self._own), engine.capturing(self._static):
            try:
                self._replay, self._loss = record(lambda: self._run(loss, rows), pool)
            except UserError as refusal:
                raise _not_captured(str(refusal)) from refusal
            except RuntimeError as error:
                raise _not_captured(str(error).partition("\n")[0]) from error
            self._batch = engine.captured()
        self._before = settings_of(engine)

    def _run(self, loss: Loss, rows: Rows | None) -> Tensor:
        args, kwargs = self._call if rows is None else mark_batch(self._call, rows)
        found = loss(*args, **kwargs)
        found.backward()  # type: ignore[no-untyped-call]
        self.engine.accumulate()
        return found.detach()

    def fits(self) -> bool:
        """Return whether the model and its settings are those of the capture."""
        now = settings_of(self.engine)
        return len(now) == len(self._before) and all(map(_is_same, now, self._before))

    def replay(self, call: tuple[Any, Any], rows: Rows | None) -> Tensor:
        """Run the graph on another batch of the same shapes; return its loss."""
        with torch.no_grad():
            for static, given in zip(leaves_in(self._call), leaves_in(call), strict=True):
                if isinstance(static, Tensor) and isinstance(given, Tensor):
                    static.copy_(given, non_blocking=True)
            self._static.fill(self.size if rows is None else rows.real)
            self._replay()
            self.engine.take_replayed(self._batch, self.size, rows)
            return self._loss.clone()

    def holds(self, parameter: nn.Parameter, total: Tensor) -> bool:
        """Return whether that sum is the one which this graph fills."""
        return self._batch.sums.get(parameter) is total


def record(run: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], None], Tensor]:
    """Capture what `run` asks the device for. Return what runs it again, and its result, which that fills."""
    graph = torch.cuda.CUDAGraph()
    # Tables of pointers are written on another stream meanwhile, which the other modes forbid.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="relaxed"):
        result = run()
    return graph.replay, result


def has_graphs(device: torch.device) -> bool:
    """Return whether steps on the device can be captured."""
    return device.type == "cuda"


def device_of(engine: FlashEngine) -> torch.device:
    return next(iter(engine.parameters)).device


def settings_of(engine: FlashEngine) -> list[Any]:
    """Return everything that a graph has fixed and that may change: modes, hooks, parameters, options, precision."""
    modules = engine.modules
    kind = device_of(engine).type
    return [
        *(module.training for module in modules),
        *(len(module._forward_hooks) for module in modules),
        *(len(module._forward_pre_hooks) for module in modules),
        *(len(module._backward_hooks) for module in modules),
        *(parameter.requires_grad for parameter in engine.parameters),
        *(parameter.data_ptr() for parameter in engine.parameters),
        *engine.rehearsals.options.values(),
        engine.clip,
        engine.loss_reduction,
        engine.taps,
        len(engine.taps),
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
    ]


def _is_same(a: Any, b: Any) -> bool:
    return is_(a, b) or (type(a) is type(b) and type(a) in (int, float, bool, str) and a == b)


def _not_captured(reason: str) -> UserError:
    return UserError(
        f"the step cannot be captured in a CUDA graph ({reason}). Take waits for the device (.item(), print, "
        "if tensor:) and copies from the CPU out of the loss, or train with the ordinary loop"
    )
