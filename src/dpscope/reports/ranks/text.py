"""The part of the summary that tells of rows over several processes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dpscope.reports.doubt import marked
from dpscope.reports.ranks.data import COLLECTIVES, RankView, rank_view_of
from dpscope.reports.tables import BATCH_OF_A_RANK, BATCH_OF_A_STEP, Row
from dpscope.reports.text_table import Column, identity_columns, table_of
from dpscope.reports.traffic.data import APPROXIMATELY
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


def ranks_section(rows: Sequence[Row], width: int) -> list[RenderableType]:
    """Ranks, collectives and scaling of every row over several processes."""
    views = [view for row in rows if (view := rank_view_of(row))]
    measured, simulated = ([view for view in views if view.simulated is wanted] for wanted in (False, True))
    parts: list[RenderableType] = []
    if measured:
        parts += [Text(OVER_RANKS, style="bold"), "", _measured_table(measured), "", *_measured_notes(measured)]
    if simulated:
        parts += [""] * bool(parts)
        parts += [
            Text(SIMULATED_RANK, style="bold"),
            "",
            _simulated_table(simulated),
            "",
            Text(SIMULATED_NOTE, style="dim"),
        ]
    return parts


def _measured_table(views: Sequence[RankView]) -> Table:
    columns: list[Column[RankView]] = [
        *_identity(views),
        ("slowest", lambda view: f"rank {view.slowest}"),
        ("peak (rank)", _peaks),
        *_collective_columns(views),
        ("share", lambda view: MISSING if view.share is None else f"{view.share:.0%}"),
    ]
    if any(view.row.scaling for view in views):
        columns.append(("scaling", lambda view: scaling_shown(view.row)))
    return table_of(views, columns, left={"method"})


def _simulated_table(views: Sequence[RankView]) -> Table:
    columns: list[Column[RankView]] = [
        *_identity(views),
        ("ranks", lambda view: str(view.world_size)),
        *_collective_columns(views),
        ("sending", _sending),
        ("step with it", _computed_step),
    ]
    return table_of(views, columns, left={"method"})


def _identity(views: Sequence[RankView]) -> list[Column[RankView]]:
    return identity_columns([view.row for view in views], lambda view: view.row)


def _collective_columns(views: Sequence[RankView]) -> list[Column[RankView]]:
    names = dict.fromkeys([*COLLECTIVES, *(name for view in views for name in view.bytes)])
    called = [name for name in names if any(name in view.bytes for view in views)]

    def column(name: str) -> Column[RankView]:
        return name, lambda view: format_bytes(view.bytes.get(name))

    return [column(name) for name in called]


def _peaks(view: RankView) -> str:
    """`12.4 MiB`, or `12.4–15.8 MiB (0)` where ranks differ."""
    least, most = (format_bytes(choose(view.ranks["peak_bytes"])) for choose in (min, max))
    return most if least == most else f"{_range(least, most)} ({view.largest})"


def _range(low: str, high: str) -> str:
    """`85.0–85.8 ms`: the unit once where both have it."""
    return f"{low.removesuffix(' ' + high.rpartition(' ')[2])}–{high}"


def _sending(view: RankView) -> str:
    link = view.ranks.get("link")
    return MISSING if link is None else f"{APPROXIMATELY}{format_ms(link['send_ms'])} at {link['gbps']:g} Gbit/s"


def _computed_step(view: RankView) -> str:
    found = view.computed_step_ms
    return MISSING if found is None else APPROXIMATELY + _range(*map(format_ms, found))


def scaling_shown(row: Row) -> str:
    """`1.62× of 2`."""
    if row.scaling is None or row.alone is None:
        return MISSING
    return marked(f"{format_ratio(row.scaling)} of {row.field('gpus')}", row.time_doubt or row.alone.time_doubt)


def _measured_notes(views: Sequence[RankView]) -> list[RenderableType]:
    notes = [COLLECTIVE_NOTE]
    equal = dict.fromkeys(view.row.scaling_batch for view in views if view.row.scaling)
    told = {BATCH_OF_A_RANK: "as large a batch as one rank has", BATCH_OF_A_STEP: "the whole step's batch"}
    notes += [
        f"Scaling: samples a second against the same method in one process with {told[each]}; n of n is perfect."
        for each in equal
    ]
    return [Text(note, style="dim") for note in notes]
