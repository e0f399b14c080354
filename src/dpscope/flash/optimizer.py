"""The optimizer side of flash clipping: noise, division by the batch size, and the step.

With s = Σ_b c_b v_b from the engine, the gradient that is applied is (s + σC·z) / expected batch size, z standard
normal. For SGD, Adam and AdamW all of it is one pass over each parameter (`FusedUpdate`); any other optimizer finds
the private gradient in `.grad` (`privatise_gradients`). Nothing here knows Opacus.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from dpscope.errors import UserError
from dpscope.flash.kernels.fused_update import fused_adam_, fused_sgd_
from dpscope.flash.kernels.philox_noise import add_noise_
from dpscope.flash.kernels.triton_runtime import use_triton
from dpscope.flash.microbatch import FactoredSum

# Sums are handed to the fused update in pieces of about this size: few launches, and little of the gradient at a time.
PIECE_BYTES = 2**30


class NoiseSource:
    """Keys of the noise stream (see philox_noise), one a use.

    Without a generator a key is 128 bits from the operating system, drawn when it is used: nothing is kept that could
    be saved, searched or shared with a forked process. Given a generator, keys are drawn from it and noise can be
    repeated: its state (a secret, for it gives the noise) may be saved and restored.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator
        self._draws = 0
        self._process = os.getpid()

    def draw(self) -> tuple[int, int]:
        """(seed, offset) of a stream that was not used before. Waits for no device."""
        generator = self.generator
        if generator is None:
            key = os.urandom(16)
            return int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
        if os.getpid() != self._process:
            raise UserError(
                "the noise generator was given before this process was forked: its processes would add the same noise; "
                "call make_private in the process that trains, or leave out noise_generator"
            )
        self._draws += 1
        if generator.device.type == "cpu":
            return _draw_words(generator)
        # A CUDA generator's position is known on the host; drawing from it would wait for the device.
        offset = generator.get_offset()
        generator.set_offset(offset + 4)
        return generator.initial_seed(), offset

    def state(self) -> dict[str, Any] | None:
        """Where the stream stands; None where no generator was given."""
        if self.generator is None:
            return None
        seed = self.generator.initial_seed()
        return {"seed": seed, "draws": self._draws, "generator": self.generator.get_state()}

    def resume(self, state: dict[str, Any]) -> None:
        """Go on where a saved stream stood, with its noise."""
        if self.generator is None:
            raise UserError(
                "the saved noise stream came from a noise generator, and this run has none: give make_private one "
                "(noise_generator=…), or leave out resume_noise"
            )
        self.generator.set_state(state["generator"].cpu())
        self._draws = state["draws"]

    def refuse_to_repeat(self, state: dict[str, Any]) -> None:
        """Refuse a generator that stands where the saved run's stood earlier: it would draw that run's noise again."""
        if self.generator is not None and _stood_earlier(self.generator, state):
            raise UserError(
                "the noise generator stands where that of the saved run stood, and would add its noise again: give it "
                "another seed, or go on with the saved run's noise: load_state_dict(state, resume_noise=True) or "
                "load_checkpoint(…, resume_noise=True)"
            )


def _stood_earlier(generator: torch.Generator, state: dict[str, Any]) -> bool:
    if generator.initial_seed() != state["seed"]:
        return False
    saved = torch.Generator(generator.device)
    if generator.device.type != "cpu":
        saved.set_state(state["generator"].cpu())
        return bool(generator.get_offset() < saved.get_offset())
    saved.manual_seed(state["seed"])
    now = generator.get_state()
    for _ in range(state["draws"]):
        if torch.equal(saved.get_state(), now):
            return True
        _draw_words(saved)
    return False


def _draw_words(generator: torch.Generator) -> tuple[int, int]:
    seed, offset = torch.randint(2**63 - 1, (2,), generator=generator, dtype=torch.int64, device="cpu").tolist()
    return seed, offset


@dataclass(frozen=True, kw_only=True)
class Privatisation:
    """What turns a clipped sum into a private gradient: (sum + noise_std·z)·grad_scale."""

    noise_std: float
    grad_scale: float
    noise: NoiseSource


def privatise_gradients(gradients: Sequence[Tensor], how: Privatisation) -> None:
    """From clipped sums to private gradients, in place, without a full-size temporary."""
    seed, offset = how.noise.draw()
    add_noise_(gradients, how.noise_std, how.grad_scale, seed, offset)


class FusedUpdate:
    """Noise, scaling and the step of `optimizer` in one pass. Its state stays where torch keeps it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._update = _RULES[type(optimizer)]
        # (counter, its version, its value) by parameter: torch's own counters may live on the device. Whoever else
        # moves or replaces one changes its version or identity, and it is read again.
        self._steps: dict[int, tuple[Tensor, int, int]] = {}

    @staticmethod
    def serves(optimizer: Optimizer) -> bool:
        """Whether the update would be torch's own: the exact class, no hooks to be called, plain numbers."""
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
    def pays(optimizer: Optimizer) -> bool:
        """Whether its kernels run where the parameters are; elsewhere torch's own update is as good."""
        return all(
            use_triton("auto", p.device, served=True) for group in optimizer.param_groups for p in group["params"][:1]
        )

    @torch.no_grad()
    def __call__(self, sums: Iterable[FactoredSum], how: Privatisation) -> None:
        """Update every parameter that comes with a clipped sum, piece by piece as sums arrive."""
        groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        pieces: dict[tuple[int, int, bool], _Piece] = {}
        waiting = 0
        for parameter, total, factors in sums:
            group = groups.get(id(parameter))
            if group is None or not parameter.requires_grad:  # frozen since backward
                continue
            step = self._next_step(parameter)
            key = (id(group), step, factors is None)
            piece = pieces.get(key)
            if piece is None:
                piece = pieces[key] = _Piece(group, step, factors)
            piece.parameters.append(parameter)
            piece.sums.append(total)
            waiting += 4 * parameter.numel()  # however many samples: a launch's tables are kept for the next step
            if waiting >= PIECE_BYTES:
                self._apply(pieces, how)
                waiting = 0
        self._apply(pieces, how)

    def _next_step(self, parameter: nn.Parameter) -> int:
        """The number of this step for this parameter, counted from 1. Optimizers that keep no count get 1."""
        state = self.optimizer.state.get(parameter)
        counter = None if state is None else state.get("step")
        if counter is None:
            return 1
        known = self._steps.get(id(parameter))
        if known is not None and known[0] is counter and known[1] == counter._version:
            return known[2] + 1
        return int(counter) + 1

    def _apply(self, pieces: dict[tuple[int, int, bool], _Piece], how: Privatisation) -> None:
        for piece in pieces.values():
            seed, offset = how.noise.draw()
            privacy = {"grad_scale": how.grad_scale, "noise_std": how.noise_std, "seed": seed, "offset": offset}
            self._update(piece, self.optimizer.state, {**privacy, "factors": piece.factors})
            for parameter in piece.parameters:
                state = self.optimizer.state.get(parameter)
                counter = None if state is None else state.get("step")
                if isinstance(counter, Tensor):
                    self._steps[id(parameter)] = (counter, counter._version, piece.step)
        pieces.clear()


@dataclass
class _Piece:
    """Parameters of one group at one step, with their sums, on their way to one launch."""

    group: dict[str, Any]
    step: int
    factors: Tensor | None  # of the samples whose gradients stand for the sums, the same for all
    parameters: list[nn.Parameter] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)


_State = MutableMapping[Any, dict[str, Any]]  # torch's: makes an entry when one is asked for
_Rule = Callable[[_Piece, _State, dict[str, Any]], None]


def _sgd(piece: _Piece, state_of: _State, privacy: dict[str, Any]) -> None:
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
        noise = privacy if first == fresh[0] else {**privacy, "offset": privacy["offset"] + 1}
        fused_sgd_(
            [piece.parameters[i] for i in chosen],
            [piece.sums[i] for i in chosen],
            [buffers[i] for i in chosen] if buffers else (),
            first_step=first,
            **options,
            **noise,
        )


def _adam(piece: _Piece, state_of: _State, privacy: dict[str, Any], *, decoupled: bool = False) -> None:
    group = piece.group
    states = [state_of[parameter] for parameter in piece.parameters]
    moments = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
    for parameter, state in zip(piece.parameters, states, strict=True):
        if "step" not in state:
            where = parameter.device if group.get("fused") else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=where)
        for moment in moments:
            if moment not in state:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    torch._foreach_add_([state["step"] for state in states], 1)
    fused_adam_(
        piece.parameters,
        piece.sums,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else (),
        step=piece.step,
        decoupled_weight_decay=decoupled or group.get("decoupled_weight_decay", False),
        **{key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")},
        **privacy,
    )


def _adamw(piece: _Piece, state_of: _State, privacy: dict[str, Any]) -> None:
    _adam(piece, state_of, privacy, decoupled=True)


_RULES: dict[type[Optimizer], _Rule] = {SGD: _sgd, Adam: _adam, AdamW: _adamw}
