"""The child process: one spec in, one result file out. Run as `python -m dpscope.runner.worker`.

It reads one JSON line from standard input: the spec, where to write the result, and an optional memory limit. The pipe
stays open as a lifeline: when the parent dies, it closes and the child ends. Progress goes to standard output as JSON
lines; anything the workload prints goes to standard error, which the parent keeps as the log.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TextIO

from dpscope.vocabulary.statuses import DISK_FULL, ORPHANED

CHILD = "DPSCOPE_CHILD"  # set in the environment of a process that measures


def main() -> None:
    rest_collector()
    events = claim_stdout()
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if request.get("memory_limit") is not None:
        limit_memory(request["memory_limit"])

    def progress(stage: str, done: int, total: int) -> None:
        print(json.dumps({"stage": stage, "done": done, "total": total}), file=events, flush=True)

    progress("loading", 0, 1)
    from dpscope.results.store import NO_ROOM, write_atomically
    from dpscope.runner.measure import measure_or_explain
    from dpscope.runner.spec import RunSpec

    try:
        result = measure_or_explain(RunSpec.from_dict(request["spec"]), progress, Path(request["files"]))
        write_atomically(Path(request["output"]), result.to_json())
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        sys.exit(DISK_FULL)


def refuse_in_child() -> None:
    """Raise `UserError` in a child, which loads the user's script: it must not start another comparison there."""
    if os.environ.get(CHILD):
        from dpscope.errors import UserError

        raise UserError(
            "this file starts a comparison while a child process loads it: put the call under "
            "`if __name__ == '__main__':`"
        )


def claim_stdout() -> TextIO:
    """Return the real standard output for events, and redirect all other prints to standard error."""
    os.environ[CHILD] = "1"
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return events


def _end_with_parent() -> None:
    sys.stdin.read()
    if os.getpgrp() == os.getpid():  # with all that this measurement has started, such as ncu and its program
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(ORPHANED)


def limit_memory(limit: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def rest_collector() -> None:
    """Switch Python's garbage collector off while libraries are imported.

    Traversing these permanent objects would take a quarter of the process's time, partly during measured steps.
    """
    gc.disable()


def resume_collector() -> None:
    """Collect garbage again after `rest_collector`, but leave out objects that exist now."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


if __name__ == "__main__":
    main()
