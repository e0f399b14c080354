"""What a bar of DRAM bytes is made of, in figure and page: families of kernels, or what is read and written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpscope.reports.palette import DIRECTION_COLOURS, FAMILY_COLOURS, PRIVATE_FAMILIES
from dpscope.reports.traffic.data import UNSEEN, Traffic
from dpscope.results.payloads.ncu import READ, WRITE
from dpscope.vocabulary.families import FAMILIES, FAMILY_LABELS


@dataclass(frozen=True)
class Part:
    label: str
    colour: str | None  # None: left blank
    counts: list[float | None]  # bytes, one for each bar
    private: bool = False


def family_parts(group: Sequence[Traffic]) -> list[Part]:
    """Families that any bar has, and what the whole step moved beyond its kernels' sum."""
    parts = [
        Part(
            FAMILY_LABELS.get(family, family),
            FAMILY_COLOURS.get(family),
            [each.family_parts.get(family) for each in group],
            family in PRIVATE_FAMILIES,
        )
        for family in (*FAMILIES, UNSEEN)
    ]
    return [part for part in parts if any(part.counts)]


def direction_parts(group: Sequence[Traffic]) -> list[Part]:
    return [
        Part(label, DIRECTION_COLOURS[label], [each.figure(key) for each in group])
        for label, key in (("read", READ), ("written", WRITE))
    ]
