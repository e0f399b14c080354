"""Ranks of a result over several processes, and the data they exchange in a step."""

from __future__ import annotations

from dataclasses import dataclass

from dpscope.results.payloads.ranks import Link, RanksPayload
from dpscope.results.schema import Result
from dpscope.vocabulary.settings import SETTINGS

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "broadcast")  # in the order of columns; others after them


@dataclass(frozen=True)
class RankCosts:
    """Figures by rank. A simulated world has one rank and a computed sending time."""

    payload: RanksPayload
    world_size: int

    @property
    def simulated(self) -> bool:
        return self.payload["simulated"]

    @property
    def peaks(self) -> list[int]:
        """Bytes, by rank."""
        return self.payload["peak_bytes"]

    @property
    def slowest(self) -> int:
        return self.payload["time_ms"].index(max(self.payload["time_ms"]))

    @property
    def largest(self) -> int:
        """The rank with the highest peak."""
        return self.peaks.index(max(self.peaks))

    @property
    def bytes(self) -> dict[str, int]:
        """Collective -> bytes of its larger side, in a step of one rank."""
        found = self.payload["collectives"]
        names = [name for name in COLLECTIVES if name in found]
        return {name: found[name]["bytes"] for name in [*names, *sorted(set(found) - set(names))]}

    @property
    def collective_bytes(self) -> int:
        return sum(self.bytes.values())

    @property
    def sent_bytes(self) -> int:
        return sum(each["sent_bytes"] for each in self.payload["collectives"].values())

    @property
    def share(self) -> float | None:
        """Share of a profiled step with a collective under way, on the rank that waits least; None if simulated."""
        return min(self.payload.get("collective_share") or [], default=None)

    @property
    def link(self) -> Link | None:
        """Computed sending time of a rank in a simulated world."""
        return self.payload.get("link")

    def with_sending(self, step_ms: float | None) -> tuple[float, float] | None:
        """Return the time of a simulated step if communication is fully hidden, and if none of it is."""
        if self.link is None or step_ms is None:
            return None
        return max(step_ms, self.link["send_ms"]), step_ms + self.link["send_ms"]


def ranks_in(result: Result) -> RankCosts | None:
    """Return the costs of a result's ranks; None if it is of one process."""
    ranks = result.ranks
    if not ranks or not ranks["time_ms"] or not ranks["peak_bytes"]:
        return None
    return RankCosts(ranks, SETTINGS["simulate_world" if ranks["simulated"] else "gpus"].of(result.spec))
