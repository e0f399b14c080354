"""Gaps of the page: rows that failed, files that were left out, instruments that were not used."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dpscope.reports.page.command_lines import can_be_typed, command_lines
from dpscope.reports.report import Report, Size
from dpscope.reports.tables import Row, grouped
from dpscope.results.identity import hashable, identity_of
from dpscope.vocabulary.instruments import INSTRUMENTS

# Instruments in the order in which they are missed: those that need tools of their own come last.
IN_ORDER = sorted(INSTRUMENTS, key=lambda name: not INSTRUMENTS[name].works_everywhere)


@dataclass(frozen=True)
class InstrumentGap:
    """An instrument that did not look at some rows, and the commands that make it look at those and no others."""

    what: str
    where: str  # "" for nowhere on the page
    commands: list[str]
    untyped: str  # rows of models that were made in Python: no command can name them


@dataclass(frozen=True)
class Missing:
    failed: list[tuple[str, str, str, str]]  # method, size, status, reason
    skipped: list[tuple[str, str]]  # file, reason
    gaps: list[InstrumentGap]


Lacking = tuple[str, Size, dict[str, Any]]  # a method, where it was not looked at, the spec that would


def find_missing(report: Report) -> Missing:
    sizes = report.sizes
    failed = [
        (row.method, size.label, result.status, result.reason or "no reason given")
        for size in sizes
        for row in size.rows
        for result in row.measured.values()
        if not result.ok
    ]
    skipped = [(item.path.name, item.reason) for item in report.skipped]
    gaps = [gap for instrument in IN_ORDER if (gap := _gap(instrument, sizes))]
    return Missing(list(dict.fromkeys(failed)), skipped, gaps)


def _gap(instrument: str, sizes: Sequence[Size]) -> InstrumentGap | None:
    lacking = list(_lacking(instrument, sizes))
    if not lacking:
        return None
    everywhere = not any(instrument in row.measured for size in sizes for row in size.rows)
    about = INSTRUMENTS[instrument]
    specs = [spec for *_, spec in lacking]
    noted = about.cpu_note and all(spec.get("device") == "cpu" for spec in specs)
    return InstrumentGap(
        what=about.shows + (f" ({about.cpu_note})" if noted else ""),
        where="" if everywhere else _where(lacking),
        commands=command_lines(specs),
        untyped=_where([each for each in lacking if not can_be_typed(each[-1])]),
    )


def _lacking(instrument: str, sizes: Sequence[Size]) -> Iterator[Lacking]:
    """Yield the rows that the instrument could have measured and did not, each once."""
    seen: set[Hashable] = set()
    for size in sizes:
        for row in size.rows:
            spec = {**row.looked_at, "instrument": instrument, "options": _options(instrument, size, sizes)}
            row_of_any_steps = (row.method, hashable(identity_of(row.spec)))
            if instrument in row.measured or row_of_any_steps in seen or not _works(row, instrument):
                continue
            seen.add(row_of_any_steps)
            yield row.method, size, spec


def _works(row: Row, instrument: str) -> bool:
    """Tell if the instrument could measure this row: not if it failed, nor on a CPU if it needs a GPU."""
    plain = row.measured.get("time")
    trains = plain.ok if plain is not None else all(result.ok for result in row.measured.values())
    return trains and not (INSTRUMENTS[instrument].gpu_only and row.looked_at.get("device") == "cpu")


def _options(instrument: str, size: Size, sizes: Sequence[Size]) -> dict[str, Any]:
    """Return how the instrument looked at rows of this size, or of this setting: what is compared is measured alike."""
    nearest = [size, *(other for other in sizes if other.setting == size.setting)]
    found = (row.measured[instrument].spec for near in nearest for row in near.rows if instrument in row.measured)
    return dict(next(found, {}).get("options") or {})


def _where(lacking: Sequence[Lacking], most: int = 4) -> str:
    """Return the sizes; where some of a size's methods were looked at, also which were not."""
    words = []
    for size, found in grouped(lacking, lambda each: each[1]).items():
        whole = len(found) == len({row.method for row in size.rows})
        words.append(size.label if whole else f"{size.label} ({', '.join(method for method, *_ in found)})")
    rest = f"; and {len(words) - most} more" if len(words) > most else ""
    return "; ".join(words[:most]) + rest
