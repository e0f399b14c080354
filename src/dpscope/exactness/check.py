"""The check itself: one workload, its reference, and every method against it."""

from __future__ import annotations

import itertools
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from dpscope import numbers
from dpscope.audit.check import check_loop
from dpscope.audit.trainer import loop_maker
from dpscope.audit.verdict import Audit
from dpscope.errors import UserError
from dpscope.exactness import report
from dpscope.exactness.faults import Evidence, find_faults
from dpscope.exactness.mixing import find_mixing, find_mixing_in_backward, gradient_of_the_batch
from dpscope.exactness.reference import (
    Reference,
    Tensors,
    fit_factors,
    make_reference,
    relative_errors,
    sample_gradients,
)
from dpscope.exactness.report import Check, MethodCheck, StepErrors
from dpscope.exactness.subject import Subject, make_subject, narrows
from dpscope.exactness.updates import take_update
from dpscope.flash.oracle import cast_batch
from dpscope.paths import PACKAGE
from dpscope.runner.assembly import require_batch_of
from dpscope.runner.outcome import outcome_of_exception
from dpscope.sentences import list_names
from dpscope.trainers.base import TrainerBase, allow_tf32, load_trainer
from dpscope.vocabulary.methods import Method, resolve_method
from dpscope.vocabulary.methods import methods as all_methods
from dpscope.workloads.workload import Workload

# Number format -> torch's, and the relative error of a parameter's clipped sum that counts as exact. Sums of some
# thousand terms in another order stay within a hundred roundings.
FORMATS = {"fp32": (torch.float32, 1e-5), "fp64": (torch.float64, 1e-9)}
# Where a parameter's rounding alone comes near the tolerance (a deep model), this many times it is allowed instead.
ROUNDINGS = 4
# Beyond this the samples' gradients are so nearly parallel that an update does not say who contributed what.
MAX_CONDITION = 1e3


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
    progress: Callable[[str], None] = lambda _: None,
) -> Check:
    """Is each method exact on the workload? Default: every private method that is installed.

    A method is a name or a trainer class of one's own: `print(dpscope.check(workload, ["flash", MyTrainer]))`.
    `max_grad_norm` replaces the middle one of the three clip norms, which otherwise half of the samples exceed;
    `batch_size` is what the workload's batch must hold, where one knows.
    `neighbours`: try neighbouring batches, the noise and the accountant too, at batch sizes that coincide with other
    lengths of the model, or at `sizes`.
    """
    if dtype not in FORMATS:
        raise UserError(f"unknown dtype {dtype!r}: choose one of {', '.join(FORMATS)}")
    tolerance = None if tolerance is None else numbers.TOLERANCE(tolerance)
    max_grad_norm = None if max_grad_norm is None else numbers.MAX_GRAD_NORM(max_grad_norm)
    batch_size = None if batch_size is None else numbers.BATCH_SIZE(batch_size)
    sizes = None if sizes is None else [numbers.TRIED_SIZE(size) for size in sizes]
    asked = methods or [name for name, method in all_methods().items() if method.private]
    chosen = {method.name: method for method in map(_method_of, asked)}
    number_format, usual = FORMATS[dtype]
    limit = usual if tolerance is None else tolerance

    allow_tf32(False)  # it would blur the yardstick, what rounding alone does
    progress("building the model")
    subject = make_subject(workload, seed=numbers.SEED(seed), device=device)
    if batch_size is not None:
        require_batch_of(subject.batch, batch_size)
    narrow = number_format == torch.float64 and narrows(subject)
    if narrow and tolerance is None:
        limit = FORMATS["fp32"][1]
    progress("one sample at a time, in float64")
    reference = make_reference(subject)
    progress("do samples mix?")
    gradient = gradient_of_the_batch(subject)
    mixing = find_mixing(subject) or find_mixing_in_backward(gradient, reference)
    if not any(reference.finite):
        raise UserError("the gradient of every sample is inf or NaN, though a loss is finite: there is nothing to clip")
    comparable = bool(reference.norms.any())
    if not comparable and not mixing:
        raise UserError("no parameter receives a gradient from any sample: there is nothing to clip")
    clip_norms = reference.clip_norms(max_grad_norm) if comparable else []
    rounding = None
    if number_format != torch.float64:
        progress(f"what {dtype} rounding alone does")
        rounding = _rounding(subject, reference, clip_norms, number_format)
    limits = {name: max(limit, ROUNDINGS * _error_of(rounding, name)) for name in reference.names}
    checks = []
    for method in chosen.values():
        progress(method.name)
        found = MethodCheck(method.name, report.SKIPPED, "alone, no sample has a gradient to hold it against")
        if comparable:
            found = _check_method(method, subject, reference, clip_norms, number_format, limits)
        if neighbours and (found.steps or not comparable):
            found = replace(found, audit=_audit(method, workload, subject, number_format, sizes, progress))
        checks.append(found)
    return Check(
        workload=name,
        dtype=dtype,
        tolerance=limit,
        batch_size=subject.batch_size,
        parameters=sum(1 for _ in subject.model.named_parameters()),
        trainable=len(subject.trainable),
        norms=reference.norms.tolist(),
        clip_norms=clip_norms,
        tied=subject.tied,
        notes=subject.notes,
        faults=[mixing] if mixing else [],
        warnings=[
            *_warnings(subject, reference, gradient),
            *(_about_rounding(limits, limit, narrow)),
        ],
        loose=[name for name, allowed in limits.items() if allowed > limit],
        roundings=ROUNDINGS,
        rounding=rounding,
        methods=checks,
    )


def _audit(
    method: Method,
    workload: Workload,
    subject: Subject,
    dtype: torch.dtype,
    sizes: Sequence[int] | None,
    progress: Callable[[str], None],
) -> Audit:
    make_loop = loop_maker(load_trainer(method), lambda: subject.fresh(dtype)[0], subject.loss, subject.batch_size)
    seeds = itertools.count(subject.seed)
    batches = (cast_batch(workload.batch(seed, subject.device), dtype) for seed in seeds)
    return check_loop(
        make_loop, batches, sizes=sizes, seed=subject.seed, progress=lambda what: progress(f"{method.name}: {what}")
    )


def _method_of(method: str | type[TrainerBase]) -> Method:
    if isinstance(method, str):
        return resolve_method(method)
    return _OwnMethod(method.__name__, f"{method.__module__}:{method.__qualname__}", "your own", own=method)


@dataclass(frozen=True)
class _OwnMethod(Method):
    """A trainer class that was given instead of a name."""

    own: type[TrainerBase] | None = None

    def load(self) -> type[TrainerBase]:
        assert self.own is not None
        return self.own


def _warnings(subject: Subject, reference: Reference, gradient: dict[str, Tensor | None]) -> Iterator[str]:
    unreached = [name for name, found in gradient.items() if found is None]
    still = [
        name
        for name in reference.names
        if name not in unreached and not any(v[name].any() for v in reference.gradients)
    ]
    if unreached:
        yield f"no gradient reaches {list_names(unreached)}: the loss does not depend on it, so it never trains"
    if still:
        yield f"the gradient of {list_names(still)} is zero for every sample: it does not move in this step"
    if infinite := [str(i) for i, finite in enumerate(reference.finite) if not finite]:
        yield f"the gradient of sample {', '.join(infinite)} is inf or NaN: it has to be left out of the sum"
    silent = [
        str(i)
        for i, (norm, finite) in enumerate(zip(reference.norms.tolist(), reference.finite, strict=True))
        if finite and norm == 0
    ]
    if silent:
        yield f"the gradient of sample {', '.join(silent)} is zero: nothing is learned from it"
    if subject.batch_size == 1:
        yield "one sample cannot show whether samples mix: give --batch-size 2 or more"


def _about_rounding(limits: dict[str, float], tolerance: float, narrow: bool) -> Iterator[str]:
    if narrow:
        yield f"parts of the model compute in float32 whatever they are given: held to {tolerance:g} all the same"
    if loose := [name for name, limit in limits.items() if limit > tolerance]:
        worst = max(loose, key=lambda name: limits[name])
        yield (
            f"rounding alone is off by {limits[worst] / ROUNDINGS:.1e} in {worst}, so {len(loose)} parameters are "
            f"allowed {ROUNDINGS} times their rounding: --dtype fp64 tells more"
        )


def _check_method(
    method: Method,
    subject: Subject,
    reference: Reference,
    clip_norms: Sequence[float],
    dtype: torch.dtype,
    limits: dict[str, float],
) -> MethodCheck:
    try:
        trainer = load_trainer(method)
        updates = [
            take_update(trainer, subject, clip_norm=clip_norm, dtype=dtype, seed=subject.seed)
            for clip_norm in clip_norms
        ]
        again = take_update(trainer, subject, clip_norm=clip_norms[1], dtype=dtype, seed=subject.seed + 1)
    except Exception as error:
        status, reason = outcome_of_exception(error)
        if status == report.SKIPPED or isinstance(error, NotImplementedError):
            return MethodCheck(method.name, report.SKIPPED, reason)
        return MethodCheck(method.name, report.FAILED, reason, _their_traceback(error))
    evidence = Evidence(subject, reference, updates, again, limits)
    faults = find_faults(evidence)
    norm_error, steps = _figures(reference, clip_norms, [update.sums for update in updates], evidence.errors)
    return MethodCheck(
        method=method.name,
        verdict=report.NOT_EXACT if faults else report.EXACT,
        norm_error=norm_error,
        steps=steps,
        faults=faults,
        notes=updates[1].notes,
        paths=None if updates[1].paths is None else [asdict(row) for row in updates[1].paths],
    )


def _figures(
    reference: Reference,
    clip_norms: Sequence[float],
    sums: Sequence[Tensors],
    errors: Sequence[dict[str, float]],
) -> tuple[float | None, list[StepErrors]]:
    """The error of norms, read off the step in which every factor is C/norm; and those of each step."""
    norm_error, steps = None, []
    for clip_norm, update, by_parameter in zip(clip_norms, sums, errors, strict=True):
        fit = fit_factors(reference, update, reference.names)
        told = reference.norms > 0
        ratios = fit.factors[told] / reference.factors(clip_norm)[told]
        known = fit.condition < MAX_CONDITION
        norm_error = _largest(1 / ratios - 1) if known else None
        steps.append(
            StepErrors(
                clip_norm=clip_norm,
                clipped=int((reference.norms > clip_norm).sum()),
                factor_error=_largest(ratios - 1) if known else None,
                worst_parameter=max(by_parameter, key=lambda name: by_parameter[name]),
                parameter_errors=by_parameter,
            )
        )
    return norm_error, steps


def _largest(errors: Tensor) -> float:
    return float(errors.abs().nan_to_num(math.inf).max())


def _rounding(subject: Subject, reference: Reference, clip_norms: Sequence[float], dtype: torch.dtype) -> MethodCheck:
    """Micro-batches of one in the number format that is checked: the yardstick's own error."""
    sums: list[Tensors] = [{} for _ in clip_norms]
    for gradient in sample_gradients(subject, dtype):
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
        if not (math.isfinite(norm) and norm):
            continue  # it has no share
        for clip_norm, total in zip(clip_norms, sums, strict=True):
            for name, g in gradient.items():
                total[name] = total.get(name, 0.0) + min(1.0, clip_norm / norm) * g
    if not all(sums):
        raise UserError(
            "in float32 the gradient of every sample is zero, inf or NaN, in float64 it is not: scale the loss into "
            "float32's range (1e-38 to 1e38), give --dtype fp64, or look for state that the loss keeps between calls"
        )
    errors = [
        relative_errors(found, reference.sums(reference.factors(clip_norm)))
        for clip_norm, found in zip(clip_norms, sums, strict=True)
    ]
    norm_error, steps = _figures(reference, clip_norms, sums, errors)
    return MethodCheck("rounding", report.EXACT, norm_error=norm_error, steps=steps)


def _error_of(rounding: MethodCheck | None, name: str) -> float:
    return max((step.parameter_errors[name] for step in rounding.steps), default=0.0) if rounding else 0.0


def _their_traceback(error: BaseException) -> str | None:
    """What of a traceback is not dpscope's."""
    ours = str(PACKAGE)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    return (
        "".join([*traceback.format_list(frames), *traceback.format_exception_only(error)]).rstrip() if frames else None
    )
