"""Two sweeps side by side: what is faster, slower or larger now than before. Pure functions of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpscope.errors import UserError
from dpscope.reports.against.changes import FIGURES, MEMORY, RATIOS, TIME, TRAFFIC, Change, Figure, Reading
from dpscope.reports.against.pairing import Difference, list_differences, pair_rows
from dpscope.reports.report import Report
from dpscope.reports.tables import Row
from dpscope.reports.traffic.data import Traffic, traffic_of
from dpscope.reports.words import size_in_words, step_in_words
from dpscope.results.store import Skipped

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Pair:
    """The same method on the same workload at the same size, in both sweeps."""

    before: Row
    now: Row
    changes: dict[str, Change]  # figure's key -> change

    @property
    def statuses(self) -> tuple[str, str]:
        return self.before.result.status, self.now.result.status

    @property
    def status_changed(self) -> bool:
        return self.statuses[0] != self.statuses[1]

    @property
    def changed(self) -> bool:
        return self.status_changed or any(self.changes[figure.key].found for figure in FIGURES)


@dataclass(frozen=True)
class Against:
    """A sweep (`now`) against an earlier one or another machine's (`before`). `print` shows it."""

    before: str  # the folders
    now: str
    pairs: list[Pair]
    differences: list[Difference]
    only_before: list[Row]
    only_now: list[Row]
    skipped: list[Skipped]  # files of either that are no results
    memory_sources: tuple[str, str] = ("", "")  # how the peaks that are shown were measured: before, now

    @property
    def changed(self) -> bool:
        return any(pair.changed for pair in self.pairs)

    @property
    def figures(self) -> list[Figure]:
        """Those that any pair has something to say about."""
        return [figure for figure in FIGURES if any(_known(pair.changes[figure.key]) for pair in self.pairs)]

    def to_pandas(self) -> pandas.DataFrame:
        """A record for each row of either sweep; units are in the columns' names, changes are fractions of before."""
        import pandas

        from dpscope.reports.against.csv import to_records

        return pandas.DataFrame(to_records(self)).convert_dtypes()

    def __str__(self) -> str:
        from dpscope.plain_text import render_plain
        from dpscope.reports.against.text import against_summary

        return render_plain(against_summary(self))


def set_against(now: Report, before: Report, *, names: tuple[str, str]) -> Against:
    """Pair what can be compared and say what changed; `names`: what to call now and before."""
    rows, older = now.rows, before.rows
    together = pair_rows(rows, older)
    if not together:
        raise UserError(
            f"{names[0]} and {names[1]} have no row in common. A row is compared with the same method, model, batch, "
            f"sequence, dtype, optimizer and privacy settings.\n  {names[0]}: {list_rows(rows)}\n"
            f"  {names[1]}: {list_rows(older)}"
        )
    sides = _sides(older), _sides(rows)
    sources = _memory_sources(together)
    pairs = [Pair(old, new, _changes(sides[0][id(old)], sides[1][id(new)], sources)) for old, new in together]
    paired = {id(row) for both in together for row in both}
    return Against(
        before=names[1],
        now=names[0],
        pairs=pairs,
        differences=list_differences(together),
        only_before=[row for row in older if id(row) not in paired],
        only_now=[row for row in rows if id(row) not in paired],
        skipped=[*now.skipped, *before.skipped],
        memory_sources=sources,
    )


def list_rows(rows: Sequence[Row], most: int = 6) -> str:
    """`standard, flat on 1b at batch 8, sequence 256, bf16`: the methods of each size together."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        spec = row.first.spec
        where = f"{spec['workload']['name']} at {size_in_words(spec)}, {step_in_words(spec)}"
        groups.setdefault(where, []).append(row.method)
    named = [f"{', '.join(methods)} on {where}" for where, methods in groups.items()]
    more = [f"and {len(named) - most} more sizes"] if len(named) > most else []
    return "; ".join([*named[:most], *more])


def _known(change: Change) -> bool:
    return change.before.value is not None or change.now.value is not None


@dataclass(frozen=True)
class _Side:
    """A row with its traffic."""

    row: Row
    traffic: Traffic | None

    @property
    def time(self) -> Reading:
        row = self.row
        return Reading(value=row.median_ms, spread=row.spread_ms, doubt=row.time_doubt, steps=row.steps)

    @property
    def time_ratio(self) -> Reading:
        value, own, standard = self.row.time_ratio, self.row.spread_ms, self.row.standard
        if value is None or standard is None:
            return Reading(value=None)
        other, spread = standard.spread_ms, None
        if standard is self.row:
            spread = (1.0, 1.0)
        elif own is not None and other is not None and other[0] > 0:
            spread = (own[0] / other[1], own[1] / other[0])
        return Reading(value=value, spread=spread, doubt=self.row.ratio_doubt)

    def memory(self, source: str) -> Reading:
        return Reading(value=peaks_by_source(self.row).get(source), source=source)

    def memory_ratio(self, source: str) -> Reading:
        standard = peaks_by_source(self.row.standard).get(source) if self.row.standard else None
        own = peaks_by_source(self.row).get(source)
        return Reading(value=own / standard if own and standard else None, source=source)

    @property
    def dram(self) -> tuple[Reading, Reading]:
        """Bytes, and their ratio."""
        if self.traffic is None:
            return Reading(value=None), Reading(value=None)
        bytes_, ratio = self.traffic.dram_bytes, self.traffic.ratio
        return Reading(value=bytes_, source=self.traffic.source), Reading(value=ratio, source=self.traffic.source)


def _sides(rows: Sequence[Row]) -> dict[int, _Side]:
    return {id(row): _Side(row, traffic_of(row)) for row in rows}


def _changes(before: _Side, now: _Side, sources: tuple[str, str]) -> dict[str, Change]:
    old, new = (
        (side.memory(source), side.memory_ratio(source)) for side, source in zip((before, now), sources, strict=True)
    )
    readings: dict[str, tuple[tuple[Reading, Reading], tuple[Reading, Reading]]] = {
        TIME.key: ((before.time, now.time), (before.time_ratio, now.time_ratio)),
        MEMORY.key: ((old[0], new[0]), (old[1], new[1])),
        TRAFFIC.key: ((before.dram[0], now.dram[0]), (before.dram[1], now.dram[1])),
    }
    changes = {}
    for figure in FIGURES:
        plain, ratio = readings[figure.key]
        changes[figure.key] = Change(figure, *plain)
        changes[RATIOS[figure.key].key] = Change(RATIOS[figure.key], *ratio)
    return changes


def _memory_sources(pairs: Sequence[tuple[Row, Row]]) -> tuple[str, str]:
    """One definition of the peak for the whole table: the way in which most pairs have it on both sides.

    Where no pair has, each sweep's own: then the two are shown and not compared.
    """
    known = [(peaks_by_source(old), peaks_by_source(new)) for old, new in pairs]
    both = [source for old, new in known for source in new if source in old]
    if both:
        return (_most_common(both),) * 2
    before, now = ([source for sides in known for source in sides[place]] for place in (0, 1))
    return _most_common(before), _most_common(now)


def _most_common(sources: Sequence[str]) -> str:
    """The first of those that occur most often: the memory instrument's comes first."""
    return max(dict.fromkeys(sources), key=sources.count, default="")


def peaks_by_source(row: Row) -> dict[str, float]:
    """How it was measured -> peak in bytes, the memory instrument's first."""
    found: dict[str, float] = {}
    for instrument, peak in row.peaks.items():
        found.setdefault(str(row.measured[instrument].memory.get("source") or "stated"), peak)
    return found
