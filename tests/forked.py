"""A copy of this process, for tests of what changes a process or ends it: a new one would import torch again."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import IO


def run_forked(function: Callable[[], object], *, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    """Call `function` in a copy of this process: its exit code, standard output and standard error."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = multiprocessing.get_context("fork").Process(target=call_and_exit, args=(function, output, errors))
        process.start()
        process.join(seconds)
        process.kill()
        process.join()
        texts = [(file.seek(0), file.read())[1] for file in (output, errors)]
    return subprocess.CompletedProcess([function.__name__], process.exitcode or 0, *texts)


def call_and_exit(function: Callable[[], object], output: IO[str], errors: IO[str]) -> None:
    """Call `function` in this process, which is a copy, with these streams, and end the process as Python would."""
    os.dup2(output.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    code = 1
    try:
        function()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # nothing of the test run ends here
