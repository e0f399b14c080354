"""Two sweeps side by side: which rows pair, what is faster, slower or larger now, and the same as records."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from dpscope.errors import UserError
from dpscope.plain_text import render_plain
from dpscope.reports.against.quantities import MEMORY, QUANTITIES, TIME, Quantity, SweepChange, peaks_by_source
from dpscope.reports.export import IDENTITY, frame_of, frame_to_csv
from dpscope.reports.output import Output, text_output
from dpscope.reports.report import Report
from dpscope.reports.tables import Row, grouped, worth_a_column
from dpscope.results.identity import ENVIRONMENT, hashable, step_in_words
from dpscope.results.store import Skipped
from dpscope.units import MISSING, format_bytes
from dpscope.vocabulary.settings import COMPARED, EVERYWHERE, SETTINGS

if TYPE_CHECKING:
    import pandas


# Two rows may differ in these and are compared all the same: they say how long and where was measured, not what.
MAY_DIFFER = {name: each.label for name, each in SETTINGS.items() if each.identity != EVERYWHERE}
# One's own workload is its name here: what its file says is what people change between two sweeps.
OF_WORKLOAD = {"file": "workload's file", "sha256": "workload's text"}

IN_WORDS: dict[str, Callable[[Any], str]] = {"gpu_memory_bytes": format_bytes, "sha256": lambda text: str(text)[:12]}


Difference = tuple[str, str, str]  # what is not the same in both sweeps, as it was before, as it is now


def pair_rows(now: Sequence[Row], before: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Return (row of before, row of now), in the order of now. Each row is in one pair at most.

    If several rows could be paired (two numbers of steps, say), those with the same instruments are paired first, then
    those with the most settings in common.
    """
    groups: dict[Hashable, tuple[list[int], list[int]]] = {}
    for side, rows in enumerate((before, now)):
        for place, row in enumerate(rows):
            workload = {name: value for name, value in row.spec["workload"].items() if name not in OF_WORKLOAD}
            identity = {name: value for name, value in row.identity.items() if name not in MAY_DIFFER}
            key = hashable({**identity, "method": row.method, "workload": workload})
            groups.setdefault(key, ([], []))[side].append(place)

    def likeness(places: tuple[int, int]) -> float:
        one, other = before[places[0]], now[places[1]]
        alike: list[bool] = [one.spec.get(name) == other.spec.get(name) for name in MAY_DIFFER]
        return len(one.measured.keys() & other.measured.keys()) + sum(alike) / 10

    partner: dict[int, int] = {}  # place in now -> place in before
    for older, newer in groups.values():
        for old, new in sorted(product(older, newer), key=likeness, reverse=True):
            if new not in partner and old not in partner.values():
                partner[new] = old
    return [(before[partner[place]], row) for place, row in enumerate(now) if place in partner]


def list_differences(pairs: Sequence[tuple[Row, Row]]) -> list[Difference]:
    """Return differences of the compared rows: environment first, then settings; each value once."""
    sides = [[result for pair in pairs for result in pair[side].measured.values()] for side in (0, 1)]
    others = {name: name for side in sides for each in side for name in each.environment if name not in ENVIRONMENT}
    found = []
    for labels, read in (
        ({**ENVIRONMENT, **others, "gpu_memory_bytes": "GPU memory"}, attrgetter("environment")),
        ({**OF_WORKLOAD, **MAY_DIFFER}, lambda result: {**result.spec["workload"], **result.spec}),
    ):
        for name, label in labels.items():
            say = IN_WORDS.get(name, str)
            values = ([read(result).get(name) for result in side] for side in sides)
            before, now = (", ".join(sorted({MISSING if v is None else say(v) for v in each})) for each in values)
            found += [(label, before, now)] if before != now else []
    return found


@dataclass(frozen=True)
class Pair:
    """The same method on the same workload at the same size, in both sweeps."""

    before: Row
    now: Row
    changes: dict[str, SweepChange]  # by the keys of quantities, and of their ratios to standard

    @classmethod
    def of(cls, before: Row, now: Row, sources: tuple[str, str]) -> Pair:
        """Pair two rows; `sources`: how the compared peaks were measured, before and now."""
        changes = []
        for quantity in QUANTITIES:
            then, today = (quantity.read(row, source) for row, source in zip((before, now), sources, strict=True))
            changes += [SweepChange(quantity, then[0], today[0]), SweepChange(quantity.ratio, then[1], today[1])]
        return cls(before, now, {change.quantity.key: change for change in changes})

    def change(self, quantity: Quantity) -> SweepChange:
        return self.changes[quantity.key]

    def ratio(self, quantity: Quantity) -> SweepChange:
        """Return the change of its ratio to standard."""
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
        """Return the verdict on a quantity; on the row itself if its status changed or it has no figures."""
        if self.status_changed:
            return " → ".join(self.statuses)
        return self.change(quantity).verdict or ("" if self.now.result.ok else self.statuses[1])


@dataclass(frozen=True)
class Against:
    """Comparison of a sweep (`now`) with an earlier one or another machine's (`before`). `print` shows it.

    Attributes:
        before: Folder of the earlier sweep.
        now: Folder of this sweep.
        pairs: Rows that are in both sweeps.
        differences: Settings and versions in which the sweeps differ.
        only_before: Rows that only the earlier sweep has.
        only_now: Rows that only this sweep has.
        skipped: Files of either that are no results.
    """

    before: str
    now: str
    pairs: list[Pair]
    differences: list[Difference]
    only_before: list[Row]
    only_now: list[Row]
    skipped: list[Skipped]
    memory_sources: tuple[str, str] = ("", "")  # how the peaks that are shown were measured: before, now

    @property
    def changed(self) -> bool:
        """True if a figure changed beyond its spread, or a status changed."""
        return any(pair.changed for pair in self.pairs)

    @cached_property
    def telling(self) -> list[str]:
        """Fields by which rows differ, besides method and size."""
        return worth_a_column([pair.now for pair in self.pairs], ("model", *COMPARED))

    def name_of(self, pair: Pair) -> str:
        """Return `flash at batch 8, sequence 256`, and the settings that distinguish it from other rows."""
        row = pair.now
        model = f" on {row.field('model')}" if "model" in self.telling else ""
        told = [SETTINGS[name].in_words(row.spec) for name in self.telling if name in SETTINGS]
        return f"{row.method}{model} at {', '.join([row.size, *told])}"

    @property
    def quantities(self) -> list[Quantity]:
        """Quantities that at least one pair has figures for."""
        return [quantity for quantity in QUANTITIES if any(pair.change(quantity).known for pair in self.pairs)]

    def to_pandas(self) -> pandas.DataFrame:
        """Return a record for each row of either sweep; columns name their units, changes are fractions of before."""
        return frame_of(to_records(self))

    def __str__(self) -> str:
        from dpscope.reports.against.text import against_summary

        return render_plain(against_summary(self))


def set_against(now: Report, before: Report, *, names: tuple[str, str]) -> Against:
    """Pair the comparable rows and report changes; `names`: labels for now and before."""
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
    """Return `standard, flat on 1b at batch 8, sequence 256, bf16`: the methods of each size together."""
    groups = grouped(rows, lambda row: f"{row.field('model')} at {row.size}, {step_in_words(row.spec)}")
    named = [f"{', '.join(row.method for row in own)} on {where}" for where, own in groups.items()]
    more = [f"and {len(named) - most} more sizes"] if len(named) > most else []
    return "; ".join([*named[:most], *more])


def _memory_sources(pairs: Sequence[tuple[Row, Row]]) -> tuple[str, str]:
    """Return one definition of the peak for the whole table: the one that most pairs have on both sides.

    If no pair has the same one on both sides, each sweep shows its own, and they are not compared.
    """
    known = [(peaks_by_source(older), peaks_by_source(newer)) for older, newer in pairs]
    both = [source for older, newer in known for source in newer if source in older]
    of_sides = [both or [source for sides in known for source in sides[place]] for place in (0, 1)]
    # The first of those that occur most often: the memory instrument's comes first.
    before, now = (max(dict.fromkeys(sources), key=sources.count, default="") for sources in of_sides)
    return before, now


def to_records(against: Against) -> list[dict[str, Any]]:
    """Return a record for each row; `in`: both, before or now. A row of only one sweep keeps its status."""
    return [
        {**row.fields(*IDENTITY, *COMPARED), "in": sweeps, "status_before": before, "status_now": now, **figures}
        for row, sweeps, before, now, figures in (
            *((pair.now, "both", *pair.statuses, _figures(pair)) for pair in against.pairs),
            *((row, "before", row.result.status, None, {}) for row in against.only_before),
            *((row, "now", None, row.result.status, {}) for row in against.only_now),
        )
    ]


def _figures(pair: Pair) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for key, change in pair.changes.items():
        unit = f"_{change.quantity.unit}" if change.quantity.unit else ""
        sides = {"before": change.before, "now": change.now}
        named |= {f"{key}_{side}{unit}": reading.value for side, reading in sides.items()}
        named |= {f"{key}_change": change.relative, f"{key}_verdict": change.verdict or None}
        if key in (TIME.key, TIME.ratio.key):  # times have a spread, and can be doubtful
            named |= {f"{key}_doubt_{side}": reading.doubt or None for side, reading in sides.items()}
        if key == MEMORY.key:
            named |= {f"memory_source_{side}": reading.source or None for side, reading in sides.items()}
        for side, reading in sides.items() if key == TIME.key else ():
            low, high = reading.spread or (None, None)
            named |= {f"time_p10_{side}_ms": low, f"time_p90_{side}_ms": high}
            named |= {f"time_steps_{side}": reading.steps or None}
    return named


AGAINST_CSV: Output[Against] = text_output(
    *("against.csv", "a line for each row of either sweep", lambda against: frame_to_csv(against.to_pandas())),
    asked_for="csv",
)
