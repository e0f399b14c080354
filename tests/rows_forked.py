"""Rows in copies of this process, which has torch: the launcher follows them as any child, and they begin at once.

That rows begin in new processes is tested in `commands/test_compare.py` and `runner/`.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

from dpscope.runner import worker
from tests.forked import call_and_exit


@contextmanager
def rows_forked() -> Iterator[None]:
    stand_in = SimpleNamespace(Popen=Child, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    with mock.patch("dpscope.runner.sweep.subprocess", stand_in):
        yield


class Child:
    """What the launcher asks of `subprocess.Popen`."""

    def __init__(self, command: tuple[str, ...], *, stderr: IO[str], env: Mapping[str, str], **_: Any) -> None:
        requests, self.stdin = _pipe()
        self.stdout, events = _pipe()

        def measure() -> None:
            self.stdin.close()  # a lifeline that this process held would never end
            os.setsid()
            os.dup2(requests.fileno(), 0)
            sys.stdin = os.fdopen(0, closefd=False)
            os.environ.clear()
            os.environ.update(env)
            worker.main()

        self._process = multiprocessing.get_context("fork").Process(
            target=call_and_exit, args=(measure, events, stderr)
        )
        self._process.start()
        requests.close()
        events.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired("a row", timeout or 0)


def _pipe() -> tuple[IO[str], IO[str]]:
    reading, writing = os.pipe()
    return os.fdopen(reading, encoding="utf-8"), os.fdopen(writing, "w", encoding="utf-8")
