"""A copy of this process from before the first test, for tests that need a process in which nothing has run.

A new process would import torch and transformers again. Ranks of sharded models need such a process: what DTensors
remember in a process that was rank 0 is wrong on other ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn


class CleanCopy:
    """A copy of this process, which waits for calls and ends with this process."""

    def __init__(self) -> None:
        self._answers, calls = multiprocessing.Pipe()
        self._process = os.fork()
        if self._process == 0:
            self._answers.close()
            _serve(calls)
        calls.close()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of a module in a copy of the copy, and return what it returns. Its error is raised here."""
        self._answers.send((function, arguments))
        returned, value = pickle.loads(self._answers.recv_bytes())
        assert returned, value
        return value

    def end(self) -> None:
        self._answers.send(None)  # other copies of this process may hold the pipe open
        os.waitpid(self._process, 0)


def _serve(calls: Connection) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    while True:
        try:
            call = calls.recv()
        except EOFError:
            call = None
        if call is None:
            os._exit(0)
        function, arguments = call
        child = os.fork()
        if child == 0:
            _answer(calls, function, arguments)
        if status := os.waitpid(child, 0)[1]:
            calls.send_bytes(pickle.dumps((False, f"{function.__name__} ended with status {status}")))


def _answer(calls: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> NoReturn:
    try:
        answer = True, function(*arguments)
    except BaseException:
        answer = False, traceback.format_exc()
    calls.send_bytes(pickle.dumps(answer))
    os._exit(0)
