"""Copy of an export without traces of the machine: `python -m dpscope.instruments.nsys.stripping FROM TO`.

nsys records more than the steps: the profiled process's environment and what it printed, the host's name and hardware,
the names of every process on it. The copy holds only the tables and columns listed here and the strings they refer to.
Anything not known to be harmless is left out. Names of kernels, CUDA calls and NVTX ranges stay.
"""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from dpscope.instruments.nsys.reading import read_timeline

_PLACE = ("start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid")
_CALL = ("start", "end", "globalTid", "correlationId", "nameId", "returnValue")
KEPT_COLUMNS = {
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        *(*_PLACE, "demangledName", "shortName", "registersPerThread", "staticSharedMemory", "dynamicSharedMemory"),
        *("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ"),
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (*_PLACE, "bytes", "copyKind", "srcKind", "dstKind"),
    "CUPTI_ACTIVITY_KIND_MEMSET": (*_PLACE, "value", "bytes"),
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": (*_PLACE, "syncType"),
    "CUPTI_ACTIVITY_KIND_RUNTIME": _CALL,
    "OSRT_API": _CALL,
    "NVTX_EVENTS": ("start", "end", "eventType", "rangeId", "text", "textId", "globalTid", "endGlobalTid", "domainId"),
    "TARGET_INFO_GPU": ("id", "name", "chipName", "totalMemory", "smCount", "computeMajor", "computeMinor"),
    "ENUM_CUDA_MEMCPY_OPER": ("id", "name", "label"),
    "ENUM_CUDA_MEM_KIND": ("id", "name", "label"),
}
REFERS_TO_STRINGS = ("demangledName", "shortName", "nameId", "textId")


def strip(source: Path, target: Path) -> None:
    """Write what can be shared of an export to a new file."""
    read_timeline(source)  # a sentence if it is no export
    target.unlink(missing_ok=True)
    with closing(sqlite3.connect(target.resolve().as_uri(), uri=True)) as database:
        database.execute("ATTACH ? AS source", (f"{source.resolve().as_uri()}?mode=ro&immutable=1",))
        with database:
            _copy(database)
        database.execute("DETACH source")


def _copy(database: sqlite3.Connection) -> None:
    strings: set[int] = set()
    for table, wanted in KEPT_COLUMNS.items():
        there = [row[1] for row in database.execute(f"PRAGMA source.table_info({table})")]
        columns = [f'"{name}"' for name in wanted if name in there]
        if not columns:
            continue
        database.execute(f"CREATE TABLE {table} AS SELECT {', '.join(columns)} FROM source.{table}")
        for name in set(REFERS_TO_STRINGS) & set(there) & set(wanted):
            strings |= {number for (number,) in database.execute(f"SELECT DISTINCT {name} FROM {table}") if number}
    database.execute("CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL)")
    for number in sorted(strings):
        database.execute("INSERT INTO StringIds SELECT id, value FROM source.StringIds WHERE id = ?", (number,))


if __name__ == "__main__":
    strip(*map(Path, sys.argv[1:3]))
    print(
        f"{sys.argv[2]}: {Path(sys.argv[2]).stat().st_size / 2**10:.0f} KiB, without names and environment of the host"
    )
