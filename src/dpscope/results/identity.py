"""Identity of a row, from its result's spec: the rows it is compared with, its size and its step."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from dpscope.vocabulary.settings import LATER_DEFAULTS, REPEATS, SETTINGS

MEASUREMENT_FIELDS = ("method", "instrument", "options", *REPEATS)  # ten timed steps and a tracked one are one row
StepNumbers = tuple[tuple[str, Any], ...]  # (warmup, steps) by name


def identity_of(spec: dict[str, Any]) -> dict[str, Any]:
    """Return everything in a spec except the method and the measurement settings."""
    return {name: value for name, value in {**LATER_DEFAULTS, **spec}.items() if name not in MEASUREMENT_FIELDS}


def step_counts_of(spec: dict[str, Any]) -> StepNumbers:
    return tuple((name, spec.get(name)) for name in REPEATS)


def hashable(value: Any) -> Hashable:
    """Return the value in a hashable form."""
    if isinstance(value, dict):
        return tuple(sorted((name, hashable(each)) for name, each in value.items()))
    return tuple(map(hashable, value)) if isinstance(value, list | tuple) else value


def size_in_words(spec: dict[str, Any]) -> str:
    """Return `batch 8, sequence 1024`; images have no sequence."""
    length = spec.get("seq_len")
    return f"batch {spec['batch_size']}" + (f", sequence {length}" if length else "")


def step_in_words(spec: dict[str, Any]) -> str:
    """Return `bf16, adamw`, and later settings that are not the default."""
    told = [SETTINGS["dtype"], SETTINGS["optimizer"], *(each for each in SETTINGS.values() if each.is_later)]
    return ", ".join(each.in_words(spec) for each in told if each.name in spec)
