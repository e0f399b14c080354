"""Findings of a check: as plain data, and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dpscope.audit.verdict import Audit, audit_sentences, audit_table, conclusion
from dpscope.plain_text import as_json, bare_table, render_plain
from dpscope.units import MISSING, group_names
from dpscope.vocabulary.statuses import SKIPPED

EXACT, NOT_EXACT = "exact", "NOT EXACT"  # further verdicts: SKIPPED, FAILED


@dataclass(frozen=True)
class StepErrors:
    """One noiseless step at one clip norm: largest relative errors against micro-batches of one."""

    clip_norm: float
    clipped: int  # samples above it
    factor_error: float | None  # None where samples' gradients are too nearly parallel to tell
    worst_parameter: str
    parameter_errors: dict[str, float]

    @property
    def parameter_error(self) -> float:
        return self.parameter_errors[self.worst_parameter]


@dataclass(frozen=True)
class MethodCheck:
    """Check of one method on a workload.

    Attributes:
        method: Name of the method.
        verdict: "exact", "NOT EXACT", "skipped" (it refuses this workload) or "failed" (it raised an error).
        reason: Why there are no figures.
        details: Traceback of a method that failed.
        norm_error: Largest relative error of a sample's norm.
        steps: Errors at each of the three clip norms.
        faults: What is wrong, in sentences.
        notes: Worth knowing about how the method trains this model.
        paths: Rows of `explain()`, for flash clipping.
        audit: Neighbours, noise and accounting, if they were tested.
    """

    method: str
    verdict: str
    reason: str | None = None
    details: str | None = None
    norm_error: float | None = None
    steps: list[StepErrors] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    paths: list[dict[str, str]] | None = None
    audit: Audit | None = None

    @property
    def worst(self) -> StepErrors:
        return max(self.steps, key=lambda step: step.parameter_error)

    @property
    def factor_error(self) -> float | None:
        return max((step.factor_error for step in self.steps if step.factor_error is not None), default=None)


@dataclass(frozen=True)
class Check:
    """Check of a workload: the verdict of every method. `print` shows it.

    Attributes: methods: The verdict of each method. faults: Faults of the workload itself; no method can be right on
    it. warnings: Worth knowing about the workload. notes: What was changed for the check. norms: Norms of the samples'
    gradients. clip_norms: The three clip norms. tied: Names of each parameter that has more than one. tolerance:
    Largest relative error that counts as exact. loose: Parameters whose rounding comes near the tolerance, and which
    may have `roundings` times it. rounding: Errors of rounding alone: micro-batches of one in the checked number
    format.
    """

    workload: str
    dtype: str
    tolerance: float
    batch_size: int
    parameters: int
    trainable: int
    norms: list[float]
    clip_norms: list[float]
    tied: list[list[str]]
    notes: list[str]
    faults: list[str]
    warnings: list[str]
    loose: list[str]
    roundings: float
    rounding: MethodCheck | None
    methods: list[MethodCheck]

    @property
    def ok(self) -> bool:
        """True if some method ran, all that ran are exact and breach nothing, and the workload allows it."""
        ran = [method for method in self.methods if method.verdict != SKIPPED]
        breached = any(audit.breached for audit in self.audits.values())
        return bool(ran) and not self.faults and not breached and all(method.verdict == EXACT for method in ran)

    @property
    def audits(self) -> dict[str, Audit]:
        """Tests of neighbours, noise and accounting by method."""
        return {method.method: method.audit for method in self.methods if method.audit}

    def __str__(self) -> str:
        return render_plain(describe_check(self))

    def to_dict(self) -> dict[str, Any]:
        """Return all figures; docs/schemas/check.json describes them."""
        return {"document": "dpscope.check", "version": 1, "ok": self.ok, **asdict(self)}

    def to_json(self) -> str:
        """Return `to_dict()` as JSON."""
        return as_json(self.to_dict())


# -- for a person ------------------------------------------------------------------------------------------------------


def describe_check(check: Check, *, paths: bool = False) -> RenderableType:
    parts: list[RenderableType] = [Text(line) for line in _headline(check)]
    parts += ["", _table(check)]
    for method in check.methods:
        if method.details:
            parts += ["", Text(f"{method.method} failed, in its own code:"), Text(method.details, style="red")]
    if sentences := list(_sentences(check)):
        parts += ["", *(Text(sentence) for sentence in sentences)]
    for method in check.methods:
        if method.paths:
            counts = Counter(row["path"] or row["kind"] for row in method.paths)
            shown = ", ".join(f"{count} {path}" for path, count in counts.most_common())
            summary = f"Paths of {method.method}: {shown} (--paths shows each parameter)"
            parts += ["", _path_table(method) if paths else Text(summary, style="dim")]
    parts += ["", Text(_verdict(check), style="bold")]
    if audits := check.audits:
        sentences = list(audit_sentences(audits))
        parts += ["", audit_table(audits), *([""] if sentences else []), *map(Text, sentences)]
        parts += ["", Text(conclusion(audits), style="bold")]
    return Group(*parts)


def _headline(check: Check) -> Iterator[str]:
    low, high = min(check.norms), max(check.norms)
    yield (
        f"{check.workload}, batch {check.batch_size}, {check.dtype}: {check.trainable} of {check.parameters} "
        f"parameters train; per-sample norms {low:.4g} to {high:.4g}"
    )
    steps = ", ".join(f"{clip:.4g} ({sum(norm > clip for norm in check.norms)} clipped)" for clip in check.clip_norms)
    if steps:
        yield f"A step without noise at each of three clip norms: {steps}"
    for group in check.tied:
        yield f"Tied: {' = '.join(group)}"
    for note in check.notes:
        yield f"Note: {note}"


def _table(check: Check) -> Table:
    figures, worst = ("norms", "factors", "clipped sums"), "worst parameter"
    table = bare_table("method", "verdict", *figures, worst, left=("verdict", worst), wrap=(worst,))
    for method in check.methods:
        verdict = Text(method.verdict, style="green" if method.verdict == EXACT else "bold red")
        table.add_row(method.method, verdict, *_figures(method))
    if check.rounding and any(method.steps for method in check.methods):
        table.add_row(Text(check.dtype, style="dim"), Text("rounding", style="dim"), *_figures(check.rounding))
    return table


def _figures(method: MethodCheck) -> list[str]:
    if not method.steps:
        return [MISSING] * 4
    worst = method.worst
    numbers = (method.norm_error, method.factor_error, worst.parameter_error)
    return [*(MISSING if x is None else f"{x:.1e}" for x in numbers), worst.worst_parameter]


def _sentences(check: Check) -> Iterator[str]:
    for fault in check.faults:
        yield f"The workload: {fault}."
    for warning in check.warnings:
        yield f"The workload: {warning}."
    for reason, names in group_names((m.method, f"{m.verdict}: {m.reason}") for m in check.methods if m.reason).items():
        yield f"{names} {reason}"
    for method in check.methods:
        for fault in method.faults:
            yield f"{method.method}: {fault}."
        for note in method.notes:
            yield f"{method.method}: {note}"


def _path_table(method: MethodCheck) -> Table:
    rows = method.paths or []
    if not any(row.get("measured") for row in rows):
        rows = [{key: cell for key, cell in row.items() if key != "measured"} for row in rows]
    table = bare_table(*rows[0], left=[*rows[0]], wrap=[*rows[0]])
    table.title, table.title_justify = f"Paths of {method.method}", "left"
    said = ""
    for row in rows:
        *cells, why = row.values()  # a sentence, which often holds for all parameters of a module
        table.add_row(*map(Text, cells), Text("as above" if why and why == said else why))
        said = why
    return table


def _verdict(check: Check) -> str:
    by_verdict = group_names((method.method, method.verdict) for method in check.methods)
    if set(by_verdict) <= {SKIPPED}:
        return "No method ran on this workload: nothing is proved."
    if check.faults:
        return "No method can be exact here: the workload mixes samples."
    allowed = f"{check.tolerance:g}" + (f" or {check.roundings:g} roundings" if check.loose else "")
    endings = {EXACT: f"exact to {allowed} in every parameter", SKIPPED: "did not run"}
    return "; ".join(f"{names}: {endings.get(v, v)}" for v, names in by_verdict.items()) + "."
