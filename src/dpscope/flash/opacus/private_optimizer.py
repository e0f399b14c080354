"""DPFlashOptimizer: an Opacus optimizer whose clipped sums come from a `FlashEngine`."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from inspect import Parameter, signature
from typing import Any, NoReturn

import torch
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _generate_noise
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from dpscope.errors import UserError
from dpscope.flash.combinations import ADAM_BC, ADAM_BC_UNFUSED, FOREIGN_SCALER
from dpscope.flash.engine import FlashEngine
from dpscope.flash.kernels.triton_runtime import TRITON_DTYPES
from dpscope.flash.opacus.physical_batches import PhysicalBatches
from dpscope.flash.opacus.privacy_spent import PRIVATE_RUN, History, Spending, continued, without_runs
from dpscope.flash.step.microbatch import SumBatch
from dpscope.flash.torch_side.attributes import temporarily
from dpscope.flash.torch_side.captures import refuse_capture
from dpscope.flash.torch_side.frames import outside_graphs
from dpscope.flash.update.captured_update import CapturedUpdate
from dpscope.flash.update.noise_source import NO_KEY, Key, NoiseSource, normal_of_count, used_keys_of
from dpscope.flash.update.optimizer import FusedUpdate, Privatisation, privatise_gradients

_OUTSIDE_OF_GRAPHS = outside_graphs("flash clipping: the step draws its noise, counts and accounts outside of graphs")


class DPFlashOptimizer(DPOptimizer):
    """Opacus's private optimizer, whose clipped sums come from a `FlashEngine`. `make_private` makes one.

    Args:
        optimizer: The ordinary optimizer, which does the update.
        engine: The engine that is attached to the model.
        noise_multiplier: Standard deviation of the noise divided by the sensitivity.
        max_grad_norm: The clipping bound C.
        expected_batch_size: Expected samples of a step, by which a sum is divided if `loss_reduction` is "mean".
        loss_reduction: How the loss combines samples, "mean" or "sum".
        generator: Generator of the noise, for runs that can be repeated. By default keys come from the operating
            system.
        secure_mode: Use Opacus's secure noise.
        fused: Update SGD, Adam and AdamW in the same pass that adds the noise. `.grad` is then None after a step.
            Default: on a GPU with Triton, if the result is that of torch's own update.
        adam_bc: The floor γ′ of DP-AdamBC (Tang et al. 2023), such as 5e-8. Adam then divides by
            √max(v̂ − (σC/B)², γ′) instead of √v̂ + ε: v̂ without the variance of the noise. Always `fused`.

    Raises:
        UserError: An argument is wrong, or the optimizer calls a closure several times in a step.

    Example:
        >>> private = DPFlashOptimizer(
        ...     optimizer, engine=FlashEngine(model), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=8
        ... )
        >>> loss_fn(model(x), y).backward()
        >>> private.step()
    """

    # torch's GradScaler then leaves gradients alone and tells step() that it is there, which refuses.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        engine: FlashEngine,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: int | None,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
        fused: bool | None = None,
        adam_bc: float | None = None,
    ) -> None:
        _require_noise(noise_multiplier)
        closure = signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is Parameter.empty:
            raise UserError(
                f"{type(optimizer).__name__} calls its closure several times a step, and each call would need noise "
                "and accounting of its own: use an optimizer that takes one gradient a step (SGD, AdamW)"
            )
        engine.ranks.refuse_processes(secure_mode=secure_mode)
        if expected_batch_size is not None and expected_batch_size <= 0:
            raise UserError(
                f"the expected batch size is {expected_batch_size}: give the data loader a batch size of at least 1"
            )
        if adam_bc is not None:
            _check_adam_bc(adam_bc, optimizer, fused, secure_mode)
            fused = True
        if fused and not FusedUpdate.supports(optimizer):
            raise UserError(f"{type(optimizer).__name__} with these options has no fused update: leave out fused=True")
        self.engine = engine
        self.noise = NoiseSource(None if secure_mode else generator, used_keys_of(engine.model))
        self._key: Key | None = None  # of the step that runs, if ranks have agreed on it
        self._count_noise = 0.0  # of the step that runs
        self._steps = 0
        self._left_over = 0  # physical batches announced beside that of the last step
        self._own = frozenset(map(id, engine.parameters))
        self._fused_update = FusedUpdate(optimizer, adam_bc) if FusedUpdate.supports(optimizer) else None
        self._fused, self._adam_bc = fused, adam_bc
        self.spending: Spending | None = None  # make_private sets it
        self.physical_batches = PhysicalBatches()
        self.resumes_noise = False  # what load_state_dict does where it is not told
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=generator,
            secure_mode=secure_mode,
        )
        self.spent_before: History = []  # by the run whose state the ordinary optimizer had loaded
        self._take_runs(without_runs({"param_groups": optimizer.param_groups})[1])
        for group in optimizer.param_groups:
            group.pop(PRIVATE_RUN, None)
        engine.running_sums.clear()  # what is in p.grad by now was not clipped
        # Whatever saves or restores the wrapped optimizer, the noise it was trained with is remembered.
        engine.attachment.hooks += [
            optimizer.register_state_dict_post_hook(self._save_run),
            optimizer.register_load_state_dict_pre_hook(self._load_run),
            *engine.ranks.watch_forwards(),
            *engine.ranks.watch_loads(optimizer),
        ]

    @property
    def max_grad_norm(self) -> float:
        """The clipping bound C, which schedulers set here."""
        return self.engine.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        self.engine.max_grad_norm = value

    @property
    def accountant(self) -> Any:
        """The accountant of make_private, whose history is saved with this optimizer; None without one."""
        return None if self.spending is None else self.spending.accountant

    @property
    def padding_share(self) -> float:
        """Share of padding among all rows trained on so far (`make_private(pad_batches=…)`)."""
        return self.engine.padding.share

    @property
    def accumulated_iterations(self) -> int:
        """Micro-batches in this step. Opacus's accountants multiply the sample rate by it."""
        return max(1, self.engine.state.micro_batches)

    @property
    def _is_last_step_skipped(self) -> bool:
        """True if a logical batch is open, under Opacus's name for it."""
        return self.engine.state.accumulating

    @_is_last_step_skipped.setter
    def _is_last_step_skipped(self, value: bool) -> None:
        if value:
            self.engine.state.skip_step()
        else:
            self.engine.state.complete()

    # -- the step ----------------------------------------------------------------------------------------------------

    @_OUTSIDE_OF_GRAPHS
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Clip, add noise, update and account. `closure`, which runs forward and backward, is called once.

        Return what the wrapped optimizer returns; None inside a logical batch and after a fused update.
        Raise UserError if the step would not be private, ValueError if gradients were not cleared since the last step.
        """
        if closure is not None:
            with torch.enable_grad():
                closure()
        trained = self._begin()
        if self._skips():
            return None
        if (fused := self.fused_now()) is not None:
            self._fused_step(fused, trained)
            return None
        self._refuse_adam_bc()
        self._privatise()
        with self._taking():
            result: float | None = self.original_optimizer.step()
        self.physical_batches.take()
        return result

    @_OUTSIDE_OF_GRAPHS
    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """Do all of a step except the update, for code that calls the two halves itself."""
        self._begin()
        self._refuse_adam_bc()
        if self._skips():
            return False
        self._privatise()
        self.physical_batches.take()
        return True

    def _refuse_adam_bc(self) -> None:
        """Refuse an update by torch, which knows no DP-AdamBC."""
        if self._adam_bc is not None:
            raise ADAM_BC_UNFUSED.error(cause="this step")

    def _privatise(self) -> None:
        """Turn the record of backward into the private gradient in `.grad`."""
        self.clip_and_accumulate()
        with self._taking():
            self.add_noise()
            self._account()

    def _taking(self) -> AbstractContextManager[None]:
        """Return a context for taking the step. After an error inside, none of its sums is used again."""
        return self.engine.losing_sums(others=True)

    def _begin(self) -> list[nn.Parameter]:
        """Refuse a step that would not be private. Return the parameters that are trained."""
        refuse_capture()
        if "found_inf" in vars(self):
            del self.found_inf, self.grad_scale
            raise FOREIGN_SCALER.error()
        self.engine.ranks.refuse_processes()
        if not self.engine.attached:
            raise UserError(
                "the flash engine was detached: gradients are no longer clipped; make the model private anew"
            )
        _require_noise(self.noise_multiplier)  # schedulers set it
        trained: list[nn.Parameter] = self.params  # Opacus leaves frozen ones out
        if not self._own.issuperset(map(id, trained)):
            raise UserError(
                "the optimizer was given parameters that are not the private model's: their gradients are not clipped; "
                "make them part of the model before make_private, or leave them out and freeze them"
            )
        self.engine.state.begin_step()
        return trained

    def _skips(self) -> bool:
        """Return True if the physical batch does not end its logical batch. Then add up its sums and keep them."""
        self._left_over = max(0, len(self.physical_batches) - 1)
        in_batches, goes_on = self.engine.state.draw_goes_on, self.draw_goes_on()
        skips = goes_on or in_batches
        self._meet_ranks(skips)
        if skips:
            self.clip_and_accumulate()
            self.physical_batches.take()  # not before: a loop may try the batch again after an error
            self.engine.state.skip_step()
        return skips

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Announce a physical batch, as BatchMemoryManager does when it draws one. `do_skip`: its draw goes on."""
        self.physical_batches.announce(do_skip)

    def draw_goes_on(self) -> bool:
        """Return whether the next step only sums. Drop the sums of another draw, whose rest the loop left out.

        Raise UserError if the draw was given up. Where draws are not counted, it ends with its last batch.
        """
        goes_on, draw = self.physical_batches.next()
        state = self.engine.state
        # Padded batches know their own draw, and workers may have drawn others by now.
        is_known = len(self.physical_batches) > 0 or not self.engine.forwards.expects_padding
        if is_known and state.accumulating and draw != self.physical_batches.summed:
            self.engine.abandon_draw(keeps_batch=True)
        elif state.given_up:
            is_other = self.physical_batches.is_other(draw) if is_known else False if state.knows_draw else None
            if is_other or (is_other is None and not goes_on):
                state.forget_sums()
            if not is_other:
                state.refuse_draw()
        return goes_on

    def _meet_ranks(self, skips: bool) -> None:
        """Wait for the other ranks to take the same step before any sum is sent. Its key is that of the first rank."""
        self._key = None
        doing = f"{'add a batch to' if skips else 'take'} step {self._steps + 1}"
        draw = (lambda: NO_KEY) if skips else self.noise.draw
        key = self.engine.ranks.meet_to_step(doing, self.original_optimizer, self._facts, draw)
        self._key = None if skips else key

    def _facts(self) -> dict[str, Any]:
        """Return what has to be the same on all ranks before a step."""
        how = self._privatisation()
        return {
            "backward passes since the last step": self.engine.state.micro_batches,
            "batches that BatchMemoryManager drew and the loop did not train on": self._left_over,
            "the standard deviation of the noise": how.noise_std,
            "the divisor of the sums": 1 / how.grad_scale,
            "the clipping bound": self.max_grad_norm,
            "the noise of earlier steps": (len(self.noise.used), self.noise.used.last()),
        }

    def clip_and_accumulate(self) -> None:
        """Close the micro-batch and add its clipped sums to those that the engine holds."""
        if self.engine.pending or not self.engine.running_sums:
            self.engine.accumulate()

    def add_noise(self) -> None:
        """Make the private gradient in `.grad` from the clipped sums: noise and division in one pass."""
        parameters = self.params
        self.engine.running_sums.ignore_gradients()
        sums = self.engine.running_sums.of(parameters)
        if self._key is None:
            self._meet_ranks(skips=False)
        how = self._keyed()
        if self.secure_mode:
            with torch.no_grad():
                for _, total in sums:
                    noise = _generate_noise(how.noise_std, total, generator=self.generator, secure_mode=True)
                    total.add_(noise).mul_(how.grad_scale)
        else:
            privatise_gradients(self.original_optimizer, sums, how)
        # Parameters frozen since backward, or another optimizer's, have no noise: their sums stay here.
        self.engine.running_sums.hand_out(parameters)

    def scale_grad(self) -> None:
        """Do nothing: the sums are divided where the noise is added."""

    def fused_now(self) -> FusedUpdate | None:
        """Return the fused update if it is to do the step."""
        if self._fused is False or self.secure_mode or not FusedUpdate.supports(self.original_optimizer):
            return None
        wanted = self._fused or FusedUpdate.is_worthwhile(self.original_optimizer)
        return self._fused_update if wanted else None

    def _fused_step(self, fused: FusedUpdate, trained: list[nn.Parameter]) -> None:
        running = self.engine.running_sums
        running.ignore_gradients()
        batches: Iterable[SumBatch]
        if running:  # sums of earlier micro-batches
            self.clip_and_accumulate()
            held = running.of(trained)
            batches = [SumBatch([parameter for parameter, _ in held], [total for _, total in held], None)]
            del held
        else:
            batches = self.engine.factored_sums()
        with self._taking():
            fused(batches, self._spend())
        self.physical_batches.take()
        if running:
            self.engine.clear_gradients()

    def _spend(self) -> Privatisation:
        """Account for the step, whose norms are taken. Return how its sums are privatised."""
        how = self._keyed()
        self._account()
        return how

    def _keyed(self) -> Privatisation:
        """Return how the step's sums are privatised, with its key. The noise of the rule's count has the same key."""
        key, self._key = self._key, None
        how = self._privatisation().keyed(key)
        self._count_noise = self.engine.clip.count_noise(normal_of_count(how.draw())) if how.noise_std else 0.0
        return how

    # -- the step inside a CUDA graph (graphed/) -----------------------------------------------------------------------

    def make_captured_update(self) -> CapturedUpdate | None:
        """Return what a graph needs to hold noise and update, too; None if they have to follow it."""
        served = all(p.is_contiguous() and p.dtype in TRITON_DTYPES for p in self.engine.parameters)
        fused = self.fused_now() if served and not self.engine.clip.learns else None
        return None if fused is None else fused.make_captured(next(iter(self.engine.parameters)).device)

    def make_state(self) -> None:
        """Make the state of parameters that have taken no step, as the first step would. A graph cannot."""
        if (fused := self.fused_now()) is not None:
            fused.make_state()

    def capture_update(self, update: CapturedUpdate) -> None:
        """Capture closing, noise and update of the micro-batch whose backward pass was captured."""
        assert self._fused_update is not None
        self._fused_update.capture(self.engine.factored_sums(), self._privatisation(), update)

    def replay_update(self, update: CapturedUpdate, replay: Callable[[], None]) -> None:
        """Take a step whose update a graph does: all of `step()` around `replay`, which runs the graph."""
        self._begin()
        self._skips()
        self.engine.running_sums.ignore_gradients()
        with self._taking():
            how = self._spend()
            update.fill(how.draw(), how.numbers)
            replay()
            update.end_replay()
        self.physical_batches.take()

    def _account(self) -> None:
        self._steps += 1
        self.physical_batches.begin()
        observed = self.engine.state.observed
        counted = 0.0 if observed is None else float(observed)
        expected = (self.expected_batch_size or 1) * self.accumulated_iterations
        self.engine.state.apply(self._tell_accountant)
        clip = self.engine.clip
        if clip.learns:  # from the noisy count, for the next step
            released = self.engine.ranks.add_up(counted, self._count_noise)
            clip.end_step(released, expected)

    def _tell_accountant(self) -> None:
        if self.spending is not None:
            self.spending.count(self)
        elif self.step_hook is not None:
            self.step_hook(self)

    def _privatisation(self) -> Privatisation:
        divisor = self.expected_batch_size * self.accumulated_iterations if self.loss_reduction == "mean" else 1
        # C may have changed since a micro-batch was summed.
        clip = max(self.engine.clip.sensitivity(), self.engine.state.largest_clip)
        return Privatisation(
            noise_std=self.engine.clip.noise_multiplier(self.noise_multiplier) * clip,
            grad_scale=1.0 / divisor,
            noise=self.noise,
        )

    # -- bookkeeping -------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, to None if `set_to_none`. After a skipped step, keep the sums of the logical batch."""
        if self.engine.zero_grad(set_to_none):
            self.original_optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state. Its first parameter group holds the private run, too.

        A checkpoint of a run with a noise generator is a secret: with it and the weights before and after a step, the
        noise can be removed. Without a generator nothing of the noise is saved.
        """
        state: dict[str, Any] = dict(self.original_optimizer.state_dict())
        self._save_run(self.original_optimizer, state)  # its hook is gone if the engine is detached
        return state

    def load_state_dict(self, state_dict: dict[str, Any], *, resume_noise: bool | None = None) -> None:
        """Restore the `state_dict` of the wrapped optimizer, and count the privacy that the saved run has spent.

        Noise is fresh by default. `resume_noise=True` sets the generator back to where it stood, so steps from there
        repeat its noise: only for a run that ended at this checkpoint and published nothing later.
        """
        with temporarily(self, resumes_noise=self.resumes_noise if resume_noise is None else resume_noise):
            state, runs = without_runs(state_dict)
            if self.resumes_noise and not runs:
                raise UserError("the state holds no noise stream to resume: it is not of a private run")
            self._take_runs(runs)
            self.original_optimizer.load_state_dict(state)
        if not runs and state["state"] and self.accountant is not None and not self.accountant.history:
            warnings.warn(
                "the optimizer's state holds no privacy history: if the run that saved it was private, load its "
                "accountant too (privacy_engine.load_checkpoint), or ε counts only the steps from here",
                stacklevel=2,
            )

    def _save_run(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Add the private run to a state: every way of saving the wrapped optimizer saves it, and nothing else does."""
        run = {
            "history": [] if self.accountant is None else self.accountant.history,
            "bounds": self.engine.clip.bounds if self.engine.clip.learns else [],
            **({} if self.secure_mode else self.noise.state()),
        }
        first, *others = state_dict["param_groups"]
        state_dict["param_groups"] = [{**first, PRIVATE_RUN: json.dumps(run)}, *others]

    def _load_run(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Take private runs out of a state: every way of loading the wrapped optimizer comes here."""
        state, runs = without_runs(state_dict)
        self._take_runs(runs)
        return state

    def _take_runs(self, runs: Iterable[Mapping[str, Any]]) -> None:
        """Go on from saved runs: count their privacy, and refuse a generator that repeats their noise."""
        for run in runs:
            if not self.secure_mode:
                (self.noise.resume if self.resumes_noise else self.noise.take_over)(run)
            self.spent_before = continued(self.spent_before, run["history"])
            if self.accountant is not None:
                self.accountant.history = continued(self.accountant.history, run["history"])
            if self.engine.clip.learns and run["bounds"]:
                self.engine.clip.bounds = list(run["bounds"])

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UserError(
            "a private optimizer belongs to one model and cannot be copied: save optimizer.state_dict() instead"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self.__deepcopy__({})


def _check_adam_bc(floor: Any, optimizer: Optimizer, fused: bool | None, secure_mode: bool) -> None:
    """Raise UserError if DP-AdamBC cannot be had."""
    if isinstance(floor, bool) or not isinstance(floor, int | float) or not 0 < floor < math.inf:
        raise UserError(f"adam_bc must be a finite number above 0, such as 5e-8, not {floor!r}")
    if not isinstance(optimizer, Adam | AdamW) or any(group["amsgrad"] for group in optimizer.param_groups):
        raise ADAM_BC.error()
    if fused is False or secure_mode:
        raise ADAM_BC_UNFUSED.error(cause="secure_mode" if secure_mode else "fused=False")


def _require_noise(multiplier: float) -> None:
    if not (math.isfinite(multiplier) and multiplier >= 0):
        raise UserError(f"noise_multiplier must be zero or more, not {multiplier}")
