"""Findings of an audit: as plain data, and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from dpscope.plain_text import as_json, bare_table, render_plain
from dpscope.units import group_names

# A breach is proven. What held has held in so many trials and is not thereby proved. What was not tried has a reason.
HELD, BREACH, NOT_TRIED = "held", "BREACH", "not tried"
VERDICT_STYLES = {HELD: "green", BREACH: "bold red", NOT_TRIED: "yellow"}


@dataclass(frozen=True)
class Finding:
    """Result of one test.

    Attributes:
        verdict: "held", "BREACH" or "not tried".
        trials: Number of trials.
        unit: What one trial is, in words.
        figures: What was measured, by name.
        faults: What is wrong, in sentences; none unless the verdict is a breach.
        untried: What could not be tried, and why.
    """

    verdict: str
    trials: int = 0
    unit: str = "trials"
    figures: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.verdict} in {self.trials} {self.unit}" if self.verdict == HELD else self.verdict


def conclude(
    faults: list[str], trials: int, unit: str, *, untried: list[str], figures: dict[str, float] | None = None
) -> Finding:
    verdict = BREACH if faults else HELD if trials else NOT_TRIED
    return Finding(verdict, trials, unit, figures or {}, faults, untried)


def not_tried(unit: str, why: str) -> Finding:
    return Finding(NOT_TRIED, unit=unit, untried=[why])


@dataclass(frozen=True)
class Audit:
    """Results of the tests of one loop. `print` shows them.

    Attributes:
        neighbours: Whether removing or replacing a sample moves the sum by no more than clipping allows.
        noise: Whether noise is normal, of the right size and never repeated.
        accounting: Whether every step is accounted for at the right rate and noise.
    """

    neighbours: Finding
    noise: Finding
    accounting: Finding

    @property
    def breached(self) -> bool:
        return any(finding.verdict == BREACH for _, finding in self.findings())

    @property
    def ok(self) -> bool:
        """True if neighbours and noise were tried, and no test found a breach."""
        return not self.breached and NOT_TRIED not in (self.neighbours.verdict, self.noise.verdict)

    def findings(self) -> Iterator[tuple[str, Finding]]:
        return iter(vars(self).items())

    def __str__(self) -> str:
        named = {"the loop": self}
        lines = [f"{name}: {_cell(name, finding)}" for name, finding in self.findings()]
        if sentences := list(audit_sentences(named)):
            lines += ["", *sentences]
        return render_plain(Group(*map(Text, [*lines, "", conclusion(named)])))

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain data."""
        return {"ok": self.ok, **asdict(self)}

    def to_json(self) -> str:
        """Return `to_dict()` as JSON."""
        return as_json(self.to_dict())


# -- for a person ------------------------------------------------------------------------------------------------------


def audit_table(audits: dict[str, Audit]) -> Table:
    headings = ("method", "neighbours", "noise", "accounting")
    table = bare_table(*headings, left=headings)
    for method, audit in audits.items():
        cells = (Text(_cell(name, each), style=VERDICT_STYLES[each.verdict]) for name, each in audit.findings())
        table.add_row(method, *cells)
    return table


def _cell(name: str, finding: Finding) -> str:
    figure = next(iter(finding.figures.values()), None)
    if figure is None or name == "accounting":
        return str(finding)
    what = "moved at most {:.2f} of the bound" if name == "neighbours" else "{:.3f} σC"
    return f"{finding} ({what.format(figure)})" if finding.verdict == HELD else str(finding)


def audit_sentences(audits: dict[str, Audit]) -> Iterator[str]:
    findings = [(method, test, finding) for method, audit in audits.items() for test, finding in audit.findings()]
    for method, test, finding in findings:
        for fault in finding.faults:
            yield f"{method}, {test}: {fault}" + ("" if fault.endswith("?") else ".")
    for reason in dict.fromkeys(reason for *_, finding in findings for reason in finding.untried):
        untried = [(method, test) for method, test, finding in findings if reason in finding.untried]
        methods, tests = (", ".join(dict.fromkeys(names)) for names in zip(*untried, strict=True))
        yield f"Not tried: {tests} of {methods}: {reason.rstrip('.')}."


def conclusion(audits: dict[str, Audit]) -> str:
    """Return the last line, which says that passed tests are no proof."""

    def ending(audit: Audit) -> str:
        tests = group_names((name, finding.verdict) for name, finding in audit.findings())
        if BREACH in tests:
            return f"BREACH ({tests[BREACH]})"
        return f"{tests[HELD]} held" if HELD in tests else "not tried"

    endings = group_names((method, ending(audit)) for method, audit in audits.items())
    return "; ".join(f"{methods}: {ending}" for ending, methods in endings.items()) + "."
