"""What a row over several processes shows beside its time and peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpscope.reports.tables import Row, once_a_row
from dpscope.results.payloads.ranks import RanksPayload

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "broadcast")  # in the order of columns; others after them


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
        return _place_of_largest(self.ranks["time_ms"])

    @property
    def largest(self) -> int:
        """The rank with the highest peak."""
        return _place_of_largest(self.ranks["peak_bytes"])

    @property
    def bytes(self) -> dict[str, int]:
        """Collective -> bytes of its larger side, in a step of one rank."""
        found = self.ranks["collectives"]
        names = [name for name in COLLECTIVES if name in found]
        return {name: found[name]["bytes"] for name in [*names, *sorted(set(found) - set(names))]}

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


def _place_of_largest(figures: Sequence[float]) -> int:
    return max(range(len(figures)), key=figures.__getitem__)
