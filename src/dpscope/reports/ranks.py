"""Figures of rows over several processes, beside time and peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.text import Text

from dpscope.plain_text import Column, table_of
from dpscope.reports.doubt import marked
from dpscope.reports.tables import BATCH_OF_A_RANK, BATCH_OF_A_STEP, Row, once_a_row
from dpscope.reports.traffic.data import APPROXIMATELY
from dpscope.reports.words import identity_columns
from dpscope.results.ranks import COLLECTIVES, RankCosts, ranks_in
from dpscope.units import MISSING, format_bytes, format_ms, format_ratio

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


class RankView(NamedTuple):
    row: Row
    ranks: RankCosts


@once_a_row
def ranks_of(row: Row) -> RankCosts | None:
    """Return the costs of a row's ranks; None if it is of one process."""
    return row.first_of(ranks_in)


def rank_records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a record for each row, all with the same columns; empty records if no row has several processes."""
    found = [_record(row, ranks) if (ranks := ranks_of(row)) else {} for row in rows]
    names = dict.fromkeys(name for record in found for name in record)
    return [{name: record.get(name) for name in names} for record in found]


def _record(row: Row, ranks: RankCosts) -> dict[str, Any]:
    link, step = ranks.link, ranks.with_sending(row.median_ms)
    return {
        "ranks": ranks.world_size,
        "ranks_simulated": ranks.simulated,
        "slowest_rank": None if ranks.simulated else ranks.slowest,
        "rank_peak_least_bytes": min(ranks.peaks),
        "rank_peak_most_bytes": max(ranks.peaks),
        "rank_with_most_memory": None if ranks.simulated else ranks.largest,
        **{f"{name.replace('-', '_')}_bytes": size for name, size in ranks.bytes.items()},
        "sent_bytes": ranks.sent_bytes,
        "collective_share": ranks.share,
        "scaling": row.scaling,
        "scaling_equal": row.scaling_batch or None,
        "computed_link_gbps": link and link["gbps"],
        "computed_send_ms": link and link["send_ms"],
        "computed_step_hidden_ms": step and step[0],
        "computed_step_unhidden_ms": step and step[1],
    }


def ranks_section(rows: Sequence[Row], width: int) -> list[RenderableType]:
    """Return ranks, collectives and scaling of every row over several processes."""
    views = [RankView(row, ranks) for row in rows if (ranks := ranks_of(row))]
    parts: list[RenderableType] = []
    for heading, columns in ((OVER_RANKS, _measured_columns), (SIMULATED_RANK, _simulated_columns)):
        if found := [view for view in views if view.ranks.simulated is (heading == SIMULATED_RANK)]:
            identity: list[Column[RankView]] = identity_columns([view.row for view in found], lambda view: view.row)
            table = table_of(found, [*identity, *columns(found)], left={"method"})
            dim = [Text(note, style="dim") for note in _notes(found)]
            parts += [*([""] if parts else []), Text(heading, style="bold"), "", table, "", *dim]
    return parts


def _measured_columns(views: Sequence[RankView]) -> list[Column[RankView]]:
    scaling: Column[RankView] = ("scaling", lambda view: scaling_shown(view.row))
    return [
        ("slowest", lambda view: f"rank {view.ranks.slowest}"),
        ("peak (rank)", _peaks),
        *_collective_columns(views),
        ("share", lambda view: MISSING if view.ranks.share is None else f"{view.ranks.share:.0%}"),
        *([scaling] if any(view.row.scaling for view in views) else []),
    ]


def _simulated_columns(views: Sequence[RankView]) -> list[Column[RankView]]:
    def sending(view: RankView) -> str:
        link = view.ranks.link
        return MISSING if link is None else f"{APPROXIMATELY}{format_ms(link['send_ms'])} at {link['gbps']:g} Gbit/s"

    def step(view: RankView) -> str:
        found = view.ranks.with_sending(view.row.median_ms)
        return MISSING if found is None else APPROXIMATELY + _range(*map(format_ms, found))

    ranks: Column[RankView] = ("ranks", lambda view: str(view.ranks.world_size))
    return [ranks, *_collective_columns(views), ("sending", sending), ("step with it", step)]


def _collective_columns(views: Sequence[RankView]) -> list[Column[RankView]]:
    def column(name: str) -> Column[RankView]:
        return name, lambda view: format_bytes(view.ranks.bytes.get(name))

    called = dict.fromkeys(name for view in views for name in view.ranks.bytes)
    return [column(name) for name in dict.fromkeys([*COLLECTIVES, *called]) if name in called]


def _peaks(view: RankView) -> str:
    """Return `12.4 MiB`, or `12.4–15.8 MiB (0)` if ranks differ."""
    least, most = (format_bytes(choose(view.ranks.peaks)) for choose in (min, max))
    return most if least == most else f"{_range(least, most)} ({view.ranks.largest})"


def _range(low: str, high: str) -> str:
    """Return `85.0–85.8 ms`: the unit once if both have it."""
    return f"{low.removesuffix(' ' + high.rpartition(' ')[2])}–{high}"


def scaling_shown(row: Row) -> str:
    """Return `1.62× of 2`."""
    if row.scaling is None or row.alone is None:
        return MISSING
    return marked(f"{format_ratio(row.scaling)} of {row.field('gpus')}", row.time_doubt or row.alone.time_doubt)


def _notes(views: Sequence[RankView]) -> list[str]:
    if views[0].ranks.simulated:
        return [SIMULATED_NOTE]
    equal = dict.fromkeys(view.row.scaling_batch for view in views if view.row.scaling)
    told = {BATCH_OF_A_RANK: "as large a batch as one rank has", BATCH_OF_A_STEP: "the whole step's batch"}
    against = "Scaling: samples a second against the same method in one process with"
    return [COLLECTIVE_NOTE, *(f"{against} {told[each]}; n of n is perfect." for each in equal)]
