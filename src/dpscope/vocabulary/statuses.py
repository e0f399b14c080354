"""Statuses of a measurement, and exit codes of processes.

A new status is a line in `STATUS_TABLE`. By a signal n a process exits with
128 + n, as shells count (130 Ctrl-C, 143 SIGTERM).
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from dpscope.vocabulary.settings import DEVICES


@dataclass(frozen=True)
class Status:
    """Status of a row. `name` is used in result files, tables and logs, the other words in sentences and figures."""

    name: str
    outcome: str  # what became of a method: "ghost ran out of memory"
    outcomes: str  # of several methods
    instead: str  # stands where a figure would be
    kept_on: tuple[str, ...] = ()  # devices on which --resume keeps such a row, since it would end so again
    shows_traceback: bool = False  # of the user's own code, below the tables

    @property
    def is_failure(self) -> bool:
        return self.name != OK


OK, OOM, FAILED, TIMEOUT, SKIPPED = "ok", "oom", "failed", "timeout", "skipped"

# In the order in which reports tell of them. The memory of a GPU does not change from day to day; that of a host, and
# what else runs there, do. What failed or took too long may have been fixed since.
STATUS_TABLE = (
    Status(OK, "ended well", "ended well", "ok", kept_on=DEVICES),
    Status(OOM, "ran out of memory", "ran out of memory", "out of memory", kept_on=("cuda",)),
    Status(FAILED, "failed", "failed", "failed", shows_traceback=True),
    Status(TIMEOUT, "did not finish in time", "did not finish in time", "timeout"),
    Status(SKIPPED, "was not run", "were not run", "skipped", kept_on=DEVICES),
)
STATUSES = tuple(status.name for status in STATUS_TABLE)
_BY_NAME = {status.name: status for status in STATUS_TABLE}


def status_named(name: str) -> Status:
    """Return the status of a result; an unknown one is labelled by its name."""
    return _BY_NAME.get(name) or Status(name, f"ended as {name}", f"ended as {name}", name)


# Commands.
ALL_OK = 0
SOME_NOT_OK = 1  # a row, a check, a part of the machine
WRONG_USAGE = 2  # or a set-up that has to be fixed: a missing package, a full disk
BROKEN_PIPE = 128 + signal.SIGPIPE

# Child processes, whose parent turns them into a result or a sentence.
ORPHANED = 3  # the parent has died
REFUSED = 4  # the user's workload cannot be trained: the sentence is on standard output
DISK_FULL = 74  # EX_IOERR: one that a workload would hardly choose
