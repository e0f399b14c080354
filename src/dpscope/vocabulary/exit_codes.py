"""With which code processes of dpscope exit. By a signal n: 128 + n, as shells count (130 Ctrl-C, 143 SIGTERM)."""

from __future__ import annotations

import signal

# Commands.
ALL_OK = 0
SOME_NOT_OK = 1  # a row, a check, a part of the machine
WRONG_USAGE = 2  # or a set-up that has to be fixed: a missing package, a full disk
BROKEN_PIPE = 128 + signal.SIGPIPE

# Child processes, whose parent turns them into a result or a sentence.
ORPHANED = 3  # the parent has died
REFUSED = 4  # the user's workload cannot be trained: the sentence is on standard output
DISK_FULL = 74  # EX_IOERR: one that a workload would hardly choose
