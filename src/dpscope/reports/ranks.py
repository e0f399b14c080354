"""What a row over several processes shows beside its time and peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from dpscope.plain_text import Column, table_of
from dpscope.reports.doubt import marked
from dpscope.reports.tables import BATCH_OF_A_RANK, BATCH_OF_A_STEP, Row, once_a_row
from dpscope.reports.text_table import identity_columns
from dpscope.reports.traffic.data import APPROXIMATELY
from dpscope.results.payloads.ranks import RanksPayload
from dpscope.units import MISSING, format_bytes, format_ms, format_ratio

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "broadcast")  # in the order of columns; others after them
OVER_RANKS = "Over several processes: bytes and peaks by rank"
SIMULATED_RANK = "One rank of a simulated world: nothing travels, and what sending takes is computed"
COLLECTIVE_NOTE = (
    "Peak: least and most of all ranks, and which rank needs most. Collectives: bytes of a step on one rank, those of "
    "the larger side of each. Share: how much of a profiled step had one under way, moving data or waiting for other "
    "ranks, on the rank that waited least."
)
SIMULATED_NOTE = (
    "≈: computed. Sending: bytes that a rank sends by the ring algorithm, over the stated bandwidth of its link. Step "
    "with it: if all of it were hidden behind computing, and if none were. Samples a second are those of one rank."
)


@dataclass(frozen=True)
class RankView:
    """One row's figures by rank. Of a simulated world there is one rank, and the time of sending is computed."""

    row: Row
    ranks: RanksPayload

    @property
    def simulated(self) -> bool:
        return self.ranks["simulated"]

    @property
    def world_size(self) -> int:
        size: int = self.row.field("simulate_world" if self.simulated else "gpus")
        return size

    @property
    def slowest(self) -> int:
        return self.ranks["time_ms"].index(max(self.ranks["time_ms"]))

    @property
    def largest(self) -> int:
        """The rank with the highest peak."""
        return self.ranks["peak_bytes"].index(max(self.ranks["peak_bytes"]))

    @property
    def bytes(self) -> dict[str, int]:
        """Collective -> bytes of its larger side, in a step of one rank."""
        found = self.ranks["collectives"]
        names = [name for name in COLLECTIVES if name in found]
        return {name: found[name]["bytes"] for name in [*names, *sorted(set(found) - set(names))]}

    @property
    def collective_bytes(self) -> int:
        return sum(self.bytes.values())

    @property
    def sent_bytes(self) -> int:
        return sum(each["sent_bytes"] for each in self.ranks["collectives"].values())

    @property
    def share(self) -> float | None:
        """Of a profiled step, how much has a collective under way, on the rank that waits least; None if simulated."""
        return min(self.ranks.get("collective_share") or [], default=None)

    @property
    def send_ms(self) -> float | None:
        """Computed, of a simulated world: bytes that a rank sends over its link."""
        link = self.ranks.get("link")
        return None if link is None else link["send_ms"]

    @property
    def computed_step_ms(self) -> tuple[float, float] | None:
        """Of a simulated world: if all sending were hidden behind computing, and if none were."""
        if self.send_ms is None or self.row.median_ms is None:
            return None
        return max(self.row.median_ms, self.send_ms), self.row.median_ms + self.send_ms

    def record(self) -> dict[str, Any]:
        """For CSV and pandas."""
        peaks, link, step = self.ranks["peak_bytes"], self.ranks.get("link"), self.computed_step_ms
        return {
            "ranks": self.world_size,
            "ranks_simulated": self.simulated,
            "slowest_rank": None if self.simulated else self.slowest,
            "rank_peak_least_bytes": min(peaks),
            "rank_peak_most_bytes": max(peaks),
            "rank_with_most_memory": None if self.simulated else self.largest,
            **{f"{name.replace('-', '_')}_bytes": size for name, size in self.bytes.items()},
            "sent_bytes": self.sent_bytes,
            "collective_share": self.share,
            "scaling": self.row.scaling,
            "scaling_equal": self.row.scaling_batch or None,
            "computed_link_gbps": link and link["gbps"],
            "computed_send_ms": self.send_ms,
            "computed_step_hidden_ms": step and step[0],
            "computed_step_unhidden_ms": step and step[1],
        }


@once_a_row
def rank_view_of(row: Row) -> RankView | None:
    ranks = row.ranks
    return RankView(row, ranks) if ranks and ranks["time_ms"] and ranks["peak_bytes"] else None


def rank_records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A record for each row, all with the same columns; without any where no row is of several processes."""
    found = [view.record() if (view := rank_view_of(row)) else {} for row in rows]
    names = dict.fromkeys(name for record in found for name in record)
    return [{name: record.get(name) for name in names} for record in found]


def ranks_section(rows: Sequence[Row], width: int) -> list[RenderableType]:
    """Ranks, collectives and scaling of every row over several processes."""
    views = [view for row in rows if (view := rank_view_of(row))]
    parts: list[RenderableType] = []
    for heading, columns in ((OVER_RANKS, _measured_columns), (SIMULATED_RANK, _simulated_columns)):
        if found := [view for view in views if view.simulated is (heading == SIMULATED_RANK)]:
            identity: list[Column[RankView]] = identity_columns([view.row for view in found], lambda view: view.row)
            table = table_of(found, [*identity, *columns(found)], left={"method"})
            dim = [Text(note, style="dim") for note in _notes(found)]
            parts += [*([""] if parts else []), Text(heading, style="bold"), "", table, "", *dim]
    return parts


def _measured_columns(views: Sequence[RankView]) -> list[Column[RankView]]:
    scaling: Column[RankView] = ("scaling", lambda view: scaling_shown(view.row))
    return [
        ("slowest", lambda view: f"rank {view.slowest}"),
        ("peak (rank)", _peaks),
        *_collective_columns(views),
        ("share", lambda view: MISSING if view.share is None else f"{view.share:.0%}"),
        *([scaling] if any(view.row.scaling for view in views) else []),
    ]


def _simulated_columns(views: Sequence[RankView]) -> list[Column[RankView]]:
    def sending(view: RankView) -> str:
        link = view.ranks.get("link")
        return MISSING if link is None else f"{APPROXIMATELY}{format_ms(link['send_ms'])} at {link['gbps']:g} Gbit/s"

    def step(view: RankView) -> str:
        found = view.computed_step_ms
        return MISSING if found is None else APPROXIMATELY + _range(*map(format_ms, found))

    ranks: Column[RankView] = ("ranks", lambda view: str(view.world_size))
    return [ranks, *_collective_columns(views), ("sending", sending), ("step with it", step)]


def _collective_columns(views: Sequence[RankView]) -> list[Column[RankView]]:
    def column(name: str) -> Column[RankView]:
        return name, lambda view: format_bytes(view.bytes.get(name))

    called = dict.fromkeys(name for view in views for name in view.bytes)
    return [column(name) for name in dict.fromkeys([*COLLECTIVES, *called]) if name in called]


def _peaks(view: RankView) -> str:
    """`12.4 MiB`, or `12.4–15.8 MiB (0)` where ranks differ."""
    least, most = (format_bytes(choose(view.ranks["peak_bytes"])) for choose in (min, max))
    return most if least == most else f"{_range(least, most)} ({view.largest})"


def _range(low: str, high: str) -> str:
    """`85.0–85.8 ms`: the unit once where both have it."""
    return f"{low.removesuffix(' ' + high.rpartition(' ')[2])}–{high}"


def scaling_shown(row: Row) -> str:
    """`1.62× of 2`."""
    if row.scaling is None or row.alone is None:
        return MISSING
    return marked(f"{format_ratio(row.scaling)} of {row.field('gpus')}", row.time_doubt or row.alone.time_doubt)


def _notes(views: Sequence[RankView]) -> list[str]:
    if views[0].simulated:
        return [SIMULATED_NOTE]
    equal = dict.fromkeys(view.row.scaling_batch for view in views if view.row.scaling)
    told = {BATCH_OF_A_RANK: "as large a batch as one rank has", BATCH_OF_A_STEP: "the whole step's batch"}
    against = "Scaling: samples a second against the same method in one process with"
    return [COLLECTIVE_NOTE, *(f"{against} {told[each]}; n of n is perfect." for each in equal)]
