"""What a check found, for a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dpscope.audit.text import audit_sentences, audit_table, conclusion
from dpscope.exactness.report import EXACT, SKIPPED, Check, MethodCheck
from dpscope.units import MISSING

STYLES = {EXACT: "green"}


def describe(check: Check, *, paths: bool = False) -> RenderableType:
    parts: list[RenderableType] = [Text(line) for line in _headline(check)]
    parts += ["", _table(check)]
    for method in check.methods:
        if method.details:
            parts += ["", Text(f"{method.method} failed, in its own code:"), Text(method.details, style="red")]
    if sentences := list(_sentences(check)):
        parts += ["", *(Text(sentence) for sentence in sentences)]
    for method in check.methods:
        if method.paths:
            parts += ["", _path_table(method) if paths else Text(_path_summary(method), style="dim")]
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
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("method", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for heading in ("norms", "factors", "clipped sums"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("worst parameter", overflow="fold")
    for method in check.methods:
        verdict = Text(method.verdict, style=STYLES.get(method.verdict, "bold red"))
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
    reasons: dict[tuple[str, str], list[str]] = {}
    for method in check.methods:
        if method.reason:
            reasons.setdefault((method.verdict, method.reason), []).append(method.method)
    for (verdict, reason), names in reasons.items():
        yield f"{', '.join(names)} {verdict}: {reason}"
    for method in check.methods:
        for fault in method.faults:
            yield f"{method.method}: {fault}."
        for note in method.notes:
            yield f"{method.method}: {note}"


def _path_summary(method: MethodCheck) -> str:
    counts = Counter(row["path"] or row["kind"] for row in method.paths or ())
    shown = ", ".join(f"{count} {path}" for path, count in counts.most_common())
    return f"Paths of {method.method}: {shown} (--paths shows each parameter)"


def _path_table(method: MethodCheck) -> Table:
    table = Table(
        box=None, pad_edge=False, header_style="bold", title=f"Paths of {method.method}", title_justify="left"
    )
    rows = method.paths or []
    for heading in rows[0]:
        table.add_column(heading, overflow="fold")
    said = ""
    for row in rows:
        *cells, why = row.values()  # a sentence, which often holds for all parameters of a module
        table.add_row(*map(Text, cells), Text("as above" if why and why == said else why))
        said = why
    return table


def _verdict(check: Check) -> str:
    by_verdict: dict[str, list[str]] = {}
    for method in check.methods:
        by_verdict.setdefault(method.verdict, []).append(method.method)
    if set(by_verdict) <= {SKIPPED}:
        return "No method ran on this workload: nothing is proved."
    if check.faults:
        return "No method can be exact here: the workload mixes samples."
    allowed = f"{check.tolerance:g}" + (f" or {check.roundings:g} roundings" if check.loose else "")
    endings = {EXACT: f"exact to {allowed} in every parameter", SKIPPED: "did not run"}
    verdict = "; ".join(f"{', '.join(names)}: {endings.get(v, v)}" for v, names in by_verdict.items())
    return f"{verdict}."
