"""make_graphed_step: a training loop's step as one call, which replays a CUDA graph.

The first calls of each shape run eagerly: they are ordinary private steps, in which the model is verified and kernels
are compiled. Then the step is captured: forward, loss, backward, norms, factors, clipped sums, noise and update. Each
further call copies its batch into the graph's inputs and replays it. The noise key, the learning rate and the step
count are written to device memory before each replay, which uses them up (update/captured_update.py).

Micro-batches of a larger step add up in graphs that end with the clipped sums; the update follows the last of them. So
it does for optimizers without a fused update, and for clipping rules that learn from the norms.

Passes that are due for verification (sample_rows/schedule.py) and empty draws run eagerly in between. A graph is thrown
away when something changes that it has fixed (`Settings`).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from operator import is_
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dpscope.errors import UserError
from dpscope.flash.combinations import GRAPHED_BLOCKS, GRAPHED_RANKS, GRAPHED_SCALER
from dpscope.flash.engine import FlashEngine
from dpscope.flash.opacus.private_optimizer import DPFlashOptimizer
from dpscope.flash.padding.rows import Rows, mark_batch, rows_in, without_marks
from dpscope.flash.sample_rows.verification import NotVerified
from dpscope.flash.step.microbatch import StaticInputs
from dpscope.flash.torch_side.arguments import leaves_in, replace_leaves, rows_of, sizes_of, tensors_in
from dpscope.flash.torch_side.captures import OwnCapture, as_captured, capturing, has_graphs, record
from dpscope.random_states import RandomStates, cuda_devices, random_states_kept

CONTENTS = (
    *("_modules", "_parameters", "_buffers"),
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
)
"""Dictionaries of a module whose contents a forward and a backward pass depend on."""
GLOBAL_HOOKS = [getattr(nn.modules.module, f"_global{name}") for name in CONTENTS if name.endswith("hooks")]


def device_of(engine: FlashEngine) -> torch.device:
    return next(iter(engine.parameters)).device


class Settings(NamedTuple):
    """Everything that a graph has fixed and that may change: objects, and what is made anew whenever it is read."""

    objects: list[Any]
    values: list[Any]

    @classmethod
    def of(cls, optimizer: DPFlashOptimizer, loss: Callable[..., Tensor]) -> Settings:
        engine = optimizer.engine
        kind, modules = device_of(engine).type, engine.verification.options.modules
        held = [vars(module) for module in modules]
        inside = [own[name] for own in held for name in CONTENTS]
        objects = [
            *chain.from_iterable(map(dict.values, chain(held, inside, GLOBAL_HOOKS))),
            *(parameter.requires_grad for parameter in engine.parameters),
            *engine.verification.options.values(),  # of objects that modules hold, too
            *held_by(loss, {id(module) for module in modules}),
            *(value for name, value in vars(engine.clip).items() if name != "bounds"),  # which replays are given
            engine.clip,
            engine.loss_reduction,
            engine.loss_scale,
            engine.attachment.taps,  # tapping the model again makes a new list
            optimizer.noise_multiplier == 0,
            optimizer.fused_now(),  # hooks of the optimizer rule it out, and are called after the graph
            torch.is_autocast_enabled(kind),
            torch.get_autocast_dtype(kind),
            torch.backends.cudnn.allow_tf32,
            torch.are_deterministic_algorithms_enabled(),
        ]
        buffers = (buffer for own in held for buffer in own["_buffers"].values() if buffer is not None)
        addresses = map(Tensor.data_ptr, chain(engine.parameters, buffers))
        return cls(objects, [len(engine.attachment.taps), torch.get_float32_matmul_precision(), *addresses])

    def is_same(self, other: Settings) -> bool:
        if self.values != other.values or len(self.objects) != len(other.objects):
            return False
        return all(map(is_, self.objects, other.objects)) or all(map(_is_same, self.objects, other.objects))


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and type(a) in (int, float, bool, str, MethodType) and a == b)


def held_by(value: Any, known: set[int], names: Sequence[str] = ()) -> Iterator[Any]:
    """Yield what a loss function reads besides its arguments: closure variables, globals, defaults, attributes.

    Functions, modules and objects among these are searched too, unless they are `known`. Of objects, only the
    attributes in `names` are searched. Contents of lists, dictionaries and library functions are not searched.
    """
    if id(value) in known:
        return
    known.add(id(value))
    parts: list[Any] = []
    if isinstance(value, partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, MethodType):
        names = getattr(getattr(value.__func__, "__code__", None), "co_names", ())
        parts = [value.__self__, value.__func__]
    elif isinstance(value, nn.Module):
        own = vars(value)
        parts = [*own.values(), *(part for name in CONTENTS for part in own[name].values())]
    elif _is_own(value) and isinstance(value, FunctionType):
        names = value.__code__.co_names
        around = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]  # filled ones
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        parts = [*around, *(value.__globals__.get(name) for name in names), *defaults]
    elif _is_own(value) and not isinstance(value, (type, ModuleType, Tensor)) and hasattr(value, "__dict__"):
        parts = [vars(value)[name] for name in names if name in vars(value)]
    yield from parts
    for part in parts:
        yield from held_by(part, known, names)


def _is_own(value: Any) -> bool:
    """Return whether a function or an object is the user's, not a library's."""
    where = value.__module__ if isinstance(value, FunctionType) else type(value).__module__
    return not (where or "").startswith(("torch", "builtins", "dpscope", "transformers", "numpy"))


Loss = Callable[..., Tensor]  # of a batch


class CapturedStep:
    """A graph, the tensors that it reads and those that it fills.

    call   (args, kwargs) of the loss, without marks of padding; its tensors are copied for each replay
    base   the captured micro-batch to whose sums this one is added; None if it begins the sums
    whole  whether the micro-batch is a step: then noise and update are in the graph, if the optimizer lets them
    """

    def __init__(
        self,
        optimizer: DPFlashOptimizer,
        loss: Loss,
        call: tuple[Any, Any],
        size: int,
        rows: Rows | None,
        *,
        base: CapturedStep | None,
        whole: bool,
        pool: Any,
    ) -> None:
        self.optimizer, self.engine = optimizer, (engine := optimizer.engine)
        self.size, self.base = size, base
        self.update = optimizer.make_captured_update() if whole else None
        self._call = replace_leaves(call, lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf)
        self._static = StaticInputs(engine.clip, size, device_of(engine))
        self._own = OwnCapture()
        options = engine.verification.options
        before, random_states = options.values(), RandomStates.now()
        with capturing(self._own), engine.capturing(self._static):
            try:
                self._replay, self._loss = record(lambda: self._run(loss, rows), pool)
            except (NotVerified, torch.OutOfMemoryError):
                raise
            except UserError as refusal:
                raise _not_captured(str(refusal)) from refusal
            except RuntimeError as error:
                raise _not_captured(str(error).partition("\n")[0]) from error
            self._sums, self._clipped = engine.captured()
        if (changed := options.changed_since(before)) is not None:
            raise _not_captured(f"forward changes {changed!r}, which would stay as it is in replays")
        if not random_states.equals(RandomStates.now()):
            raise _not_captured("forward or loss draws random numbers on the CPU, which replays would repeat")
        self._loss_function, self._before = loss, Settings.of(optimizer, loss)

    def _run(self, loss: Loss, rows: Rows | None) -> Tensor:
        args, kwargs = self._call if rows is None else mark_batch(self._call, rows)
        with as_captured():
            found = loss(*args, **kwargs)
            found.backward()  # type: ignore[no-untyped-call]
        if self.update is None:
            self.engine.accumulate()
        else:
            self.optimizer.capture_update(self.update)
        return found.detach()

    def fits(self) -> bool:
        """Return whether the model, the optimizer and their settings are those of the capture."""
        now = Settings.of(self.optimizer, self._loss_function)
        return now.is_same(self._before) and (self.update is None or self.update.fits())

    def replay(self, call: tuple[Any, Any], rows: Rows | None) -> Tensor:
        """Run the graph on another batch of the same shapes, and the step if it is whole; return its loss."""
        with torch.no_grad():
            for static, given in zip(tensors_in(self._call), tensors_in(call), strict=True):
                static.copy_(given, non_blocking=True)
            real = self.size if rows is None else rows.real
            self._static.fill(real)
            with self.engine.losing_sums(others=bool(self.engine.running_sums)):
                self.engine.count_replay(self.size, rows)
                if self.update is None:
                    self._replay()
                else:
                    self.optimizer.replay_update(self.update, self._replay)
                self.engine.take_replayed(self._sums, self._clipped, real)
            return self._loss.clone()

    def holds(self, parameter: nn.Parameter, total: Tensor) -> bool:
        """Return whether the sum is the one that this graph fills."""
        return self._sums.get(parameter) is total


def _not_captured(reason: str) -> UserError:
    return UserError(
        f"the step cannot be captured in a CUDA graph ({reason}). Take waits for the device (.item(), print, "
        "if tensor:) and copies from the CPU out of the loss, or train with the ordinary loop"
    )


# -- the step ----------------------------------------------------------------------------------------------------------


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
        goes_on = self.optimizer.draw_goes_on()
        captured, rows, plain = self._find((args, kwargs), goes_on)
        if captured is None:
            found = self._eagerly((args, kwargs))
        else:
            self.replays += 1
            found = captured.replay(plain, rows)
        if captured is None or captured.update is None:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return found

    def _find(self, call: tuple[Any, Any], goes_on: bool) -> tuple[CapturedStep | None, Rows | None, tuple[Any, Any]]:
        """Return the graph that runs a batch, made if it is time; None if the batch has to run eagerly."""
        engine = self.engine
        rows, plain = rows_in(call), without_marks(call)
        if not has_graphs(device_of(engine)) or engine.rows_are_grouped:
            return None, rows, plain
        self._require_tensors(plain)
        count = engine.forwards.batch_size_of
        size = rows.size if rows is not None else rows_of(leaves_in(plain)[0]) if count is None else count(*plain)
        engine.forwards.close_recorded()  # of a backward pass by hand, whose sums this batch is added to
        base, is_added = self._base()
        whole = not (is_added or goes_on or (rows is not None and rows.more))  # it ends its logical batch
        key = _sizes(plain), size, id(base), whole
        if not size or (is_added and base is None) or not self._is_ready(key) or not engine.forwards.begin_replay(rows):
            return None, rows, plain
        if key not in self._captured:
            try:
                if self._pool is None and torch.cuda.is_available():
                    self._pool = torch.cuda.graph_pool_handle()
                self._captured[key] = CapturedStep(
                    self.optimizer, self.loss, plain, size, rows, base=base, whole=whole, pool=self._pool
                )
            except NotVerified:
                engine.verification.schedule.begin_again()
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
            for _ in range(2):
                self._eagerly((args, kwargs))
                self.engine.accumulate()
                self.engine.state.skip_step()  # the second one is added to the first, as in a logical batch
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
            self._changes += 1
            if self._changes == MOST_CHANGES and self.replays < 4 * MOST_CHANGES:  # graphs do not pay off
                warnings.warn(
                    "the step is captured again and again, because the model, the optimizer or a variable of the loss "
                    "changes between steps: give the loss numbers that change as tensors, among its arguments",
                    stacklevel=4,
                )
        return self._seen[key] > self._warmup or key[0] in self._warm

    def _base(self) -> tuple[CapturedStep | None, bool]:
        """Return the capture whose sums the engine holds, if any, and whether the engine holds sums."""
        for parameter, total in self.engine.running_sums.items():
            return next((each for each in self._captured.values() if each.holds(parameter, total)), None), True
        return None, False

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

    def _eagerly(self, call: tuple[Any, Any]) -> Tensor:
        args, kwargs = call
        try:
            with as_captured() if has_graphs(device_of(self.engine)) else nullcontext():
                found = self.loss(*args, **kwargs)
                found.backward()  # type: ignore[no-untyped-call]
        except BaseException:
            self.engine.state.drop()  # a call that is tried again begins anew
            raise
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
    if engine.ranks.several:
        raise GRAPHED_RANKS.error()
    if engine.blocks is not None:
        raise GRAPHED_BLOCKS.error()
    if callable(engine.loss_scale) or isinstance(engine.loss_scale, Tensor):
        raise GRAPHED_SCALER.error()
    return GraphedStep(loss, optimizer, warmup=warmup)
