"""Exports of Nsight Systems as small as one likes: tables with the columns and constraints of a real export."""

from __future__ import annotations

import sqlite3
from contextlib import closing

PROCESS = 281501384048640  # of the real capture: host, machine and process in the high bits
MAIN, AUTOGRAD = PROCESS + 1574, PROCESS + 1603  # two threads of it

SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL,
    shortName INTEGER NOT NULL
);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL,
    copyKind INTEGER NOT NULL
);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
    start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER,
    correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER
);
CREATE TABLE NVTX_EVENTS (
    start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER, color INTEGER,
    text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER NOT NULL
);
CREATE TABLE OSRT_API (
    start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER,
    nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, nestingLevel INTEGER, callchainId INTEGER NOT NULL
);
CREATE TABLE ENUM_CUDA_MEMCPY_OPER (id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT);
INSERT INTO ENUM_CUDA_MEMCPY_OPER VALUES (1, 'CUDA_MEMCPY_KIND_HTOD', 'Host-to-Device');
INSERT INTO ENUM_CUDA_MEMCPY_OPER VALUES (2, 'CUDA_MEMCPY_KIND_DTOH', 'Device-to-Host');
CREATE TABLE TARGET_INFO_SYSTEM_ENV (
    globalVid INTEGER, devStateName TEXT NOT NULL, name TEXT NOT NULL, nameEnum INTEGER NOT NULL, value TEXT NOT NULL
);
CREATE TABLE ProcessStreams (globalPid INTEGER NOT NULL, filenameId INTEGER NOT NULL, contentId INTEGER NOT NULL);
"""
PUSH_POP = 59


class Export:
    """Writes an export row by row. Times in nanoseconds."""

    def __init__(self, path):
        self.path = path
        self._strings = {}
        self._correlation = 0
        self._statements = []

    def string(self, text):
        if text not in self._strings:
            self._strings[text] = len(self._strings) + 1
            self._add("INSERT INTO StringIds VALUES (?, ?)", self._strings[text], text)
        return self._strings[text]

    def launch(self, launched, begins, ends, *, name="kernel", thread=MAIN, call_ends=None):
        """A kernel that is launched at one moment and runs from another to a third."""
        where = self._call("cudaLaunchKernel_v7000", launched, call_ends or launched + 1, thread)
        names = (self.string(f"void {name}<float>(int)"), self.string(name))
        self._add("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,0,1,7,?,?,?,?)", begins, ends, *where, *names)

    def copy(self, launched, begins, ends, *, size, kind=1, thread=MAIN):
        where = self._call("cudaMemcpyAsync_v3020", launched, launched + 1, thread)
        self._add("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?,?,0,1,7,?,?,?,?)", begins, ends, *where, size, kind)

    def range(self, name, start, end, *, thread=MAIN, by_id=False):
        text, text_id = (None, self.string(name)) if by_id else (name, None)
        row = (start, end, PUSH_POP, text, thread, text_id)
        self._add(
            "INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid, textId, domainId) VALUES (?,?,?,?,?,?,0)",
            *row,
        )

    def tell(self, **environment):
        """What nsys records besides: the environment, what the program printed, processes of the host."""
        for name, value in environment.items():
            self._add("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES (1, 'EnvVars', ?, 0, ?)", name, value)
        printed = self.string("".join(f"{name}={value}\n" for name, value in environment.items()))
        self._add("INSERT INTO ProcessStreams VALUES (?,?,?)", PROCESS, self.string("/tmp/stdout.log"), printed)

    def write(self):
        with closing(sqlite3.connect(self.path)) as database, database:
            database.executescript(SCHEMA)
            for statement, values in self._statements:
                database.execute(statement, values)
        return self.path

    def _call(self, name, start, end, thread):
        self._correlation += 1
        row = (start, end, thread, self._correlation, self.string(name))
        self._add(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME "
            "(start, end, eventClass, globalTid, correlationId, nameId, returnValue) VALUES (?,?,0,?,?,?,0)",
            *row,
        )
        return self._correlation, thread & ~0xFFFFFF

    def _add(self, statement, *values):
        self._statements.append((statement, values))


def a_step(path):
    """A ghost-like step of 1 ms: `clip` within `backward`, whose kernels another thread launches; a late optimizer."""
    export = Export(path)
    us = 1000
    export.range("step", 0, 1000 * us)
    export.range("forward", 10 * us, 200 * us)
    export.range("backward", 200 * us, 700 * us, by_id=True)
    export.range("clip", 400 * us, 500 * us)
    export.range("optimizer", 700 * us, 950 * us)
    export.copy(5 * us, 10 * us, 15 * us, size=4096)  # before any phase
    export.launch(20 * us, 50 * us, 150 * us, name="gemm")
    export.launch(210 * us, 220 * us, 420 * us, name="gemm", thread=AUTOGRAD)
    export.launch(410 * us, 420 * us, 450 * us, name="norms")  # clip, while backward is open
    export.launch(510 * us, 520 * us, 600 * us, name="gemm", thread=AUTOGRAD)
    export.launch(590 * us, 610 * us, 620 * us, name="add", thread=AUTOGRAD)  # queued before the GPU ran dry
    export.launch(900 * us, 960 * us, 990 * us, name="adam")  # launched in optimizer, runs after it
    return export
