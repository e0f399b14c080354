"""Names of modules as results have them: dotted, with layer numbers; names that are no modules are in brackets."""

from __future__ import annotations

import re
from collections.abc import Sequence

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a dotted name
SUMS = re.compile(r"\((\d+ )?others?\)")  # what instruments call the modules that they do not list


def is_summary(name: str) -> bool:
    """Return whether the name stands for no module, like `(outside the modules)`."""
    return name.startswith("(")


def is_sum_of_others(name: str) -> bool:
    return SUMS.fullmatch(name) is not None


def depth_of(name: str) -> int:
    return name.count(".") + 1


def ancestor(name: str, depth: int) -> str:
    """Return the module's ancestor at a depth, or the module itself."""
    return name if is_summary(name) else ".".join(name.split(".")[:depth])


def pattern_of(name: str) -> str:
    """Return `blocks.*.up`: equal for layers that differ only in their numbers."""
    return NUMBER.sub("*", name)


def layer_numbers(name: str) -> list[int]:
    return [int(number) for number in NUMBER.findall(name)]


def name_of_run(run: Sequence[str], pattern: str) -> str:
    """Return `blocks.*.up` for all of a family, `blocks.0–9.up` for some, `blocks.3.up` for one."""
    if len(run) == 1:
        return run[0]
    first, last = layer_numbers(run[0]), layer_numbers(run[-1])
    if pattern or sum(one != other for one, other in zip(first, last, strict=True)) > 1:
        return pattern or f"{run[0]} to {run[-1]}"
    ends = iter(str(one) if one == other else f"{one}–{other}" for one, other in zip(first, last, strict=True))
    return NUMBER.sub(lambda _: next(ends), run[0])
