"""The optimizer side of flash clipping: noise, division by the batch size, and the step.

With s = Σ_b c_b v_b from the engine, the gradient that is applied is (s + σC·z) / expected batch size, z standard
normal. For SGD, Adam and AdamW all of it is one pass over each parameter (`FusedUpdate`); any other optimizer finds
the private gradient in `.grad` (`privatise_gradients`). Nothing here knows Opacus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from dpscope.flash.kernels.fused_update import fused_adam_, fused_sgd_
from dpscope.flash.kernels.noise import add_noise_
from dpscope.flash.kernels.triton_runtime import use_triton
from dpscope.flash.microbatch import SumBatch
from dpscope.flash.noise_source import NoiseSource
from dpscope.flash.ranks.agreement import Control
from dpscope.flash.ranks.shards import local_parts

# Sums are handed to the fused update in pieces of about this size: few launches, and little of the gradient at a time.
PIECE_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class Privatisation:
    """What turns a clipped sum into a private gradient: (sum + noise_std·z)·grad_scale. For one step."""

    noise_std: float
    grad_scale: float
    noise: NoiseSource
    control: Control | None = None  # where several ranks do the step
    clip: float = 0.0  # C and the learning rates of all groups, added up: as noise_std, the same on all ranks
    learning_rates: float = 0.0

    def draw(self) -> tuple[int, int]:
        """The step's key: on all ranks that of the first."""
        key = self.noise.draw()
        if self.control is None:
            return key
        return self.control.key_of_step(key, (self.noise_std, self.grad_scale, self.clip, self.learning_rates))


def privatise_gradients(
    optimizer: Optimizer, gradients: Sequence[tuple[nn.Parameter, Tensor]], how: Privatisation
) -> None:
    """From clipped sums of parameters to private gradients, in place, without a full-size temporary."""
    starts = how.noise.starts(optimizer)
    add_noise_(
        [gradient for _, gradient in gradients],
        how.noise_std,
        how.grad_scale,
        *how.draw(),
        starts=[starts[id(parameter)] for parameter, _ in gradients],
    )


class FusedUpdate:
    """Noise, scaling and the step of `optimizer` in one pass. Its state stays where torch keeps it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._update = _RULES[type(optimizer)]
        # (counter, its version, its value) by parameter: torch's own counters may live on the device. Whoever else
        # moves or replaces one changes its version or identity, and it is read again.
        self._steps: dict[int, tuple[Tensor, int, int]] = {}

    @staticmethod
    def supports(optimizer: Optimizer) -> bool:
        """Whether the fused update does what torch's does: the exact class, no hooks to be called, plain numbers."""
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
        """Whether its kernels run where the parameters are; elsewhere torch's own update is as good."""
        return all(
            use_triton("auto", p.device, served=True) for group in optimizer.param_groups for p in group["params"][:1]
        )

    @torch.no_grad()
    def __call__(self, batches: Iterable[SumBatch], how: Privatisation) -> None:
        """Update every parameter that comes with a clipped sum, piece by piece as sums arrive."""
        optimizer = self.optimizer
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        starts = how.noise.starts(optimizer)
        seed, offset = how.draw()
        privacy = {"grad_scale": how.grad_scale, "noise_std": how.noise_std, "seed": seed, "offset": offset}
        pieces: dict[_Kind, _Piece] = {}
        waiting = 0
        for parameters, sums, factors in batches:
            states = list(map(optimizer.state.get, parameters))
            for kind, chosen in self._kinds(parameters, states, groups, factors is None).items():
                if kind not in pieces:
                    pieces[kind] = _Piece(groups[id(parameters[chosen[0]])], kind[1], factors)
                whole = len(chosen) == len(parameters)
                added = parameters if whole else [parameters[i] for i in chosen]
                pieces[kind].parameters += added
                pieces[kind].states += states if whole else [states[i] for i in chosen]
                added_sums = sums if whole else [sums[i] for i in chosen]
                pieces[kind].sums += added_sums
                pieces[kind].starts += map(starts.__getitem__, map(id, added))
                # However many samples: tables are kept for the next step. Of a sharded parameter, this rank's part.
                waiting += 4 * sum(map(Tensor.numel, added_sums if factors is None else added))
            if waiting >= PIECE_BYTES:
                self._apply(pieces, privacy)
                waiting = 0
        self._apply(pieces, privacy)

    def _kinds(
        self, parameters: list[nn.Parameter], states: _States, groups: dict[int, dict[str, Any]], summed: bool
    ) -> dict[_Kind, Sequence[int]]:
        """The parameters by what a launch has in common; those that were frozen since backward are in none."""
        found = list(map(groups.get, map(id, parameters)))
        of_groups = list(map(id, found))
        steps = self._next_steps(parameters, states)
        if len(set(steps)) == len(set(of_groups)) == 1 and found[0] is not None and all(map(_IS_LIVE, parameters)):
            return {(of_groups[0], steps[0], summed): range(len(parameters))}  # as a rule
        kinds: dict[_Kind, list[int]] = {}
        for i, parameter in enumerate(parameters):
            if found[i] is not None and parameter.requires_grad:
                kinds.setdefault((of_groups[i], steps[i], summed), []).append(i)
        return dict(kinds)

    def _next_steps(self, parameters: list[nn.Parameter], states: _States) -> list[int]:
        """The number of this step for each parameter, counted from 1. Optimizers that keep no count get 1."""
        steps: list[int] = []
        for parameter, state in zip(parameters, states, strict=True):
            counter = None if state is None else state.get("step")
            if counter is None:
                steps.append(1)
                continue
            known = self._steps.get(id(parameter))
            is_known = known is not None and known[0] is counter and known[1] == counter._version
            steps.append((known[2] if known is not None and is_known else int(counter)) + 1)
        return steps

    def _apply(self, pieces: dict[_Kind, _Piece], privacy: dict[str, Any]) -> None:
        for piece in pieces.values():
            counters = self._update(piece, self.optimizer.state, {**privacy, "factors": piece.factors})
            versions = [counter._version for counter in counters]
            self._steps.update(
                zip(map(id, piece.parameters), zip(counters, versions, repeat(piece.step)), strict=False)
            )
        pieces.clear()


_IS_LIVE = attrgetter("requires_grad")
_States = list[dict[str, Any] | None]  # of the optimizer, one a parameter

_Kind = tuple[int, int, bool]  # of a parameter: its group's id, its step, and whether its sum is made already


@dataclass
class _Piece:
    """Parameters of one group at one step, with their sums, on their way to one launch."""

    group: dict[str, Any]
    step: int
    factors: Tensor | None  # of the samples whose gradients stand for the sums, the same for all
    parameters: list[nn.Parameter] = field(default_factory=list)
    states: _States = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # see kernels/noise.py


_State = MutableMapping[Any, dict[str, Any]]  # torch's: makes an entry when one is asked for
_Rule = Callable[[_Piece, _State, dict[str, Any]], list[Tensor]]  # gives the counters of steps, if there are any


def _sgd(piece: _Piece, state_of: _State, privacy: dict[str, Any]) -> list[Tensor]:
    group = piece.group
    buffers: list[Tensor] = []
    fresh = [True] * len(piece.parameters)
    if group["momentum"]:
        states = [state_of[parameter] for parameter in piece.parameters]
        fresh = [state.get("momentum_buffer") is None for state in states]
        for parameter, state in zip(piece.parameters, states, strict=True):
            if state.get("momentum_buffer") is None:
                # What it holds is ignored on a first step: dampening applies from the second on.
                state["momentum_buffer"] = torch.empty_like(parameter, memory_format=torch.preserve_format)
            buffers.append(state["momentum_buffer"])
    options = {key: group[key] for key in ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")}
    for first in dict.fromkeys(fresh):
        chosen = [index for index, is_fresh in enumerate(fresh) if is_fresh == first]
        fused_sgd_(
            local_parts([piece.parameters[i] for i in chosen]),
            [piece.sums[i] for i in chosen],
            local_parts([buffers[i] for i in chosen]) if buffers else (),
            first_step=first,
            starts=[piece.starts[i] for i in chosen],
            **options,
            **privacy,
        )
    return []


def _adam(piece: _Piece, state_of: _State, privacy: dict[str, Any], *, decoupled: bool = False) -> list[Tensor]:
    group = piece.group
    moments = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
    wanted = {"step", *moments}
    for i, state in enumerate(piece.states):
        if state is None or not wanted <= state.keys():
            piece.states[i] = _with_moments(state_of[piece.parameters[i]], piece.parameters[i], group, moments)
    states = [state for state in piece.states if state is not None]
    counters = [state["step"] for state in states]
    torch._foreach_add_(counters, 1)
    fused_adam_(
        local_parts(piece.parameters),
        piece.sums,
        local_parts([state["exp_avg"] for state in states]),
        local_parts([state["exp_avg_sq"] for state in states]),
        local_parts([state["max_exp_avg_sq"] for state in states]) if group["amsgrad"] else (),
        step=piece.step,
        starts=piece.starts,
        decoupled_weight_decay=decoupled or group.get("decoupled_weight_decay", False),
        **{key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")},
        **privacy,
    )
    return counters


def _with_moments(
    state: dict[str, Any], parameter: nn.Parameter, group: dict[str, Any], moments: Sequence[str]
) -> dict[str, Any]:
    if "step" not in state:
        where = parameter.device if group.get("fused") else "cpu"
        state["step"] = torch.zeros((), dtype=torch.float32, device=where)
    for moment in moments:
        if moment not in state:
            state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return state


def _adamw(piece: _Piece, state_of: _State, privacy: dict[str, Any]) -> list[Tensor]:
    return _adam(piece, state_of, privacy, decoupled=True)


_RULES: dict[type[Optimizer], _Rule] = {SGD: _sgd, Adam: _adam, AdamW: _adamw}
