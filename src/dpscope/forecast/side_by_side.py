"""Predictions side by side, one on each core: each in a copy of this process, which imports nothing again."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from dpscope.errors import UserError
from dpscope.forecast.probe import Say
from dpscope.vocabulary.statuses import ORPHANED

SideTask = Callable[[Say], Any]
SAID, DONE, NOT_DONE = "said", "done", "failed"


def run_side_by_side(tasks: Sequence[SideTask], workers: int, say: Say) -> list[Any]:
    """Call every task, `workers` at a time, and return the results in order.

    With one worker they run in this process. Copies are for a process that has not trained and holds no GPU.
    """
    if workers < 2 or len(tasks) < 2:
        return [task(say) for task in tasks]
    context = multiprocessing.get_context("fork")
    waiting = list(enumerate(tasks))
    running: dict[Any, tuple[int, Any]] = {}
    results: dict[int, Any] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                place, task = waiting.pop()  # flash comes last, and takes longest
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_report, args=(task, sender, os.getpid()), daemon=True)
                process.start()
                sender.close()
                running[receiver] = place, process
            for ready in wait(list(running)):
                kind, value = _receive(ready)
                if kind == SAID:
                    say(value)
                elif kind == NOT_DONE:
                    raise value
                else:
                    results[running.pop(ready)[0]] = value
    finally:
        for _, process in running.values():
            process.kill()
    return [results[place] for place in range(len(tasks))]


def _receive(receiver: Any) -> tuple[str, Any]:
    try:
        kind, value = receiver.recv()
    except EOFError:
        return NOT_DONE, UserError("a process that made a part of the plan ended early: is the machine out of memory?")
    return kind, value


def _end_with(original: int) -> None:
    """End this copy when the original is gone. Its pipes do not tell: later copies hold their ends, too."""
    while os.getppid() == original:
        time.sleep(1)
    os._exit(ORPHANED)


def _report(task: SideTask, sender: Connection, original: int) -> None:
    threading.Thread(target=_end_with, args=(original,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the original's to answer, and it ends its copies
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # threads of the original are not in its copy
    gc.freeze()  # modules and all else that the original made: nothing to collect
    try:
        answer = DONE, task(lambda line: sender.send((SAID, line)))
    except Exception as error:
        answer = NOT_DONE, error if isinstance(error, UserError) else RuntimeError(f"{type(error).__name__}: {error}")
    with suppress(BrokenPipeError):  # the original was killed
        sender.send(answer)
