"""The optimizer side of flash clipping: noise, division by the batch size, and the step.

With s = Σ_b c_b v_b from the engine, the gradient that is applied is (s + σC·z) / expected batch size, z standard
normal. For SGD, Adam and AdamW all of it is one pass over each parameter (`FusedUpdate`); any other optimizer finds
the private gradient in `.grad` (`privatise_gradients`). Nothing here knows Opacus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from dpscope.flash.kernels.fused_update import adam_numbers, fused_adam_, fused_sgd_, sgd_numbers
from dpscope.flash.kernels.noise import add_noise_
from dpscope.flash.kernels.triton_runtime import use_triton
from dpscope.flash.step.microbatch import GROUP_BYTES, SumBatch
from dpscope.flash.torch_side.shards import local_parts
from dpscope.flash.update.captured_update import CapturedUpdate, Numbers, StepCounts
from dpscope.flash.update.noise_source import NO_KEY, Key, NoiseSource

_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True)
class Privatisation:
    """Parameters of one step that make a clipped sum a private gradient: (sum + noise_std·z)·grad_scale."""

    noise_std: float
    grad_scale: float
    noise: NoiseSource
    key: Key | None = None  # of the step, if it is drawn and marked as used

    def keyed(self, key: Key | None = None) -> Privatisation:
        """Return the same with a step's key, which is marked as used. None draws one."""
        key = self.noise.draw() if key is None else key
        if self.noise_std:
            self.noise.use(key)
        return replace(self, key=key)

    def draw(self) -> Key:
        """Return the step's key, which is marked as used."""
        return self.key or self.keyed().draw()

    @property
    def numbers(self) -> dict[str, float]:
        return {"noise_std": self.noise_std, "grad_scale": self.grad_scale}


def privatise_gradients(
    optimizer: Optimizer, gradients: Sequence[tuple[nn.Parameter, Tensor]], how: Privatisation
) -> None:
    """Turn clipped sums of parameters into private gradients, in place, without a full-size temporary."""
    starts = how.noise.starts(optimizer)
    add_noise_(
        [gradient for _, gradient in gradients],
        how.noise_std,
        how.grad_scale,
        *how.draw(),
        starts=[starts[id(parameter)] for parameter, _ in gradients],
    )


class FusedUpdate:
    """Noise, scaling and the step of `optimizer` in one pass. Its state stays where torch keeps it.

    adam_bc  the floor of DP-AdamBC, of Adam and AdamW
    """

    def __init__(self, optimizer: Optimizer, adam_bc: float | None = None) -> None:
        self.optimizer = optimizer
        self._adam_bc = adam_bc
        self._update = _RULES[type(optimizer)]
        self._counts = StepCounts()

    @staticmethod
    def supports(optimizer: Optimizer) -> bool:
        """Return True if the fused update equals torch's: the exact class, no hooks to call, plain numbers."""
        return (
            type(optimizer) in _RULES
            and not optimizer._optimizer_step_pre_hooks
            and not optimizer._optimizer_step_post_hooks
            and not any(
                group.get("capturable") or group.get("differentiable") or isinstance(group["lr"], Tensor)
                for group in optimizer.param_groups
            )
        )

    @staticmethod
    def is_worthwhile(optimizer: Optimizer) -> bool:
        """Return True if the kernels run on the parameters' devices. Elsewhere torch's update is as good."""
        return all(
            use_triton("auto", p.device, served=True) for group in optimizer.param_groups for p in group["params"][:1]
        )

    def __call__(self, batches: Iterable[SumBatch], how: Privatisation) -> None:
        """Update every parameter that comes with a clipped sum, piece by piece as sums arrive."""
        self._counts.begin_step()
        self._run(batches, how, how.draw(), None)

    def make_state(self) -> None:
        """Make Adam's moments and counters, all zero. Momentum of SGD begins with the first gradient."""
        for group in self.optimizer.param_groups if type(self.optimizer) is not SGD else ():
            for parameter in filter(_IS_TRAINED, group["params"]):
                _with_moments(self.optimizer.state[parameter], parameter, group, _moments(group))

    def make_captured(self, device: torch.device) -> CapturedUpdate | None:
        """Return what `capture` needs; None if state is missing that the next step makes."""
        for group in self.optimizer.param_groups:
            if type(self.optimizer) is SGD and not group["momentum"]:
                continue
            if not all(self.optimizer.state.get(parameter) for parameter in filter(_IS_TRAINED, group["params"])):
                return None
        self._counts.read([state["step"] for state in self.optimizer.state.values() if "step" in state])
        return CapturedUpdate(self.optimizer, self._counts, device)

    def capture(self, batches: Iterable[SumBatch], how: Privatisation, captured: CapturedUpdate) -> None:
        """Update inside the capture of a CUDA graph, for its replays. Draw no key and count no step."""
        self._counts.begin_step()  # or counters would be read from the device
        self._run(batches, how, NO_KEY, captured)
        captured.spend()

    @torch.no_grad()
    def _run(self, batches: Iterable[SumBatch], how: Privatisation, key: Key, captured: CapturedUpdate | None) -> None:
        optimizer = self.optimizer
        group_of: dict[int, _Group] = {}
        for group in optimizer.param_groups:
            group_of |= dict.fromkeys(map(id, group["params"]), group)
        starts = how.noise.starts(optimizer)
        privacy = {**how.numbers, "seed": key[0], "offset": key[1]}
        states = dict(zip(map(id, optimizer.state), optimizer.state.values(), strict=True))
        step = _Step(optimizer.state, states, self._counts, privacy, captured, self._adam_bc)
        pieces: dict[_Kind, _Piece] = {}
        waiting = 0
        for batch in batches:
            waiting += _collect(batch, group_of, starts, pieces)
            as_gradients = batch.factors is not None
            del batch  # the next is made when it is asked for: nothing here holds what this one takes
            if as_gradients or waiting >= GROUP_BYTES:
                self._apply(pieces, step)
                waiting = 0
        self._apply(pieces, step)

    def _apply(self, pieces: dict[_Kind, _Piece], step: _Step) -> None:
        for piece in pieces.values():
            self._update(piece, step)
        pieces.clear()


_Group = dict[str, Any]
_Kind = tuple[int, bool]  # of a parameter: its group's id, and whether its sum is made already
_IS_TRAINED = attrgetter("requires_grad")


def _split(values: Sequence[_Value], *columns: list[Any]) -> Iterator[tuple[_Value, Sequence[list[Any]]]]:
    """Yield each value with its part of the columns. Usually all values are equal."""
    if len(set(values)) == 1:
        yield values[0], columns
        return
    for value in dict.fromkeys(values):
        chosen = [each == value for each in values]
        yield value, [list(compress(column, chosen)) for column in columns]


def _collect(
    batch: SumBatch, group_of: Mapping[int, _Group], starts: Mapping[int, int], pieces: dict[_Kind, _Piece]
) -> int:
    """Add the batch to the sums that wait for an update. Return how many bytes its sums take, or will take.

    Parameters of other optimizers, or frozen since backward, are left out.
    """
    waiting, factors = 0, batch.factors
    trained = list(map(_IS_TRAINED, batch.parameters))
    owners = list(map(group_of.get, map(id, batch.parameters)))
    if not all(trained):
        owners = [owner if is_trained else None for owner, is_trained in zip(owners, trained, strict=True)]
    columns = batch.parameters, batch.tensors, [*batch.rows] or [0] * len(owners)
    for number, (owner, parameters, sums, rows) in _split([*map(id, owners)], owners, *columns):
        if owner[0] is None:
            continue
        piece = pieces.setdefault((number, factors is None), _Piece(owner[0], factors))
        piece.parameters += parameters
        piece.sums += sums
        piece.factor_rows += rows
        piece.starts += map(starts.__getitem__, map(id, parameters))
        # However many samples: tables are kept for the next step. Of a sharded parameter, this rank's part.
        waiting += 4 * sum(map(Tensor.numel, sums if factors is None else parameters))
    return waiting


@dataclass
class _Piece:
    """Parameters of one group, with their sums, on their way to one launch."""

    group: _Group
    factors: Tensor | None  # of the samples whose gradients stand for the sums, (B,), or (G, B)
    parameters: list[Tensor] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # see kernels/noise.py
    factor_rows: list[int] = field(default_factory=list)

    def split(
        self, values: Sequence[_Value], states: list[list[Tensor]]
    ) -> Iterator[tuple[_Value, _Piece, Sequence[list[Tensor]]]]:
        """Split the piece and the columns of its states by equal values. Of shards, take this rank's parts."""
        columns: list[list[Any]] = [self.parameters, self.sums, self.starts, self.factor_rows, *states]
        for value, (parameters, sums, starts, rows, *of_state) in _split(values, *columns):
            piece = _Piece(self.group, self.factors, local_parts(parameters), sums, starts, rows)
            yield value, piece, list(map(local_parts, of_state))


_State = MutableMapping[Any, dict[str, Any]]  # torch's: makes an entry when one is asked for


@dataclass
class _Step:
    """The step that an update belongs to: the optimizer's state, key and noise, and the capture that it is in."""

    state_of: _State
    states: Mapping[int, dict[str, Any]]  # by id of the parameter: a tensor's hash is a function of Python's
    counts: StepCounts
    privacy: dict[str, Any]
    captured: CapturedUpdate | None
    adam_bc: float | None

    def row(self, numbers: Numbers, step: int, piece: _Piece, counters: Sequence[Tensor] = ()) -> Tensor | None:
        """Return where a launch inside a graph reads its key and numbers."""
        if self.captured is None:
            return None
        return self.captured.add(piece.group, step, numbers, piece.parameters, *counters)


_Rule = Callable[[_Piece, _Step], None]


def _launch(
    kernel: Callable[..., None], part: _Piece, columns: Sequence[Any], row: Tensor | None, taken: _Step, **options: Any
) -> None:
    """Update the parameters of a piece, whose states are `columns`."""
    where = {"starts": part.starts, "factors": part.factors, "factor_rows": part.factor_rows, "row": row}
    options |= {"maximize": part.group["maximize"], **taken.privacy}
    kernel(part.parameters, part.sums, *columns, **where, **options)


def _sgd(piece: _Piece, step: _Step) -> None:
    group = piece.group
    fresh = [True] * len(piece.parameters)
    buffers: list[list[Tensor]] = []
    if group["momentum"]:
        states = [step.state_of[parameter] for parameter in piece.parameters]
        fresh = [state.get("momentum_buffer") is None for state in states]
        for parameter, state in zip(piece.parameters, states, strict=True):
            if state.get("momentum_buffer") is None:
                # What it holds is ignored on a first step: dampening applies from the second on.
                state["momentum_buffer"] = torch.empty_like(parameter, memory_format=torch.preserve_format)
        buffers = [[state["momentum_buffer"] for state in states]]

    def options() -> dict[str, Any]:
        return {key: group[key] for key in ("lr", "momentum", "dampening", "weight_decay")}

    for first, part, columns in piece.split(fresh, buffers):
        row = step.row(lambda _, privacy: sgd_numbers(**options(), **privacy), 1, part)
        _launch(fused_sgd_, part, columns, row, step, first_step=first, nesterov=group["nesterov"], **options())


def _adam(piece: _Piece, step: _Step, *, decoupled: bool = False) -> None:
    group = piece.group

    def options() -> dict[str, Any]:
        found = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
        found["decoupled_weight_decay"] = decoupled or group.get("decoupled_weight_decay", False)
        return {**found, "floor": step.adam_bc}

    moments = _moments(group)
    entries: Callable[[Any], tuple[Tensor, ...]] = itemgetter("step", *moments)
    try:
        rows = list(map(entries, map(step.states.get, map(id, piece.parameters))))
    except (TypeError, KeyError):  # no state, or not all of it
        made = (_with_moments(step.state_of[parameter], parameter, group, moments) for parameter in piece.parameters)
        rows = list(map(entries, made))
    states = list(map(list, zip(*rows, strict=True)))  # the step counters, and each of the moments
    for count, part, (counters, *columns) in piece.split(step.counts.next_values(states[0]), states):
        if step.captured is None:
            step.counts.advance(counters, count)
        row = step.row(lambda n, privacy: adam_numbers(step=n, **options(), **privacy), count, part, counters)
        _launch(fused_adam_, part, columns, row, step, step=count, amsgrad=group["amsgrad"], **options())


def _moments(group: _Group) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))


def _with_moments(
    state: dict[str, Any], parameter: Tensor, group: dict[str, Any], moments: Sequence[str]
) -> dict[str, Any]:
    if "step" not in state:
        where = parameter.device if group.get("fused") else "cpu"
        state["step"] = torch.zeros((), dtype=torch.float32, device=where)
    for moment in moments:
        if moment not in state:
            state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return state


_RULES: dict[type[Optimizer], _Rule] = {SGD: _sgd, Adam: _adam, AdamW: partial(_adam, decoupled=True)}
