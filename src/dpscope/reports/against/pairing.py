"""Which rows of two sweeps belong together, and what is not the same about where they were measured."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from dpscope.reports.tables import Row, hashable
from dpscope.units import MISSING, format_bytes
from dpscope.vocabulary.settings import EVERYWHERE, SETTINGS

# Two rows may differ in these and are compared all the same: they say how long and where was measured, not what.
MAY_DIFFER = {name: each.label for name, each in SETTINGS.items() if each.identity != EVERYWHERE}
# One's own workload is its name here: what its file says is what people change between two sweeps.
OF_WORKLOAD = {"file": "workload's file", "sha256": "workload's text"}

# What people compare comes first; whatever else an environment holds follows under its own name.
ENVIRONMENT = {
    "gpu": "GPU",
    "gpu_memory_bytes": "GPU memory",
    "cuda": "CUDA",
    "driver": "driver",
    "torch": "torch",
    "opacus": "Opacus",
    "triton": "Triton",
    "dpscope": "dpscope",
    "git_commit": "dpscope's commit",
    "cpu": "processor",
    "threads": "threads",
    "python": "Python",
}
IN_WORDS: dict[str, Callable[[Any], str]] = {
    "gpu_memory_bytes": format_bytes,
    "sha256": lambda digest: str(digest)[:12],
}


@dataclass(frozen=True)
class SweepDifference:
    """Something about the machine, the software or the settings that is not the same in both sweeps."""

    name: str
    before: str
    now: str


def pairing_key(row: Row) -> Hashable:
    """What has to be equal for two rows of two sweeps to be compared: method, workload, size, number format …"""
    workload = {name: value for name, value in row.spec["workload"].items() if name not in OF_WORKLOAD}
    identity = {name: value for name, value in row.identity.items() if name not in MAY_DIFFER}
    return hashable({**identity, "method": row.method, "workload": workload})


def pair_rows(now: Sequence[Row], before: Sequence[Row]) -> list[tuple[Row, Row]]:
    """(row of before, row of now), in the order of now. Each row is in one pair at most.

    Where a sweep has several rows that could be compared (two numbers of steps, say), those come together that were
    looked at with the same instruments, and then those with the most settings in common.
    """
    groups: dict[Hashable, tuple[list[int], list[int]]] = {}
    for side, rows in enumerate((before, now)):
        for place, row in enumerate(rows):
            groups.setdefault(pairing_key(row), ([], []))[side].append(place)
    partner: dict[int, int] = {}  # place in now -> place in before
    for older, newer in groups.values():
        for old, new in sorted(product(older, newer), key=lambda places: -_likeness(before[places[0]], now[places[1]])):
            if new not in partner and old not in partner.values():
                partner[new] = old
    return [(before[partner[place]], row) for place, row in enumerate(now) if place in partner]


def _likeness(one: Row, other: Row) -> float:
    instruments = len(one.measured.keys() & other.measured.keys())
    alike: list[bool] = [one.spec.get(name) == other.spec.get(name) for name in MAY_DIFFER]
    return instruments + sum(alike) / 10


def list_differences(pairs: Sequence[tuple[Row, Row]]) -> list[SweepDifference]:
    """Of the rows that are compared: environment first, then settings."""
    sides = [[result for pair in pairs for result in pair[side].measured.values()] for side in (0, 1)]
    environments = [[result.environment for result in side] for side in sides]
    workloads = [[result.spec["workload"] for result in side] for side in sides]
    others = {name: name for side in environments for each in side for name in each if name not in ENVIRONMENT}
    return [
        *_differences(environments, {**ENVIRONMENT, **others}),
        *_differences(workloads, OF_WORKLOAD),
        *_differences([[result.spec for result in side] for side in sides], MAY_DIFFER),
    ]


def _differences(sides: Sequence[Sequence[dict[str, Any]]], labels: dict[str, str]) -> list[SweepDifference]:
    """Of what has a label: the values that the two sides have, where they are not the same."""
    found = []
    for name, label in labels.items():
        before, now = (_in_words(name, [each.get(name) for each in side]) for side in sides)
        if before != now:
            found.append(SweepDifference(label, before, now))
    return found


def _in_words(name: str, values: Sequence[Any]) -> str:
    """Every value there is, each once."""
    say = IN_WORDS.get(name, str)
    return ", ".join(sorted({MISSING if value is None else say(value) for value in values}))
