"""Findings: ranked statements about a comparison, with how much, why, what to do and how sure."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from dpscope.errors import UserError
from dpscope.reports.memory.text import composition_of
from dpscope.reports.output import Output, text_output
from dpscope.reports.report import Report, Size
from dpscope.reports.story import Story, cost_in_words
from dpscope.reports.tables import ADVICE, EXPLAINED, Row
from dpscope.units import GIB, format_bytes
from dpscope.vocabulary.components import component_named
from dpscope.vocabulary.methods import STANDARD

AS_MEASURED, AS_DOUBTFUL, AS_CERTAIN = "measured", "doubtful", "certain"
FINDINGS_DOCUMENT = {"document": "dpscope.findings", "version": 1}
FINDINGS_TITLE = "# Findings"


@dataclass(frozen=True)
class CostFinding:
    """One statement. `cost`: how many times ordinary training's time or memory, whichever is more; None if unknown."""

    size: str
    method: str
    statement: str
    cost: float | None = None
    why: str = ""
    advice: str = ""
    sure: str = AS_MEASURED  # or AS_DOUBTFUL, or AS_CERTAIN: it is no measurement


def list_findings(report: Report) -> list[CostFinding]:
    """Return all findings, rows that ended badly first, then by cost."""
    found = [
        finding for size, story in zip(report.sizes, report.stories, strict=True) for finding in _of_size(size, story)
    ]
    return sorted(found, key=lambda each: (each.sure != AS_CERTAIN, -(each.cost or 0.0)))


def _of_size(size: Size, story: Story) -> Iterator[CostFinding]:
    standard = next((row for row in size.rows if row.method == STANDARD), None)
    for row in size.rows:
        if not row.result.ok:
            statement, why = f"{row.method} ended as {row.result.status}", row.result.reason or ""
            yield CostFinding(size.label, row.method, statement, why=why, sure=AS_CERTAIN)
            continue
        if row is standard:
            continue
        doubt = row.ratio_doubt if row.median_ms is not None else ""
        costs = [ratio for ratio in (None if doubt else row.time_ratio, row.memory_ratio) if ratio is not None]
        if costs:
            statement = f"{row.method} costs {cost_in_words(row)}"
            why, advice = _largest_component(row, standard), ""
            if story.winner not in (None, row.method):
                advice = f"use {story.winner}" + (f", which {story.badge}" if story.badge.startswith("costs") else "")
            yield CostFinding(size.label, row.method, statement, cost=max(costs), why=why, advice=advice)
        if doubt:
            statement = f"No verdict on the time of {row.method}"
            why, advice = EXPLAINED[doubt], ADVICE[doubt]
            yield CostFinding(size.label, row.method, statement, why=why, advice=advice, sure=AS_DOUBTFUL)


def _largest_component(row: Row, standard: Row | None) -> str:
    """Name what makes the peak larger than ordinary training's."""
    mine, theirs = composition_of(row), None if standard is None else composition_of(standard)
    if mine is None or theirs is None:
        return ""
    more = {key: size - theirs.components.get(key, 0.0) for key, size in mine.components.items()}
    key, size = max(more.items(), key=lambda each: each[1], default=("", 0.0))
    return f"{format_bytes(size)} more of {component_named(key).label} at the peak" if size > 0 else ""


def _as_document(report: Report) -> str:
    """Return the findings as JSON; docs/schemas/findings.json describes it."""
    document = {**FINDINGS_DOCUMENT, "findings": [asdict(finding) for finding in list_findings(report)]}
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def to_markdown(findings: Sequence[CostFinding]) -> str:
    """Return the findings as a numbered list."""
    lines = [FINDINGS_TITLE, ""]
    for number, each in enumerate(findings, 1):
        more = [part[0].upper() + part[1:] for part in (each.why, each.advice) if part]
        sentences = [f"{each.statement} ({each.size})", *more]
        lines.append(f"{number}. {'. '.join(sentences)}. *{each.sure}*")
    return "\n".join([*lines, ""] if findings else [*lines, "Nothing to say: no private method has figures.", ""])


FINDINGS: tuple[Output[Report], ...] = (
    text_output(
        *("findings.json", "what costs most, why, what to do, how sure", _as_document),
        mark=str(FINDINGS_DOCUMENT["document"]),
    ),
    text_output(
        *("findings.md", "the same to read"), lambda report: to_markdown(list_findings(report)), mark=FINDINGS_TITLE
    ),
)


# What can be asked of a method: ratios to ordinary training, or figures of its own.
FIGURES_OF_ROW: dict[str, Callable[[Row], float | None]] = {
    "time": lambda row: None if row.ratio_doubt else row.time_ratio,
    "memory": lambda row: row.memory_ratio,
    "ms": lambda row: None if row.time_doubt else row.median_ms,
    "gib": lambda row: None if row.peak_bytes is None else row.peak_bytes / GIB,
}
_COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_PATTERN = re.compile(r"\s*([\w-]+)\.(\w+)\s*(>=|<=|>|<)\s*(\d+\.?\d*)\s*")


@dataclass(frozen=True)
class Condition:
    """Condition `METHOD.FIGURE > NUMBER`, which holds if any row of the method has such a figure."""

    text: str
    method: str
    figure: str
    compare: Callable[[float, float], bool]
    number: float

    @classmethod
    def parse(cls, text: str) -> Condition:
        found = _PATTERN.fullmatch(text)
        if found is None or found[2] not in FIGURES_OF_ROW:
            raise UserError(
                f"--fail-if {text!r} is no condition: write METHOD.FIGURE > NUMBER, as in 'flash.time > 1.2', with a "
                f"figure of {', '.join(FIGURES_OF_ROW)} (time and memory are ratios to standard)"
            )
        return cls(text.strip(), found[1], found[2], _COMPARE[found[3]], float(found[4]))

    def judge(self, rows: Sequence[Row]) -> str:
        """Return a sentence if the condition holds or the figure is missing; nothing otherwise."""
        own = [row for row in rows if row.method == self.method]
        known = [(row, value) for row in own if (value := FIGURES_OF_ROW[self.figure](row)) is not None]
        if len(known) < max(1, len(own)):
            return f"{self.text}: not known, because {self.method} has no undoubted {self.figure} in every row"
        held = [f"{value:.3g} at {row.size}" for row, value in known if self.compare(value, self.number)]
        return f"{self.text}: {self.figure} of {self.method} is {', '.join(held)}" if held else ""
