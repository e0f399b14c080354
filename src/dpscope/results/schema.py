"""The result file: what one measurement gave (docs/architecture.md). 1 MB = 2^20 bytes in `_mb` keys.

Values that were read are validated against their declared types, which are those that JSON can hold: `TypedDict`,
`list[X]`, `dict[str, X]`, `tuple[X, Y]`, `X | None`, `Literal`, `str`, `bool`, `int`, `float` and `Any`. Keys that are
not declared are left alone: a later version may have written them.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from typing_extensions import NotRequired, get_type_hints, is_typeddict

from dpscope.errors import UserError
from dpscope.places import path_from
from dpscope.results.payloads.memory import MemoryPayload, RanksPayload, Snapshot, TimelinePayload, TimingPayload
from dpscope.results.payloads.ncu import NcuPayload
from dpscope.results.payloads.trace import NsysPayload, TracePayload
from dpscope.vocabulary.instruments import INSTRUMENTS
from dpscope.vocabulary.settings import FLAGS, SETTINGS
from dpscope.vocabulary.statuses import OK, STATUSES

LARGEST_INT = 2**63
LARGEST_FLOAT = 1e300  # figures are multiplied with each other
OPTIONAL_KEY: Any = NotRequired
_NUMBERS: dict[Any, tuple[tuple[type, ...], float]] = {int: ((int,), LARGEST_INT), float: ((int, float), LARGEST_FLOAT)}
_WORDS = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}
_WORDS |= {list: "a list", dict: "an object", type(None): "nothing"}


def find_mismatch(value: object, expected: Any, where: str = "") -> str | None:
    """Return `peak.phase: text expected, not 3` for the first place that is not as declared; None if all is."""
    return next(_mismatches(value, expected, where), None)


def _mismatches(value: object, expected: Any, where: str) -> Iterator[str]:
    origin, arguments, is_object = _take_apart(expected)
    if origin in (Union, types.UnionType):
        found = [find_mismatch(value, choice, where) for choice in arguments if choice is not type(None)]
        if value is not None or type(None) not in arguments:
            yield from found[:1] if None not in found else ()  # type: ignore[misc]
    elif is_object and isinstance(value, dict):
        for name, (kind, required) in _fields(expected).items():
            if name in value:
                yield from _mismatches(value[name], kind, f"{where}.{name}".removeprefix("."))
            elif required:
                yield f"{where or 'the object'} has no {name!r}"
    elif origin is list and isinstance(value, list):
        # A long list of finite numbers is summed: the sum is NaN if one of them is.
        allowed, largest = _NUMBERS.get(arguments[0], ((), 0))
        if not (set(map(type, value)).issubset(allowed) and sum(map(abs, value)) < largest):
            yield from _in_each(value, [arguments[0]] * len(value), where)
    elif origin is tuple and isinstance(value, list) and len(value) == len(arguments):
        yield from _in_each(value, arguments, where)
    elif origin is dict and isinstance(value, dict):
        for name, item in value.items():
            yield from _mismatches(item, arguments[1], f"{where}.{name}".removeprefix("."))
    elif not _is_plain(value, expected):
        shown = _WORDS[type(value)] if value is None or isinstance(value, list | dict) else repr(value)[:40]
        yield f"{where or 'it'}: {_describe(expected)} expected, not {shown}"


@cache
def _take_apart(expected: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """Return origin and arguments of a type, and whether it is a `TypedDict`; cached, because values are many."""
    return get_origin(expected), get_args(expected), is_typeddict(expected)


def _in_each(values: list[Any], expected: Any, where: str) -> Iterator[str]:
    for index, (item, kind) in enumerate(zip(values, expected, strict=True)):
        yield from _mismatches(item, kind, f"{where}[{index}]")


@cache
def _fields(expected: Any) -> dict[str, tuple[Any, bool]]:
    """Map names to (type, is required). `__required_keys__` is wrong if annotations are postponed."""
    hints = get_type_hints(expected, include_extras=True)
    optional = {name for name, kind in hints.items() if get_origin(kind) is OPTIONAL_KEY}
    return {
        name: (get_args(kind)[0] if name in optional else kind, expected.__total__ and name not in optional)
        for name, kind in hints.items()
    }


def _is_plain(value: object, expected: Any) -> bool:
    if expected is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST_FLOAT
    if expected is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST_INT
    origin, arguments, _ = _take_apart(expected)
    if origin is Literal:
        return value in arguments
    return expected is Any or (expected in (str, bool) and isinstance(value, expected))


def _describe(expected: Any) -> str:
    origin, arguments, is_object = _take_apart(expected)
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin is tuple:
        return f"a list of {len(arguments)}"
    return _WORDS[dict if is_object else origin or expected]


SCHEMA_VERSION = 1
_IN_TRACEBACK = re.compile(r'(?<=File ")[^"\n]+(?=", line )')

# What each instrument fills in beside the figures that all results have.
INSTRUMENT_PARTS = ("timeline", "trace", "ncu", "nsys")
PAYLOADS = ("timing", "memory", "breakdown", "snapshots", *INSTRUMENT_PARTS, "ranks")  # as declared, if a row is ok

# What every report reads of a spec.
SPEC_KEYS = {
    *("workload", "method", "batch_size", "seq_len", "dtype", "optimizer"),
    *("noise_multiplier", "max_grad_norm", "warmup", "steps"),
}


# What is worth knowing beside a row's figures: "topic", "sentence", and whatever data the sentence is made of.
Note = dict[str, Any]


class UnreadableResult(UserError):
    """A file that is not a result this version of dpscope can read, and why."""


def _nothing() -> Any:
    """Return the empty part of an instrument that was not used."""
    return {}


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of one measurement, as its JSON file holds it (docs/architecture.md describes every key).

    Attributes:
        spec: Description of the measurement, as `RunSpec.to_dict()`.
        status: "ok", "oom", "failed", "timeout" or "skipped".
        reason: Why there are no figures, for any other status than "ok".
        avg_time_ms: Mean step time in milliseconds; `timing` has all times.
        peak_memory_mb: Peak memory in MiB; `memory` and `timeline` have its parts.
        files: Further files by what they are, as paths below the folder of the sweep.
        environment: Versions and hardware.
    """

    experiment: str
    config: dict[str, Any]
    spec: dict[str, Any]
    status: str = OK
    reason: str | None = None  # for every status but ok: a sentence a person can act on
    avg_time_ms: float | None = None
    peak_memory_mb: float | None = None
    breakdown: dict[str, float] = field(default_factory=dict)
    snapshots: list[Snapshot] = field(default_factory=list)
    timing: TimingPayload = field(default_factory=TimingPayload)
    memory: MemoryPayload = field(default_factory=MemoryPayload)
    timeline: TimelinePayload = field(default_factory=TimelinePayload)
    trace: TracePayload = field(default_factory=_nothing)
    ncu: NcuPayload = field(default_factory=_nothing)
    nsys: NsysPayload = field(default_factory=_nothing)
    ranks: RanksPayload = field(default_factory=_nothing)  # of a row over several processes
    files: dict[str, str] = field(default_factory=dict)  # what it is -> path below the folder of the sweep
    notes: list[Note] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    details: str | None = None  # traceback or last lines of the child, for the person who has to fix it
    schema_version: int = SCHEMA_VERSION
    parts: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # instrument -> what it saw, where no key above is its

    @property
    def instrument(self) -> str:
        return str(self.spec.get("instrument", "time"))

    @property
    def ok(self) -> bool:
        """True if the measurement succeeded."""
        return self.status == OK

    def to_json(self) -> str:
        """Return the text of the result file."""
        document = {f.name: getattr(self, f.name) for f in fields(self)}
        parts = document.pop("parts")  # under the names of the instruments, as their keys are
        return json.dumps({**document, **parts}, indent=2) + "\n"


_SHAPES = get_type_hints(Result)


def result_for(spec: dict[str, Any], **values: Any) -> Result:
    """Return a result of a spec (as a dict), with the keys that older consumers read filled in from it."""
    workload = {name: value for name, value in spec["workload"].items() if name not in ("kind", "name")}
    config = {**workload, "model": spec["workload"]["name"]}
    config |= {
        name: value for name, value in spec.items() if name not in ("workload", "method", "instrument", "options")
    }
    return Result(experiment=spec["method"], config=config, spec=spec, **values)


def merge_results(time: Result, memory: Result) -> Result:
    """Merge the results of two instruments for the same step; the first that is not ok sets the status."""
    for result in (time, memory):
        if not result.ok:
            return result
    return replace(memory, avg_time_ms=time.avg_time_ms, timing=time.timing)


def with_paths_from(folder: Path, result: Result) -> Result:
    """Return the result with paths relative to a folder: that of the workload's file, and those in tracebacks."""
    workload = result.spec["workload"]
    if isinstance(file := workload.get("file"), str):
        workload = {**workload, "file": path_from(folder, file)}
        result = replace(result, spec={**result.spec, "workload": workload})
    if isinstance(result.details, str):
        told = _IN_TRACEBACK.sub(lambda found: path_from(folder, found[0]), result.details)
        result = replace(result, details=told)
    return result


def parse_result(text: str) -> Result:
    """Parse the result in a file's text. Raise `UnreadableResult` with a sentence if it is not a result."""
    try:
        data = json.loads(text, parse_int=_parse_int)
    except json.JSONDecodeError as error:
        raise UnreadableResult(f"not complete JSON (line {error.lineno}: {error.msg})") from None
    except (ValueError, RecursionError):
        raise UnreadableResult("not a dpscope result (numbers or nesting beyond measure)") from None
    if not isinstance(data, dict) or "schema_version" not in data or "experiment" not in data:
        raise UnreadableResult("not a dpscope result")
    if data["schema_version"] != SCHEMA_VERSION:
        raise UnreadableResult(
            f"written with result schema {data['schema_version']!r}, this dpscope reads {SCHEMA_VERSION}: "
            "measure again, or read it with the version that wrote it"
        )
    if damaged := sorted(name for name, intact in _PARTS.items() if name in data and not intact(data[name])):
        raise UnreadableResult(f"a damaged dpscope result ({', '.join(damaged)})")
    if missing := sorted({"config", "spec", "status"} - set(data)):
        raise UnreadableResult(f"a damaged dpscope result (no {', '.join(missing)})")
    for part in PAYLOADS if data["status"] == OK else ():
        if data.get(part) and (mismatch := find_mismatch(data[part], _SHAPES[part], part)):
            raise UnreadableResult(f"a damaged dpscope result ({mismatch})")
    known = {f.name for f in fields(Result)} - {"parts"}
    parts = {name: data[name] for name in INSTRUMENTS if name in data and name not in known}
    if damaged := sorted(name for name, part in parts.items() if not _is_dict(part)):
        raise UnreadableResult(f"a damaged dpscope result ({', '.join(damaged)})")
    return Result(**{name: value for name, value in data.items() if name in known}, parts=parts)


def _parse_int(digits: str) -> int:
    """Accept a whole number given as a float: bytes and operations are divided by other figures."""
    if len(digits) > 300:
        raise ValueError("beyond measure")
    return int(digits)


def _is_dict(value: object) -> bool:
    return isinstance(value, dict)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return _is_plain(value, int) and value >= 0  # type: ignore[operator]


_OF_TYPE: dict[type, Callable[[Any], bool]] = {
    str: _is_text,
    int: _is_count,
    float: lambda value: _is_plain(value, float) and value >= 0,
    bool: lambda value: isinstance(value, bool),
}
# What the values of a spec are, in every file that has them.
_SPEC: dict[str, Callable[[Any], bool]] = {
    **{name: _OF_TYPE[type(SETTINGS[name].default)] for name in FLAGS},
    **dict.fromkeys(("method", "instrument"), _is_text),
    "batch_size": _is_count,
    "seq_len": lambda value: value is None or _is_count(value),
    "workload": lambda value: _is_dict(value) and _is_text(value.get("name")),
    "options": _is_dict,
}


# What every reader may take for granted about the parts of a result.
_PARTS: dict[str, Callable[[Any], bool]] = {
    "experiment": _is_text,
    "status": lambda value: value in STATUSES,
    "spec": lambda value: (
        _is_dict(value)
        and set(value) >= SPEC_KEYS
        and all(intact(value[name]) for name, intact in _SPEC.items() if name in value)
    ),
    "environment": lambda value: (
        _is_dict(value) and all(value.get(name) is None or _is_text(value[name]) for name in ("cpu", "gpu"))
    ),
    **dict.fromkeys(("config", "breakdown", "timing", "memory", "ranks", *INSTRUMENT_PARTS, "files"), _is_dict),
    "snapshots": lambda value: isinstance(value, list) and all(map(_is_dict, value)),
    "notes": lambda value: (
        isinstance(value, list) and all(_is_dict(note) and isinstance(note.get("sentence"), str) for note in value)
    ),
}
