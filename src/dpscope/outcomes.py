"""From how a child ended to a status and a sentence that a person can act on."""

from __future__ import annotations

import re
import signal

from dpscope.errors import MeasurementFailed, RankEnded, UserError
from dpscope.packages import explain_import_error
from dpscope.vocabulary.statuses import FAILED, OOM, SKIPPED

SMALLER = "try a smaller --batch-size or --seq-len, or --dtype bf16"
NO_HOST_MEMORY = f"out of memory on the CPU: {SMALLER}, or a larger --memory-limit if one was given"

# What torch's CPU allocator and the C++ runtime say when memory runs out.
_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|std::bad_alloc|Cannot allocate memory|MemoryError"
    r"|Storage size calculation overflowed"
)


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
