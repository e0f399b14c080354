"""What an audit found, for a person."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dpscope.audit.verdict import BREACH, HELD, NOT_TRIED, Audit, Finding

STYLES = {HELD: "green", BREACH: "bold red", NOT_TRIED: "yellow"}


def describe_loop(audit: Audit) -> RenderableType:
    lines = [f"{name}: {_cell(name, finding)}" for name, finding in audit.findings()]
    sentences = list(audit_sentences({"the loop": audit}))
    gap = [""] if sentences else []
    return Group(*map(Text, [*lines, *gap, *sentences, "", conclusion({"the loop": audit})]))


def audit_table(audits: dict[str, Audit]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("method", "neighbours", "noise", "accounting"):
        table.add_column(heading, no_wrap=True)
    for method, audit in audits.items():
        cells = [Text(_cell(name, finding), style=STYLES[finding.verdict]) for name, finding in audit.findings()]
        table.add_row(method, *cells)
    return table


def _cell(name: str, finding: Finding) -> str:
    figure = next(iter(finding.figures.values()), None)
    if figure is None or name == "accounting":
        return str(finding)
    what = "moved at most {:.2f} of the bound" if name == "neighbours" else "{:.3f} σC"
    return f"{finding} ({what.format(figure)})" if finding.verdict == HELD else str(finding)


def audit_sentences(audits: dict[str, Audit]) -> Iterator[str]:
    for method, audit in audits.items():
        for name, finding in audit.findings():
            for fault in finding.faults:
                yield f"{method}, {name}: {fault}" + ("" if fault.endswith("?") else ".")
    reasons: dict[str, dict[str, list[str]]] = {}  # reason -> method -> tests
    for method, audit in audits.items():
        for name, finding in audit.findings():
            for reason in finding.untried:
                reasons.setdefault(reason, {}).setdefault(method, []).append(name)
    for reason, methods in reasons.items():
        tests = dict.fromkeys(name for names in methods.values() for name in names)
        yield f"Not tried: {', '.join(tests)} of {', '.join(methods)}: {reason.rstrip('.')}."


def conclusion(audits: dict[str, Audit]) -> str:
    """The last line. What held is not proved."""
    groups: dict[str, list[str]] = {}
    for method, audit in audits.items():
        breached = [name for name, finding in audit.findings() if finding.verdict == BREACH]
        held = [name for name, finding in audit.findings() if finding.verdict == HELD]
        ending = f"BREACH ({', '.join(breached)})" if breached else f"{', '.join(held)} held" if held else "not tried"
        groups.setdefault(ending, []).append(method)
    return "; ".join(f"{', '.join(methods)}: {ending}" for ending, methods in groups.items()) + "."
