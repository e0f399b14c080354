"""Payload of a row over several processes: each rank's time and peak, and what travels between them."""

from __future__ import annotations

from typing_extensions import NotRequired, TypedDict


class Collective(TypedDict):
    """One kind of collective in a step, as rank 0 calls it."""

    calls: int
    bytes: int  # of the larger side, input or output
    sent_bytes: int  # by one rank, by the ring algorithm


class Link(TypedDict):
    """Sending time of a simulated rank at a stated bandwidth, computed and not measured."""

    gbps: float  # Gbit/s of one rank's link
    send_ms: float


class RanksPayload(TypedDict):
    simulated: bool  # one rank without the others: collectives return at once
    time_ms: list[float]  # median of a step, by rank
    peak_bytes: list[int]  # by rank
    collectives: dict[str, Collective]  # by name
    collective_share: NotRequired[list[float]]  # by rank: of a profiled step, how much had a collective under way
    link: NotRequired[Link]  # of a simulated world
