"""The check itself: one workload, its reference, and every method against it."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from dpscope import numbers
from dpscope.audit.check import check_loop
from dpscope.batches import cast_batch
from dpscope.endings import outcome_of_exception
from dpscope.errors import UserError
from dpscope.exactness.faults import Evidence, find_faults
from dpscope.exactness.reference import (
    Reference,
    compare,
    find_mixing,
    find_mixing_in_backward,
    gradient_of_the_batch,
    make_reference,
)
from dpscope.exactness.report import EXACT, NOT_EXACT, Check, MethodCheck
from dpscope.exactness.subject import Subject, computes_in_float32, make_subject
from dpscope.exactness.updates import loop_maker, measure_errors, measure_rounding, measure_update, physical_batch_size
from dpscope.flash.torch_side.captures import has_graphs
from dpscope.places import is_own_source
from dpscope.trainers.base import TrainerBase, allow_tf32, load_trainer, require_batch_of
from dpscope.trainers.modes import any_number_of_graphs, must_compile
from dpscope.trainers.modes import checkpoint_blocks as checkpoint_blocks_of
from dpscope.units import list_names
from dpscope.vocabulary.methods import methods as all_methods
from dpscope.vocabulary.methods import resolve_method
from dpscope.vocabulary.settings import EAGER, SETTINGS, TrainerSettings
from dpscope.vocabulary.statuses import FAILED, SKIPPED
from dpscope.workloads.workload import Workload

# Number format -> torch's, and the relative error of a parameter's clipped sum that counts as exact. Sums of some
# thousand terms in another order stay within a hundred roundings.
NUMBER_FORMATS = {"fp32": (torch.float32, 1e-5), "fp64": (torch.float64, 1e-9)}
# Where a parameter's rounding alone comes near the tolerance (a deep model), this many times it is allowed instead.
ROUNDINGS = 4

LoadTrainer = Callable[[], type[TrainerBase]]
ReportProgress = Callable[[str], None]


def _named_trainer(method: str | type[TrainerBase]) -> tuple[str, LoadTrainer]:
    """Return a method's name and a function that imports its trainer class; a failed import becomes a verdict."""
    if isinstance(method, str):
        found = resolve_method(method)
        return found.name, partial(load_trainer, found)
    return method.__name__, lambda: method


def check(
    workload: Workload,
    methods: Sequence[str | type[TrainerBase]] | None = None,
    *,
    name: str = "workload",
    dtype: str = "fp32",
    max_grad_norm: float | None = None,
    tolerance: float | None = None,
    neighbours: bool = True,
    sizes: Sequence[int] | None = None,
    seed: int = 0,
    device: str = "cpu",
    batch_size: int | None = None,
    accumulate: int = 1,
    checkpoint_blocks: bool = False,
    compile: str = EAGER,
    clipping: str = "flat",
    cuda_graph: bool = False,
    time_paths: bool = False,
    progress: ReportProgress = lambda _: None,
) -> Check:
    """Check that each method is exact on the workload, and private.

    Args:
        workload: Model, batch and loss.
        methods: Names, or trainer classes of your own. Default: every private method that is installed.
        name: What the output calls the workload.
        dtype: `fp32`, or `fp64` to check to 1e-9.
        max_grad_norm: Middle one of the three clip norms. By default half of the samples exceed it.
        tolerance: Largest relative error of a clipped sum; by default 1e-5, or 1e-9 in fp64.
        neighbours: Also test neighbouring batches, noise and accounting.
        sizes: Batch sizes of those tests, instead of those that coincide with other lengths of the model.
        seed: Seed of the model and the batch.
        device: `cpu` or `cuda`.
        batch_size: Samples that each physical batch must hold, if known.
        accumulate: Take each step in so many physical batches, into which the workload's batch is cut.
        checkpoint_blocks: Checkpoint every block of the model.
        compile: Mode of torch.compile for the method; the reference stays eager.
        clipping: Clipping rule that the method follows, for methods that have several: a name, as `per_layer`.
        cuda_graph: Replay each step as a CUDA graph; the reference stays eager.
        time_paths: Let flash clipping measure what each path of a layer takes on this device.
        progress: Called with a line about what is done now.

    Returns:
        The verdict of each method. `print` it, or read `ok`, `methods` and `to_json()`.

    Raises:
        UserError: The workload cannot be checked: it is random, or its loss is not one per sample.

    Example:
        >>> found = dpscope.check(workload, ["flash"])
        >>> assert found.ok, found
    """
    if dtype not in NUMBER_FORMATS:
        raise UserError(f"unknown dtype {dtype!r}: choose one of {', '.join(NUMBER_FORMATS)}")
    tolerance = None if tolerance is None else numbers.TOLERANCE(tolerance)
    max_grad_norm = None if max_grad_norm is None else numbers.MAX_GRAD_NORM(max_grad_norm)
    batch_size = None if batch_size is None else numbers.BATCH_SIZE(batch_size)
    how = TrainerSettings(
        batch_size=1,  # that of the workload's batch, once it is there
        accumulate=numbers.ACCUMULATE(accumulate),
        checkpoint_blocks=checkpoint_blocks,
        compile=SETTINGS["compile"].check(compile),
        clipping=SETTINGS["clipping"].check(clipping),
        cuda_graph=SETTINGS["cuda_graph"].check(cuda_graph),
    )
    if how.cuda_graph and not has_graphs(torch.device(device)):
        raise UserError("cuda_graph=True needs a GPU: leave it out, or check with device='cuda'")
    if how.clipping == "adaptive":
        raise UserError(
            "clipping='adaptive' changes C from step to step: check 'flat', which is the same within a step"
        )
    sizes = None if sizes is None else [numbers.TRIED_SIZE(size) for size in sizes]
    asked = methods or [name for name, method in all_methods().items() if method.private]
    trainers = dict(map(_named_trainer, asked))

    allow_tf32(False)  # it would blur the yardstick, what rounding alone does
    progress("building the model")
    subject = make_subject(workload, seed=numbers.SEED(seed), device=device)
    if batch_size is not None:
        require_batch_of(subject.batch, batch_size, accumulate=how.accumulate)
    physical_batch_size(subject.batch_size, how)
    if checkpoint_blocks:  # refused here if there are none; the reference is taken without
        checkpoint_blocks_of(subject.fresh(torch.float32)[0])
    narrow = dtype == "fp64" and computes_in_float32(subject)
    if tolerance is None:
        tolerance = NUMBER_FORMATS["fp32" if narrow else dtype][1]
    progress("one sample at a time, in float64")
    reference = make_reference(subject, clipping)
    progress("do samples mix?")
    gradient = gradient_of_the_batch(subject)
    mixing = find_mixing(subject) or find_mixing_in_backward(gradient, reference)
    reference.require_gradients(mixing=mixing is not None)
    number_format, _ = NUMBER_FORMATS[dtype]
    clip_norms = reference.clip_norms(max_grad_norm) if reference.norms.any() else []
    rounding = None
    if number_format != torch.float64:
        progress(f"what {dtype} rounding alone does")
        rounding = measure_rounding(subject, reference, clip_norms, number_format)
    yardstick = Yardstick(reference, number_format, how, clip_norms, tolerance, rounding)
    reference.release()
    checks = []
    for method, load in trainers.items():
        progress(method if compile == EAGER else f"{method}, compiling")
        with nullcontext() if compile == EAGER else any_number_of_graphs():
            found = yardstick.check_method(method, load, time_paths=time_paths)
            if neighbours and (found.steps or not clip_norms):
                seeds = itertools.count(subject.seed)
                audit = check_loop(
                    loop_maker(load(), subject, number_format, how),
                    (cast_batch(workload.batch(seed, subject.device), number_format) for seed in seeds),
                    sizes=sizes,
                    seed=subject.seed,
                    progress=lambda what: progress(f"{method}: {what}"),  # noqa: B023
                )
                found = replace(found, audit=audit)
        checks.append(found)
    return Check(
        workload=name,
        dtype=dtype,
        tolerance=tolerance,
        batch_size=subject.batch_size,
        parameters=sum(1 for _ in subject.model.named_parameters()),
        trainable=len(subject.trainable),
        norms=reference.norms.tolist(),
        clip_norms=clip_norms,
        tied=subject.tied,
        notes=subject.notes,
        faults=[mixing] if mixing else [],
        warnings=list(_warnings(yardstick, gradient, narrow=narrow)),
        loose=yardstick.loose,
        roundings=ROUNDINGS,
        rounding=rounding,
        methods=checks,
    )


@dataclass(frozen=True)
class Yardstick:
    """Reference that every method is compared with, how a step is taken, and the allowed error."""

    reference: Reference
    dtype: torch.dtype  # of the methods
    how: TrainerSettings
    clip_norms: list[float]  # none where no sample has a gradient of its own
    tolerance: float
    rounding: MethodCheck | None  # what the number format alone does; None in float64

    @property
    def subject(self) -> Subject:
        return self.reference.subject

    @cached_property
    def limits(self) -> dict[str, float]:
        """The relative error that each parameter is allowed."""
        steps = self.rounding.steps if self.rounding else []
        return {
            name: max(self.tolerance, *(ROUNDINGS * step.parameter_errors[name] for step in steps), 0.0)
            for name in self.reference.names
        }

    @property
    def loose(self) -> list[str]:
        """Parameters that are allowed more than the tolerance."""
        return [name for name, limit in self.limits.items() if limit > self.tolerance]

    def check_method(self, method: str, load: LoadTrainer, *, time_paths: bool) -> MethodCheck:
        """Compare the updates of a method with the reference, and name what is wrong with them."""
        subject, reference, clip_norms = self.subject, self.reference, self.clip_norms
        if not clip_norms:
            return MethodCheck(method, SKIPPED, "alone, no sample has a gradient to hold it against")
        try:
            take = partial(measure_update, load(), subject, dtype=self.dtype, how=self.how)
            with nullcontext() if self.how.compile == EAGER else must_compile():
                updates = [take(clip_norm=clip_norm, seed=subject.seed) for clip_norm in clip_norms]
                again = take(clip_norm=clip_norms[1], seed=subject.seed + 1, time_paths=time_paths)
        except Exception as error:
            status, reason = outcome_of_exception(error)
            if status == SKIPPED or isinstance(error, NotImplementedError):
                return MethodCheck(method, SKIPPED, reason)
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_own_source(frame.filename)]
            lines = [*traceback.format_list(frames), *traceback.format_exception_only(error)]
            return MethodCheck(method, FAILED, reason, "".join(lines).rstrip() if frames else None)
        sums, right = [update.sums for update in updates], [reference.factors(c) for c in clip_norms]
        comparisons = compare(reference, right, lambda turn: sums, sums[0])
        faults = find_faults(Evidence(reference, updates, again, self.limits, comparisons))
        norm_error, steps = measure_errors(reference, clip_norms, comparisons)
        reference.release()
        return MethodCheck(
            method=method,
            verdict=NOT_EXACT if faults else EXACT,
            norm_error=norm_error,
            steps=steps,
            faults=faults,
            notes=updates[1].notes,
            paths=None if again.paths is None else [asdict(row) for row in again.paths],
        )


def _warnings(yardstick: Yardstick, gradient: dict[str, Tensor | None], *, narrow: bool) -> Iterator[str]:
    subject, reference = yardstick.subject, yardstick.reference
    unreached = [name for name, found in gradient.items() if found is None]
    still = [name for name in reference.names if name not in unreached and not reference.grams[name].any()]
    if unreached:
        yield f"no gradient reaches {list_names(unreached)}: the loss does not depend on it, so it never trains"
    if still:
        yield f"the gradient of {list_names(still)} is zero for every sample: it does not move in this step"
    if infinite := [str(i) for i, finite in enumerate(reference.finite) if not finite]:
        yield f"the gradient of sample {', '.join(infinite)} is inf or NaN: it has to be left out of the sum"
    silent = [str(i) for i, finite in enumerate(reference.finite) if finite and reference.norms[i] == 0]
    if silent:
        yield f"the gradient of sample {', '.join(silent)} is zero: nothing is learned from it"
    if subject.batch_size == 1:
        yield "one sample cannot show whether samples mix: give --batch-size 2 or more"

    if narrow:
        yield (
            "parts of the model compute in float32 whatever they are given: held to "
            f"{yardstick.tolerance:g} all the same"
        )
    if loose := yardstick.loose:
        worst = max(loose, key=lambda name: yardstick.limits[name])
        yield (
            f"rounding alone is off by {yardstick.limits[worst] / ROUNDINGS:.1e} in {worst}, so {len(loose)} "
            f"parameters are allowed {ROUNDINGS} times their rounding: --dtype fp64 tells more"
        )
