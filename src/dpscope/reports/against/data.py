"""Two sweeps side by side: what is faster, slower or larger now than before. Pure functions of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from dpscope.errors import UserError
from dpscope.reports.against.pairing import SweepDifference, list_differences, pair_rows
from dpscope.reports.against.quantities import QUANTITIES, Quantity, SweepChange, peaks_by_source
from dpscope.reports.export import frame_of
from dpscope.reports.report import Report
from dpscope.reports.tables import Row, worth_a_column
from dpscope.reports.words import step_in_words
from dpscope.results.store import Skipped
from dpscope.vocabulary.settings import COMPARED, SETTINGS

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Pair:
    """The same method on the same workload at the same size, in both sweeps."""

    before: Row
    now: Row
    changes: dict[str, SweepChange]  # by the keys of quantities, and of their ratios to standard

    @classmethod
    def of(cls, before: Row, now: Row, sources: tuple[str, str]) -> Pair:
        """`sources`: how the peaks that are compared were measured, before and now."""
        old, new = sources
        every = [each for quantity in QUANTITIES for each in (quantity, quantity.ratio)]
        return cls(before, now, {q.key: SweepChange(q, q.read(before, old), q.read(now, new)) for q in every})

    def change(self, quantity: Quantity) -> SweepChange:
        return self.changes[quantity.key]

    def ratio(self, quantity: Quantity) -> SweepChange:
        """Of its ratio to standard."""
        return self.change(quantity.ratio)

    @property
    def statuses(self) -> tuple[str, str]:
        return self.before.result.status, self.now.result.status

    @property
    def status_changed(self) -> bool:
        return self.statuses[0] != self.statuses[1]

    @property
    def changed(self) -> bool:
        return self.status_changed or any(self.change(quantity).tone for quantity in QUANTITIES)

    def verdict(self, quantity: Quantity) -> str:
        """Of its quantity; of the row where that ended in another way than before, or without figures."""
        if self.status_changed:
            return " → ".join(self.statuses)
        return self.change(quantity).verdict or ("" if self.now.result.ok else self.statuses[1])


@dataclass(frozen=True)
class Against:
    """A sweep (`now`) against an earlier one or another machine's (`before`). `print` shows it."""

    before: str  # the folders
    now: str
    pairs: list[Pair]
    differences: list[SweepDifference]
    only_before: list[Row]
    only_now: list[Row]
    skipped: list[Skipped]  # files of either that are no results
    memory_sources: tuple[str, str] = ("", "")  # how the peaks that are shown were measured: before, now

    @property
    def changed(self) -> bool:
        return any(pair.changed for pair in self.pairs)

    @cached_property
    def telling(self) -> list[str]:
        """The fields that tell rows apart, beside method and size."""
        return worth_a_column([pair.now for pair in self.pairs], ("model", *COMPARED))

    def name_of(self, pair: Pair) -> str:
        """`flash at batch 8, sequence 256`, and whatever else tells it from the others."""
        row = pair.now
        model = f" on {row.field('model')}" if "model" in self.telling else ""
        told = [SETTINGS[name].in_words(row.spec) for name in self.telling if name in SETTINGS]
        return f"{row.method}{model} at {', '.join([row.size, *told])}"

    @property
    def quantities(self) -> list[Quantity]:
        """Those that any pair has something to say about."""
        return [quantity for quantity in QUANTITIES if any(pair.change(quantity).known for pair in self.pairs)]

    def to_pandas(self) -> pandas.DataFrame:
        """A record for each row of either sweep; units are in the columns' names, changes are fractions of before."""
        from dpscope.reports.against.csv import to_records

        return frame_of(to_records(self))

    def __str__(self) -> str:
        from dpscope.reports.against.text import against_text

        return against_text(self)


def set_against(now: Report, before: Report, *, names: tuple[str, str]) -> Against:
    """Pair what can be compared and say what changed; `names`: what to call now and before."""
    together = pair_rows(now.rows, before.rows)
    if not together:
        raise UserError(
            f"{names[0]} and {names[1]} have no row in common. A row is compared with the same method, model, batch, "
            f"sequence, dtype, optimizer and privacy settings.\n  {names[0]}: {list_rows(now.rows)}\n"
            f"  {names[1]}: {list_rows(before.rows)}"
        )
    sources = _memory_sources(together)
    paired = {id(row) for both in together for row in both}
    return Against(
        before=names[1],
        now=names[0],
        pairs=[Pair.of(older, newer, sources) for older, newer in together],
        differences=list_differences(together),
        only_before=[row for row in before.rows if id(row) not in paired],
        only_now=[row for row in now.rows if id(row) not in paired],
        skipped=[*now.skipped, *before.skipped],
        memory_sources=sources,
    )


def list_rows(rows: Sequence[Row], most: int = 6) -> str:
    """`standard, flat on 1b at batch 8, sequence 256, bf16`: the methods of each size together."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        where = f"{row.field('model')} at {row.size}, {step_in_words(row.spec)}"
        groups.setdefault(where, []).append(row.method)
    named = [f"{', '.join(methods)} on {where}" for where, methods in groups.items()]
    more = [f"and {len(named) - most} more sizes"] if len(named) > most else []
    return "; ".join([*named[:most], *more])


def _memory_sources(pairs: Sequence[tuple[Row, Row]]) -> tuple[str, str]:
    """One definition of the peak for the whole table: the way in which most pairs have it on both sides.

    Where no pair has, each sweep's own: then the two are shown and not compared.
    """
    known = [(peaks_by_source(older), peaks_by_source(newer)) for older, newer in pairs]
    both = [source for older, newer in known for source in newer if source in older]
    before, now = ([source for sides in known for source in sides[place]] for place in (0, 1))
    return _most_common(both or before), _most_common(both or now)


def _most_common(sources: Sequence[str]) -> str:
    """The first of those that occur most often: the memory instrument's comes first."""
    return max(dict.fromkeys(sources), key=sources.count, default="")
