"""Endings, each as one sentence that a person can act on: of a command, and of a measurement.

A command that does not end well says so on standard error and exits with a code of `vocabulary/statuses.py`; whatever
ends in another way is a fault of dpscope and keeps its traceback. A measurement's exception or exit code becomes a
status and a reason.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from dpscope.errors import MeasurementFailed, RankEnded, UserError
from dpscope.packages import explain_import_error
from dpscope.vocabulary.statuses import ALL_OK, BROKEN_PIPE, FAILED, OOM, SKIPPED, SOME_NOT_OK, WRONG_USAGE


class Terminated(KeyboardInterrupt):
    """A signal has asked this process to end. It unwinds the stack as Ctrl-C does, so that children end too."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Ended(Exception):
    """An ending: its sentence (empty: nothing is said) and its exit code."""

    def __init__(self, sentence: str, code: int) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.code = code


@contextlib.contextmanager
def ends_in_a_sentence() -> Iterator[None]:
    """Print how the block ended and exit, unless the ending is a fault of dpscope."""
    try:
        with _signals_raise(signal.SIGTERM, signal.SIGHUP):
            try:
                yield
            except SystemExit:
                _flush()
                raise
            _flush()
    except BaseException as error:
        ending = ending_of(error)
        if ending is None:
            raise
        try:
            _flush()
        except OSError:  # the interpreter would try once more at its end, and complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if ending.sentence:
            with contextlib.suppress(OSError, ValueError):
                print(ending.sentence, file=sys.stderr, flush=True)
        raise SystemExit(ending.code) from None


def leave(ok: bool) -> NoReturn:
    """End a command that succeeded."""
    raise SystemExit(ALL_OK if ok else SOME_NOT_OK)


def ending_of(error: BaseException) -> Ended | None:
    """Return the sentence and the exit code; None for a fault of dpscope, or an intended exit."""
    if isinstance(error, Ended):
        return error
    if isinstance(error, KeyboardInterrupt):
        number = error.number if isinstance(error, Terminated) else signal.SIGINT
        name = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
        return Ended(f"Interrupted{name}.", 128 + number)
    if isinstance(error, BrokenPipeError):
        return Ended("", BROKEN_PIPE)
    reason = explain_import_error(error) if isinstance(error, ImportError) else None
    if isinstance(error, UserError):
        reason = str(error)
    elif isinstance(error, OSError) and error.errno:
        reason = f"{error.strerror}{'' if error.filename is None else f': {error.filename}'}"
        if error.filename is None and _stdout_is_broken():
            reason = f"cannot write to standard output: {error.strerror}"
    return None if reason is None else Ended(f"Error: {reason}", WRONG_USAGE)


def _stdout_is_broken() -> bool:
    """Return whether standard output is broken. Write an empty line to find out: a write error names no stream."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _flush() -> None:
    """Flush the streams now: at the interpreter's end a failure would print its own message and exit with 120."""
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


@contextlib.contextmanager
def _signals_raise(*numbers: signal.Signals) -> Iterator[None]:
    """Turn signals into `Terminated`, except those that have another handler (nohup)."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    ours = threading.current_thread() is threading.main_thread()
    taken = [number for number in numbers if ours and signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, terminate)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


SMALLER = "try a smaller --batch-size or --seq-len, or --dtype bf16"
NO_HOST_MEMORY = f"out of memory on the CPU: {SMALLER}, or a larger --memory-limit if one was given"

# What torch's CPU allocator and the C++ runtime say when memory runs out.
_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|std::bad_alloc|Cannot allocate memory|MemoryError"
    r"|Storage size calculation overflowed"
)
_OUT_OF_GPU_MEMORY = re.compile("CUDA out of memory|CUDA error: out of memory|STATUS_ALLOC_FAILED")


def lacks_memory(error: BaseException) -> bool:
    """Return whether memory ran out, on a GPU or on the CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, which is not loaded
        return True
    return any(said.search(str(error)) for said in (_OUT_OF_GPU_MEMORY, _OUT_OF_MEMORY))


def outcome_of_exception(error: BaseException) -> tuple[str, str]:
    if not any(kind.__name__ == "BackendCompilerFailed" for kind in type(error).__mro__):
        return _outcome_of(error)
    status, reason = _outcome_of(getattr(error, "inner_exception", error))
    more = "`dpscope doctor` tells what torch.compile needs, and --compile none does without it"
    return status, f"torch.compile failed ({reason}): {more}" if status == FAILED else reason


def _outcome_of(error: BaseException) -> tuple[str, str]:
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return OOM, f"out of GPU memory ({_first_sentence(str(error))}): {SMALLER}"
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error)):
        return OOM, NO_HOST_MEMORY
    if isinstance(error, MeasurementFailed):
        return error.status if isinstance(error, RankEnded) else FAILED, str(error)
    if isinstance(error, UserError):
        return SKIPPED, str(error)
    if isinstance(error, ImportError) and (sentence := explain_import_error(error)) is not None:
        return SKIPPED, sentence
    return FAILED, f"{type(error).__name__}: {_first_sentence(str(error))}"


def outcome_of_exit(returncode: int, last_words: str, *, oom_killed: bool) -> tuple[str, str]:
    """Describe a child that ended without writing its result."""
    if oom_killed and returncode == -signal.SIGKILL:
        return OOM, f"killed by the kernel because the machine ran out of memory: {SMALLER}"
    if _OUT_OF_MEMORY.search(last_words):
        return OOM, NO_HOST_MEMORY
    if returncode < 0:
        return FAILED, f"the process was ended by {_signal_name(-returncode)}; its log says what it printed last"
    return FAILED, f"the process exited with code {returncode} without a result; its log says what it printed last"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # the real-time signals between the first and the last have no name
        return f"signal {number}"


def _first_sentence(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
    return line if len(line) <= 200 else line[:199] + "…"
