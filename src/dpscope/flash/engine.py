"""FlashEngine: exact per-sample clipping with one ordinary loss.backward().

Guarantee: with C = `max_grad_norm`, every sample's share of p.grad, over all parameters together, has a norm of at most
C up to rounding; a sample whose gradient is not finite has no share. No noise is added and nothing is divided here.

A micro-batch is everything between two closings: all forward passes before a backward, and all backward passes until
the next forward with gradients enabled (or `finish()`). Row b of each of those forward passes is the same sample b.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash.attachment import Attachment
from dpscope.flash.checkpointing.checkpointed_blocks import BetweenBlocks, CheckpointedBlocks
from dpscope.flash.checkpointing.closing import Closing
from dpscope.flash.combinations import PADDED_ROWS
from dpscope.flash.compiled.traced import GraphRecorder
from dpscope.flash.gradients.clip_rules import Bounds, ClipRule, PartOfRule, check_rule, make_rule
from dpscope.flash.gradients.contributions import Contribution
from dpscope.flash.gradients.explanation import PathTable, PerSampleModule, describe_per_sample, explain_slots
from dpscope.flash.gradients.memory_budget import MemoryBudget, MemoryLimit
from dpscope.flash.gradients.paths import FORCEABLE, PathRules
from dpscope.flash.gradients.slots import RowGroups, Slot, refuse_hooks
from dpscope.flash.layers.opaque import OpaqueTap
from dpscope.flash.padding.rows import PaddingCount, Rows
from dpscope.flash.ranks.ranks import ranks_of
from dpscope.flash.sample_rows.forward_passes import BatchSizeOf, ForwardPasses
from dpscope.flash.sample_rows.verification import Verification
from dpscope.flash.step.microbatch import Clipped, MicroBatch, Normed, RunningSum, StaticInputs, SumBatch
from dpscope.flash.step.step_state import Recorded, RunningSums, StepState
from dpscope.flash.taps.recorder import Recorder
from dpscope.flash.torch_side.attributes import temporarily
from dpscope.flash.torch_side.autocast import SharedCast, no_autocast
from dpscope.flash.torch_side.autograd_graph import Anchor
from dpscope.flash.torch_side.captures import own_capture
from dpscope.flash.torch_side.frames import require_module
from dpscope.flash.torch_side.grad_clipping import allow_no_gradients

LOSS_REDUCTIONS = ("mean", "sum")


class FlashEngine:
    """Engine that clips each sample's gradient in one ordinary backward pass.

    It stays attached to the model until `detach()` or the end of a `with` block. It adds no noise; `PrivacyEngine`
    trains privately.

    Args:
        model: The model to train. It may be compiled, checkpointed, or spread by DDP or FSDP2.
        max_grad_norm: The clipping bound C. A list for `clipping="per_layer"`, a dictionary for `"per_group"`.
        clipping: The clipping rule: its name, or a `ClipRule`.
        loss_reduction: How the loss combines samples, "mean" or "sum".
        path: Use "gram", "direct" or "keep" in every layer, for tests. By default the cost model chooses.
        memory_budget: Memory that a step may hold to be faster. None allows the peak of ordinary training, a number
            is bytes on a CUDA device, and "lean" holds only what it must. With a number or "lean", checkpointed blocks
            may run again instead of holding what their layers recorded.
        batch_size_of: Function of the model's `(args, kwargs)` that returns the number of samples. Needed if that is
            not the first dimension of the first tensor, or if layers are called outside of the model's forward.
        rows_per_sample: Number of neighbouring rows that are views of one sample. Their mean gradient is clipped.
        loss_scale: Factor of the loss in backward, such as a GradScaler's: a number, a tensor, or a function.

    Attributes:
        norms: Gradient norms of the last micro-batch, one for each sample.
        factors: Clipping factors of the last micro-batch, (B,), or (B, groups) for rules with several groups.
        nonfinite_samples: Number of samples whose gradient was infinite or NaN, and which were left out.

    Raises:
        UserError: An argument is wrong, or the model has a layer that mixes samples.

    Example:
        >>> engine = FlashEngine(model, max_grad_norm=1.0)
        >>> x, y = next(iter(loader))
        >>> loss_fn(model(x), y).backward()
        >>> engine.finish()  # every p.grad is now the sum of clipped per-sample gradients
        >>> print(engine.norms.shape)
        torch.Size([8])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_grad_norm: Bounds = 1.0,
        clipping: str | ClipRule = "flat",
        loss_reduction: str = "mean",
        path: str | None = None,
        memory_budget: MemoryLimit = None,
        batch_size_of: BatchSizeOf | None = None,
        rows_per_sample: int = 1,
        loss_scale: float | Tensor | Callable[[], float | Tensor] = 1.0,
    ) -> None:
        if loss_reduction not in LOSS_REDUCTIONS:
            raise UserError(f"loss_reduction must be one of {', '.join(LOSS_REDUCTIONS)}, not {loss_reduction!r}")
        if path is not None and path not in FORCEABLE:
            raise UserError(f"path must be one of {', '.join(FORCEABLE)} or None, not {path!r}")
        require_module(model)
        self.groups = self._usual_groups = RowGroups(rows_per_sample)
        self.ranks = ranks_of(model)
        self.model = model = self.ranks.module
        self.clip = make_rule(clipping, max_grad_norm)
        self.loss_reduction = loss_reduction
        self._budget = budget = MemoryBudget(memory_budget, list(model.parameters()))
        self.path_rules = PathRules(
            path, budget, reduced=self.ranks.gathers_weights, runs_again=lambda: self.recorder.runs_again
        )
        self.loss_scale = loss_scale

        self.state = StepState()
        self.padding = PaddingCount()
        self.cast = SharedCast()
        self.recorder: Recorder = Recorder(self)
        self.graphs = GraphRecorder(self)
        self.norms: Tensor | None = None
        self.factors: Tensor | None = None
        self.nonfinite_samples: Tensor | None = None
        self.refusal: type[UserError] = UserError  # raised where a forward pass refuses the model
        self.static: StaticInputs | None = None  # while a micro-batch is captured in a CUDA graph
        slots = (Slot(name, p, name.rpartition(".")[0]) for name, p in model.named_parameters())
        self._slots = {slot.parameter: slot for slot in slots}
        self.clip.bind([slot.name for slot in self._slots.values() if slot.parameter.requires_grad])
        check_rule(self.clip, next((p.device for p in self._slots), torch.device("cpu")))
        arguments = {"clipping": self.clip.name, **vars(self.clip), "rows_per_sample": rows_per_sample}
        arguments |= {"loss_reduction": loss_reduction, "memory_budget": memory_budget}
        plain = [f"{n}={v}" for n, v in arguments.items() if isinstance(v, int | float | str | list | dict | None)]
        self.ranks.control.agree("the arguments of make_private", plain)
        self.running_sums = RunningSums(self._slots.values())
        self.anchor = Anchor(self._begin_backward)
        self.attachment = Attachment(self, self.ranks)
        self.verification = Verification(
            self,
            self.state,
            begin_way=self.attachment.tap_regions,
            in_any_dim=batch_size_of is not None,
            ranks=self.ranks,
        )
        self.forwards: ForwardPasses = ForwardPasses(
            model,
            self.state,
            self.verification,
            retap=self.attachment.retap,
            close=self._close_before_next,
            abandon=self.abandon_draw,
            batch_size_of=batch_size_of,
            budget=budget,
            ranks=self.ranks,
        )
        self.forwards.refresh = self.attachment.refresh
        self.attachment.attach(self._slots.values())
        allow_no_gradients()
        self.blocks: CheckpointedBlocks | None = None
        if memory_budget is not None:  # without one, blocks hold what their layers leave
            self.forwards.blocks = self.blocks = CheckpointedBlocks(self)
            self.recorder = BetweenBlocks(self.blocks)

    @property
    def max_grad_norm(self) -> float:
        """The clipping bound C. It may be changed at any time; a micro-batch uses the value at its closing."""
        return self.clip.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        self.clip.max_grad_norm = value

    @property
    def samples(self) -> int:
        """Number of samples summed since the last zero_grad()."""
        return self.state.samples

    @property
    def pending(self) -> bool:
        """True if a backward pass has recorded something that is not summed yet."""
        return self.state.recorded

    @property
    def attached(self) -> bool:
        return bool(self.attachment.taps)

    @property
    def parameters(self) -> Collection[nn.Parameter]:
        """All parameters of the model, frozen ones too."""
        return self._slots.keys()

    @property
    def rows_are_grouped(self) -> bool:
        """True if `group_rows` was called for the next backward pass."""
        return self.groups is not self._usual_groups

    def detach(self) -> None:
        """Restore the model. Drop what backward recorded and was not summed; keep gradients."""
        self.attachment.detach()
        self.state.drop()

    # Opacus's names, of the handle that its make_private(wrap_model=False) returns beside the optimizer.
    cleanup = detach

    def forbid_grad_accumulation(self) -> None:
        """Allow one backward pass a step. Opacus's make_private calls this under Poisson sampling."""
        self.state.forbid_accumulation()

    def __enter__(self) -> FlashEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    # -- what taps ask -----------------------------------------------------------------------------------------------

    def slot(self, parameter: Tensor | None) -> Slot:
        slot = self._slots.get(parameter) if isinstance(parameter, nn.Parameter) else None
        if slot is None:
            name = next((name for name, each in self.model.named_parameters() if each is parameter), "a parameter")
            raise UserError(
                f"{name} was replaced after the engine was attached; detach the engine and attach a new one"
            )
        return slot

    def add(self, slot: Slot, contribution: Contribution) -> None:
        if not (self.groups.is_plain or self.forwards.in_trial or self.forwards.is_made_up):
            if self.state.rows is not None:
                raise PADDED_ROWS.error(option="group_rows")
            contribution = self.groups.put_together(contribution, self.path_rules)
        self.recorder.add(slot, contribution)

    def without_taps(self) -> AbstractContextManager[None]:
        """Return a context in which the model is as it was before the engine was attached."""
        return self.attachment.removed()

    def runs_by_sample(self) -> bool:
        """Return whether a module runs sample by sample."""
        return any(isinstance(tap, OpaqueTap) for tap in self.attachment.taps)

    def run_by_loop(self) -> bool:
        """Replace vmap by a loop over samples in every module. Return whether there was a module to change."""
        changed = [tap for tap in self.attachment.taps if isinstance(tap, OpaqueTap) and not tap.by_loop]
        for tap in changed:
            tap.by_loop = True
            tap.describe("a loop over samples, because vmap failed in backward")
        return bool(changed)

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that require a gradient, by name."""
        return {slot.name: slot.parameter for slot in self._slots.values() if slot.parameter.requires_grad}

    def group_rows(self, ids: Tensor) -> None:
        """Clip rows with equal `ids` (one whole number a row) as one sample, such as a user's, in the next backward.

        All rows of a sample have to be in one micro-batch of a step, and on one rank: UserError otherwise. Every rank
        calls this, also for an empty batch.

        Example:
            >>> engine = FlashEngine(model)
            >>> x, y = next(iter(loader))
            >>> loss = loss_fn(model(x), y)
            >>> engine.group_rows(torch.arange(8) // 2)  # four users with two rows each
            >>> loss.backward()
            >>> engine.finish()
            >>> print(len(engine.norms))
            4
        """
        if own_capture() is not None:
            raise UserError("group_rows puts rows together on the host: call it in the ordinary loop")
        if self.state.recorded:
            raise UserError("group_rows comes before backward(): what was recorded was not grouped")
        groups = RowGroups.of_ids(ids)
        groups.ids = self.ranks.ids_of_all(groups.ids or frozenset())
        self.groups = groups

    def _begin_backward(self) -> Callable[[], None]:
        self._budget.begin_backward()
        return self.state.begin_backward()

    # -- closing -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Close the micro-batch and add all clipped sums to p.grad. Every trainable parameter has one afterwards.

        Raise UserError if a p.grad was not made by this engine: it may hold more than C of a sample.
        """
        self.running_sums.refuse_other_gradients()
        self.accumulate()
        with torch.no_grad(), self.losing_sums(others=True):
            self.running_sums.hand_out()

    @torch.no_grad()
    def accumulate(self) -> None:
        """Close the micro-batch and add its clipped sums to those that the engine holds. Leave p.grad unchanged."""
        sums = self.running_sums
        batches = self._close(into=sums.get)
        with self.losing_sums(others=bool(sums)):
            for parameter, total in _one_by_one(batches):
                if sums.get(parameter) is None:
                    sums.put(parameter, total)

    def _close_before_next(self) -> None:
        """Close the micro-batch before the next forward pass. A loop would try that one again after an error."""
        with self.losing_sums(others=True):
            self.accumulate()

    def clipped_sums(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Return an iterator over (parameter, Σ_b c_b v_b), each trainable parameter once; leave p.grad unchanged.

        A layer's inputs and output gradients are freed as its sum is handed out, so the whole gradient need never
        exist. Norms and factors are ready when this returns.
        """
        return _one_by_one(self._close())

    def factored_sums(self) -> Iterator[SumBatch]:
        """Return the sums of `clipped_sums`, many at a time; the caller sums per-sample gradients that are kept."""
        return self._close(factored=True)

    def _close(self, *, into: RunningSum | None = None, factored: bool = False) -> Iterator[SumBatch]:
        """Close the micro-batch: its norms and factors now, its sums as they are iterated over."""
        refuse_hooks(self._slots.values(), guards=1)
        if self.groups.ids or (self.state.recorded and self.state.batch_size and not self.forwards.is_made_up):
            self.state.refuse_split(self.groups.ids, self.running_sums.remain)
        with self._failing_batch():
            passes = [] if self.blocks is None else self.blocks.close()
        rows, sums_before = self.state.rows, bool(self.running_sums)
        recorded = self.state.close()
        with self._failing_batch(), no_autocast(recorded[0][0].parameter.device.type if recorded else "cpu"):
            if recorded and self.forwards.is_made_up:
                recorded, passes = [], []  # of a sample that is nobody's
            closing = Closing(self, self.blocks, passes, recorded or [])
            micro, clip = None, max(self.clip.sensitivity(), closing.sensitivity)
            closing.hold_clashing(recorded or [])
            if recorded:
                still_held = [(slot, parts) for slot, parts in recorded if parts]
                del recorded[:]
                micro = self.micro_batch(still_held, rows, normed=closing.normed)
                if rows is not None and self.static is None:
                    self.padding.add(rows)
                self._take(micro.result(), None if rows is None or self.static is not None else rows.real)
            else:  # an empty batch, or no backward at all
                if recorded is not None:
                    self.state.count(ids=self.groups.ids)  # of other ranks
                self.norms = self.factors = torch.zeros(0, dtype=torch.float64, device="cpu")
            with self.losing_sums(others=sums_before):
                sums = closing.sums(self._slots, micro, into, factored=factored)
        if micro is not None:
            self.path_rules.close()
            self.state.count(micro.size if rows is None else rows.real, clip, rows, self.groups.ids)
        if recorded is not None:
            self.groups = self._usual_groups
        return sums

    @contextmanager
    def _failing_batch(self) -> Iterator[None]:
        """Have the micro-batch fail alone after an error inside: it may be tried again. Other ranks hold sums of it."""
        try:
            yield
        except BaseException:
            if self.ranks.several:
                self.running_sums.drop()
                self.state.lose(others=True)
            else:
                self.state.fail()
            raise

    @contextmanager
    def losing_sums(self, *, others: bool) -> Iterator[None]:
        """Drop the sums of the step after an error inside: some of them hold the micro-batch, others do not.

        A loop that tries the batch again, as after a lack of memory, would count its samples twice.
        `others`: the sums hold other micro-batches, too.
        """
        try:
            yield
        except BaseException:
            self.running_sums.drop()
            self.state.lose(others=others)
            raise

    @contextmanager
    def capturing(self, static: StaticInputs) -> Iterator[None]:
        """Capture a micro-batch in a CUDA graph inside the block: nothing counts, `static` has bounds and rows."""
        results = dict.fromkeys(("norms", "factors", "nonfinite_samples"))
        with temporarily(self, static=static, **results), self.state.capturing(), self.running_sums.kept():
            yield

    def captured(self) -> tuple[dict[nn.Parameter, Tensor], Clipped]:
        """Return the tensors of the micro-batch that `capturing` has closed: a replay of its graph fills them."""
        assert self.norms is not None and self.factors is not None and self.nonfinite_samples is not None
        found = Clipped(self.norms, self.factors, self.nonfinite_samples, self.state.observed)
        return dict(self.running_sums.items()), found

    def count_replay(self, size: int, rows: Rows | None) -> None:
        """Count a micro-batch that a graph is about to run, as a closing does."""
        refuse_hooks(self._slots.values(), guards=1)
        self.state.refuse_split(None, self.running_sums.remain)
        self.state.replay(size, rows)
        if rows is not None:
            self.padding.add(rows)
        self.state.count(size if rows is None else rows.real, self.clip.sensitivity(), rows)

    def take_replayed(self, sums: dict[nn.Parameter, Tensor], found: Clipped, real: int) -> None:
        """Take what the graph has filled."""
        self._take(Clipped(*(None if each is None else each.clone() for each in found)), real)  # type: ignore[arg-type]
        for parameter, total in sums.items():
            self.running_sums.put(parameter, total)

    def _take(self, found: Clipped, real: int | None) -> None:
        """Take norms and factors of a closed micro-batch. `real`: how many rows are samples; None keeps all rows."""
        self.norms, self.factors, dropped, observed = found
        if real is not None:
            self.norms, self.factors = self.norms[:real], self.factors[:real]
        self.nonfinite_samples = dropped if self.nonfinite_samples is None else self.nonfinite_samples + dropped
        self.state.observe(observed)

    @torch.no_grad()
    def micro_batch(
        self,
        recorded: Recorded,
        rows: Rows | None,
        *,
        normed: Sequence[Normed] = (),
        groups: Sequence[int] | None = None,
    ) -> MicroBatch:
        """Return norms and factors of what is recorded. `groups`: only those of the clipping rule, in backward."""
        static = self.static
        assert static is None or groups is None  # a graph holds no blocks
        return MicroBatch(
            recorded,
            normed=normed,
            rules=self.path_rules,
            clip=self.clip if groups is None else PartOfRule(self.clip, groups),
            groups=self.groups,
            mean=self.loss_reduction == "mean",
            loss_scale=self.loss_scale() if callable(self.loss_scale) else self.loss_scale,
            real=None if rows is None else rows.real if static is None else static.real,
            bounds=None if static is None else static.bounds,
        )

    def zero_grad(self, set_to_none: bool = True) -> bool:
        """Return False inside a logical batch, whose sums are kept; otherwise clear gradients and return True.

        What backward recorded is dropped in any case. p.grad becomes None, or zero if `set_to_none` is False.
        """
        cleared = self.state.clear()
        if cleared:
            self.clear_gradients(set_to_none)
        return cleared

    def clear_gradients(self, set_to_none: bool = True) -> None:
        """Set p.grad of every parameter to None, or to zero if this engine made it and `set_to_none` is False."""
        self.running_sums.clear(set_to_none)

    def abandon_draw(self, *, keeps_batch: bool = False) -> None:
        """Drop the sums of an incomplete draw: together with the next draw a sample might count twice.

        `keeps_batch`: what backward recorded is of the next draw, and stays.
        """
        warnings.warn(
            "a part of a draw was trained on and the rest left out (a batch skipped, a loop that was left, an error): "
            "its sums are dropped, and no step is taken for it",
            stacklevel=2,
        )
        if keeps_batch:
            self.state.forget_sums()
            self.running_sums.clear()
        else:
            self.state.complete()
            self.zero_grad()

    def discard(self) -> None:
        """Drop what backward recorded and was not summed; keep gradients."""
        self.state.discard()

    # -- looking -----------------------------------------------------------------------------------------------------

    def contributions(self) -> Iterator[tuple[Slot, Contribution]]:
        """Return the recorded contributions that are not summed yet."""
        return ((slot, part) for slot in self._slots.values() for part in slot.contributions)

    def explain(self, *, measured: bool = False) -> PathTable:
        """Return a table that says which path each trainable parameter takes, and why; `print` it.

        `measured` also measures what each path takes on this device, about a second for each shape.
        """
        blocks = () if self.blocks is None else self.blocks.choices.rows
        trained = (slot for slot in self._slots.values() if slot.parameter.requires_grad)
        return explain_slots(trained, blocks, str(self.padding) if self.padding.rows else "", measured=measured)

    def per_sample_modules(self) -> list[PerSampleModule]:
        """Return the modules that run sample by sample through torch.func.vmap, the largest first."""
        opaque = {tap.module for tap in self.attachment.taps if isinstance(tap, OpaqueTap)}
        return describe_per_sample(self.model, ((n, m) for n, m in self.model.named_modules() if m in opaque))


def _one_by_one(batches: Iterator[SumBatch]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield (parameter, sum) pairs. Each is released when the next one is requested."""
    for parameters, sums, *_ in batches:
        parameters.reverse()
        sums.reverse()
        while sums:
            yield parameters.pop(), sums.pop()
