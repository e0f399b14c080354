"""make_graphed_step: a training loop's step as one call, which replays a CUDA graph.

The first calls of each shape run eagerly: they are ordinary private steps, in which the model is verified and kernels
are compiled. Then the step is captured: forward, loss, backward, norms, factors, clipped sums, noise and update. Each
further call copies its batch into the graph's inputs and replays it. The noise key, the learning rate and the step
count are written to device memory before each replay, which uses them up (update/captured_update.py).

Micro-batches of a larger step add up in graphs that end with the clipped sums; the update follows the last of them. So
it does for optimizers without a fused update, and for clipping rules that learn from the norms.

Passes that are due for verification (sample_rows/schedule.py) and empty draws run eagerly in between.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from dpscope.errors import UserError
from dpscope.flash.combinations import GRAPHED_BLOCKS, GRAPHED_RANKS, GRAPHED_SCALER
from dpscope.flash.graphed.captured_step import CapturedStep
from dpscope.flash.graphed.settings import device_of
from dpscope.flash.opacus.private_optimizer import DPFlashOptimizer
from dpscope.flash.padding.rows import Rows, rows_in, without_marks
from dpscope.flash.sample_rows.rehearsed_calls import NotVerified
from dpscope.flash.torch_side.arguments import leaves_in, rows_of, sizes_of, tensors_in
from dpscope.flash.torch_side.captures import has_graphs
from dpscope.random_states import cuda_devices, random_states_kept

WARMUP = 2
"""Eager steps of each shape before it is captured."""
MOST_CHANGES = 8
"""Graphs that are thrown away before there is a warning."""


class GraphedStep:
    """A private step as a function of a batch. Made by `make_graphed_step`."""

    def __init__(self, loss: Callable[..., Tensor], optimizer: DPFlashOptimizer, *, warmup: int = WARMUP) -> None:
        self.loss, self.optimizer, self.engine = loss, optimizer, optimizer.engine
        self.replays = 0
        self._warmup = max(1, warmup)
        self._seen: Counter[Any] = Counter()
        self._warm: set[Any] = set()  # sizes of batches that have run without a step
        self._captured: dict[Any, CapturedStep] = {}
        self._pool: Any = None
        self._changes = 0  # after which a graph did not fit any more

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Train on a batch: backward, clipping, noise, update, and gradients cleared. Return the loss, detached."""
        if not torch.is_grad_enabled():
            raise UserError("a graphed step trains: call it outside of torch.no_grad()")
        captured, rows, plain = self._find((args, kwargs))
        if captured is None:
            found = self._eagerly((args, kwargs))
        else:
            self.replays += 1
            found = captured.replay(plain, rows)
        if captured is None or captured.update is None:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return found

    def _find(self, call: tuple[Any, Any]) -> tuple[CapturedStep | None, Rows | None, tuple[Any, Any]]:
        """Return the graph that runs a batch, made if it is time; None if the batch has to run eagerly."""
        engine = self.engine
        rows, plain = rows_in(call), without_marks(call)
        if not has_graphs(device_of(engine)) or engine.rows_are_grouped:
            return None, rows, plain
        self._require_tensors(plain)
        size = rows.size if rows is not None else self._size_of(plain)
        engine.forwards.close_recorded()  # of a backward pass by hand, whose sums this batch is added to
        base, is_added = self._base()
        whole = not is_added and self.optimizer.next_ends_step(rows is not None and rows.more)
        key = _sizes(plain), size, id(base), whole
        if not size or (is_added and base is None) or not self._is_ready(key) or not engine.forwards.begin_replay(rows):
            return None, rows, plain
        if key not in self._captured:
            try:
                self._captured[key] = self._capture(plain, size, rows, base, whole)
            except NotVerified:
                engine.rehearsals.schedule.begin_again()
                return None, rows, plain
        return self._captured[key], rows, plain

    def warm_up(self, *args: Any, **kwargs: Any) -> None:
        """Run a batch of a new shape without training on it. The next call of that shape is captured and replayed.

        Nothing is accounted for, because nothing of the batch reaches the model. The state of random numbers is kept.
        """
        if self.engine.running_sums or self.engine.pending:
            raise UserError("warm_up comes between steps: the sums of a step that has begun would be lost")
        dropped = self.engine.nonfinite_samples
        with random_states_kept(cuda_devices(self.engine.model)):
            self._eagerly((args, kwargs))
            self.engine.state.skip_step()  # the second one is added to the first, as in a logical batch
            self._eagerly((args, kwargs))
            self.engine.state.complete()
        self.optimizer.zero_grad()
        self.engine.nonfinite_samples = dropped
        self.optimizer.make_state()
        self._warm.add(_sizes(without_marks((args, kwargs))))

    def _is_ready(self, key: Any) -> bool:
        """Return whether a shape may be replayed: it has run eagerly often enough since the last change."""
        self._seen[key] += 1
        captured = self._captured.get(key)
        if captured is not None and not captured.fits():
            # What adds to its sums goes with it.
            self._captured = {at: each for at, each in self._captured.items() if captured not in (each, each.base)}
            self._seen[key] = self._warmup
            self._warm.clear()
            self._note_change()
        return self._seen[key] > self._warmup or key[0] in self._warm

    def _note_change(self) -> None:
        """Warn if graphs are discarded so often that they do not pay off."""
        self._changes += 1
        if self._changes == MOST_CHANGES and self.replays < 4 * MOST_CHANGES:
            warnings.warn(
                "the step is captured again and again, because the model, the optimizer or a variable of the loss "
                "changes between steps: give the loss numbers that change as tensors, among its arguments",
                stacklevel=5,
            )

    def _base(self) -> tuple[CapturedStep | None, bool]:
        """Return the capture whose sums the engine holds, if any, and whether the engine holds sums."""
        for parameter, total in self.engine.running_sums.items():
            return next((each for each in self._captured.values() if each.holds(parameter, total)), None), True
        return None, False

    def _size_of(self, call: tuple[Any, Any]) -> int:
        count = self.engine.forwards.batch_size_of
        return rows_of(leaves_in(call)[0]) if count is None else count(*call)

    def _require_tensors(self, call: tuple[Any, Any]) -> None:
        """Refuse arguments that cannot be replaced for each replay of a graph."""
        leaves = leaves_in(call)
        if not leaves:
            raise UserError("a graphed step takes the tensors of its batch as arguments")
        if any(isinstance(leaf, PackedSequence) for leaf in leaves):
            raise UserError(
                "a graphed step takes no packed sequence, whose lengths a graph fixes: use the ordinary loop"
            )
        for tensor in tensors_in(call):
            if tensor.device != device_of(self.engine):
                raise UserError(
                    f"a graphed step was given a tensor on {tensor.device}: move the batch to the model's device first "
                    "(x.to(device, non_blocking=True))"
                )

    def _capture(
        self, call: tuple[Any, Any], size: int, rows: Rows | None, base: CapturedStep | None, whole: bool
    ) -> CapturedStep:
        if self._pool is None and torch.cuda.is_available():
            self._pool = torch.cuda.graph_pool_handle()
        return CapturedStep(self.optimizer, self.loss, call, size, rows, base=base, whole=whole, pool=self._pool)

    def _eagerly(self, call: tuple[Any, Any]) -> Tensor:
        args, kwargs = call
        found = self.loss(*args, **kwargs)
        found.backward()  # type: ignore[no-untyped-call]
        self.engine.accumulate()
        return found.detach()


def _sizes(call: tuple[Any, Any]) -> Any:
    """Return a key of the batches that one graph can run: sizes, dtypes, numbers, and which tensors are the same."""
    given = [id(tensor) for tensor in tensors_in(call)]
    return sizes_of(call), tuple(map(given.index, given))


def make_graphed_step(loss: Callable[..., Tensor], optimizer: DPFlashOptimizer, *, warmup: int = WARMUP) -> GraphedStep:
    """Return a function that takes a batch and does a whole private step, replayed as a CUDA graph on a GPU.

    Args:
        loss: Function of a batch's tensors, on the model's device, that calls the private model and returns the loss.
        optimizer: Private optimizer of the model (`PrivacyEngine.make_private`, or `DPFlashOptimizer`).
        warmup: Number of steps of each shape that run eagerly before it is captured.

    Returns:
        A callable. It replaces `loss.backward()`, `optimizer.step()` and `optimizer.zero_grad()`, and returns the loss.

    Raises:
        UserError: If the optimizer is not flash clipping's, or its model cannot be captured.

    Example:
        >>> engine = PrivacyEngine()
        >>> model, optimizer, loader = engine.make_private(
        ...     module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)
        >>> step = make_graphed_step(lambda x, y: loss_fn(model(x), y), optimizer)
        >>> for x, y in loader:
        ...     loss = step(x, y)
    """
    if not isinstance(optimizer, DPFlashOptimizer):
        raise UserError(
            f"make_graphed_step needs the optimizer that make_private returned, not {type(optimizer).__name__}"
        )
    engine = optimizer.engine
    if engine.ranks is not None:
        raise GRAPHED_RANKS.error()
    if engine.blocks is not None:
        raise GRAPHED_BLOCKS.error()
    if callable(engine.loss_scale) or isinstance(engine.loss_scale, Tensor):
        raise GRAPHED_SCALER.error()
    return GraphedStep(loss, optimizer, warmup=warmup)
