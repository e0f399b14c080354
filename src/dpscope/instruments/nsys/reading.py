"""Contents of a capture, from the SQLite file that `nsys export` makes of a report. All times are nanoseconds.

Tables are there only if something of their kind was recorded: no copies, no table of copies. A file is refused, with a
sentence, if it is no export, is damaged, or holds no GPU work at all.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from dpscope.errors import UserError

KERNEL, MEMCPY, MEMSET = "kernel", "copy", "memset"
PAGEABLE = 0  # CUDA_MEMOPR_MEMORY_KIND: host memory that is not pinned

# A thread is identified by host, process and thread in one number; its process by the same without the last 24 bits.
_PROCESS = ~0xFFFFFF

_VERSION_SUFFIX = re.compile(r"_v\d+$")  # cudaLaunchKernel_v7000

T = TypeVar("T")


class UnreadableCapture(UserError):
    """A file that is no capture dpscope can read, and why."""


@dataclass(frozen=True)
class Activity:
    """Something the GPU did."""

    kind: str
    name: str  # of the kernel, or the kind of copy: Host-to-Device
    start: int
    end: int
    device: int
    call: tuple[int, int] | None  # what launched it: process and correlation id
    bytes: int = 0
    stream: int = 0
    pageable: bool = False  # a copy from or to host memory that is not pinned


@dataclass(frozen=True)
class Call:
    """A call of the CUDA API."""

    name: str
    start: int
    end: int
    thread: int
    id: tuple[int, int] | None  # process and correlation id


@dataclass(frozen=True)
class Range:
    """An NVTX range."""

    name: str
    start: int
    end: int
    thread: int


@dataclass(frozen=True)
class CapturedTimeline:
    activities: list[Activity]  # by start
    calls: list[Call]
    ranges: list[Range]  # by start, an outer one before an inner one


def read_timeline(path: Path) -> CapturedTimeline:
    """Return everything in an export that the summary needs."""
    if not path.is_file():
        raise UnreadableCapture(f"{path} is not there: give the .sqlite file of an `nsys export`")
    try:
        # Read-only and immutable: no journal appears beside somebody's file.
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            return _read(database, path)
    except sqlite3.DatabaseError as error:
        if "no such column" in str(error):
            raise UnreadableCapture(
                f"{path} was exported by a version of nsys whose tables dpscope does not know ({error}): export it "
                "again with Nsight Systems 2021 or newer"
            ) from None
        raise UnreadableCapture(
            f"{path} cannot be read as SQLite ({error}): it was cut short or is something else. Export it again: "
            f"nsys export --type=sqlite --force-overwrite=true REPORT.nsys-rep"
        ) from None


def _read(database: sqlite3.Connection, path: Path) -> CapturedTimeline:
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "StringIds" not in tables:
        raise UnreadableCapture(f"{path} is no export of Nsight Systems: it has no table StringIds")

    def rows(table: str, query: str, make: Callable[..., T]) -> Iterator[T]:
        """Yield the rows of a query; none if the table does not exist."""
        return (make(*row) for row in database.execute(query)) if table in tables else iter(())

    copy_columns = {column for _, column, *_ in database.execute("PRAGMA table_info(CUPTI_ACTIVITY_KIND_MEMCPY)")}
    activities = [
        *rows("CUPTI_ACTIVITY_KIND_KERNEL", _KERNELS, _activity),
        *rows("CUPTI_ACTIVITY_KIND_MEMCPY", _copies(tables, copy_columns), _activity),
        *rows("CUPTI_ACTIVITY_KIND_MEMSET", _MEMSETS, _activity),
    ]
    if not activities:
        raise UnreadableCapture(
            f"{path} holds no GPU work: nsys saw no kernel between the start and the stop of the steps. See whether "
            "another profiler is attached, and whether this nsys is as new as the driver"
        )
    ranges = list(rows("NVTX_EVENTS", _RANGES, Range))
    return CapturedTimeline(
        activities=sorted(activities, key=attrgetter("start", "end")),
        calls=sorted(rows("CUPTI_ACTIVITY_KIND_RUNTIME", _CALLS, _call), key=attrgetter("start")),
        ranges=sorted(ranges, key=lambda r: (r.start, -r.end)),
    )


_KERNELS = f"""
    SELECT '{KERNEL}', COALESCE(long.value, short.value, '?'), k.start, k.end, k.deviceId, k.globalPid,
           k.correlationId, 0, k.streamId, 0
    FROM CUPTI_ACTIVITY_KIND_KERNEL AS k
    LEFT JOIN StringIds AS long ON long.id = k.demangledName LEFT JOIN StringIds AS short ON short.id = k.shortName
"""
_MEMSETS = f"""
    SELECT '{MEMSET}', 'memset', start, end, deviceId, globalPid, correlationId, bytes, streamId, 0
    FROM CUPTI_ACTIVITY_KIND_MEMSET
"""
_CALLS = """
    SELECT COALESCE(s.value, '?'), c.start, c.end, c.globalTid, c.correlationId
    FROM CUPTI_ACTIVITY_KIND_RUNTIME AS c LEFT JOIN StringIds AS s ON s.id = c.nameId
"""
_RANGES = """
    SELECT COALESCE(r.text, s.value, '?'), r.start, r.end, r.globalTid
    FROM NVTX_EVENTS AS r LEFT JOIN StringIds AS s ON s.id = r.textId
    WHERE r.end IS NOT NULL AND r.end >= r.start AND r.globalTid IS NOT NULL
"""


def _copies(tables: set[str], columns: set[str]) -> str:
    """Return the query for copies. Exports name their kinds in a table; older ones leave CUPTI's numbers."""
    pageable = f"{PAGEABLE} IN (c.srcKind, c.dstKind)" if {"srcKind", "dstKind"} <= columns else "NULL"
    named = "ENUM_CUDA_MEMCPY_OPER" in tables
    kind = "COALESCE(e.label, 'kind ' || c.copyKind)" if named else "'kind ' || c.copyKind"
    join = "LEFT JOIN ENUM_CUDA_MEMCPY_OPER AS e ON e.id = c.copyKind" if named else ""
    return f"""
        SELECT '{MEMCPY}', {kind}, c.start, c.end, c.deviceId, c.globalPid, c.correlationId, c.bytes, c.streamId,
               {pageable}
        FROM CUPTI_ACTIVITY_KIND_MEMCPY AS c {join}
    """


def _activity(*row: Any) -> Activity:
    """Make an activity from a row of `_KERNELS`, `_MEMSETS` or `_copies`."""
    kind, name, start, end, device, process, correlation, size, stream, pageable = row
    return Activity(kind, name, start, end, device, _launch(process, correlation), size, stream, bool(pageable))


def _call(name: str, start: int, end: int, thread: int | None, correlation: int | None) -> Call:
    return Call(_VERSION_SUFFIX.sub("", name), start, end, thread or 0, _launch(thread, correlation))


def _launch(place: int | None, correlation: int | None) -> tuple[int, int] | None:
    """Process and correlation id of a call; `place`: a global id of its process or of a thread of it."""
    return None if correlation is None else ((place or 0) & _PROCESS, correlation)
