"""Identity of a result: the rows it is compared with, its size and its step, where it was measured and when."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Any

from dpscope.results.schema import Result
from dpscope.units import GIB
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


LIBRARIES = {"opacus": "Opacus", "triton": "Triton", "transformers": "transformers", "peft": "PEFT"}

# In the order of tables. What else a file says of its environment has no name of its own.
ENVIRONMENT = {
    **{"gpu": "GPU", "cpu": "CPU", "threads": "CPU threads", "cuda": "CUDA", "driver": "driver", "torch": "torch"},
    **LIBRARIES,
    **{"python": "Python", "dpscope": "dpscope", "git_commit": "dpscope's commit"},
}

# What changes what a measurement gives: `--resume` keeps a row only where these are the same, and the page warns where
# rows differ in them.
MUST_BE_EQUAL = tuple(key for key in ENVIRONMENT if key not in ("python", "git_commit"))


Facts = dict[str, str]  # what people call a part of an environment -> what it is


def machine_of(environment: dict[str, Any]) -> str | None:
    return environment.get("gpu") or environment.get("cpu")


def facts_of(environment: dict[str, Any]) -> Facts:
    facts = {name: str(environment[key]) for key, name in ENVIRONMENT.items() if environment.get(key) is not None}
    if memory := environment.get("gpu_memory_bytes"):
        facts["GPU"] = f"{facts.get('GPU', '')} ({memory / GIB:.0f} GiB)".strip()
    return facts


def merge_facts(environments: Sequence[Facts]) -> list[Facts]:
    """Merge environments that agree; a name that only one of them has is no difference."""
    merged: list[Facts] = []
    for facts in environments:
        alike = next((other for other in merged if not differing_facts([facts, other])), None)
        if alike is None:
            merged.append(alike := {})
        alike |= {name: text for name, text in facts.items() if name not in alike}
    return merged


def differing_facts(environments: Sequence[Facts]) -> dict[str, list[str]]:
    """Return the names on which environments disagree, with each value."""
    names = [ENVIRONMENT[key] for key in MUST_BE_EQUAL]
    values = {name: list(dict.fromkeys(f[name] for f in environments if name in f)) for name in names}
    return {name: found for name, found in values.items() if len(found) > 1}


def days_of(results: Sequence[Result]) -> str:
    """Return the day or days of the measurement, in UTC, if memory snapshots recorded the time."""
    stamps = [snapshot.get("timestamp") for result in results for snapshot in result.snapshots[:1]]
    days = sorted({time.strftime("%Y-%m-%d", time.gmtime(stamp)) for stamp in stamps if isinstance(stamp, int | float)})
    return " to ".join(dict.fromkeys((days[0], days[-1]))) if days else ""
