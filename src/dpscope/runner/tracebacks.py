"""Tracebacks of errors in the user's code: from their first frame on, without frames of dpscope."""

from __future__ import annotations

import os
import sysconfig
import traceback

from dpscope.paths import is_own_source
from dpscope.workloads.configs import CustomConfig, WorkloadConfig

_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def details_of(error: BaseException, workload: WorkloadConfig) -> str:
    """Format an error, with the user's own traceback where it passed through their code."""
    own = own_traceback(error, workload)
    return "".join(traceback.format_exception(error)) if own is None else own


def their_mistake(error: BaseException, workload: WorkloadConfig) -> str | None:
    """Return what went wrong in the user's workload; None if the fault was elsewhere."""
    if isinstance(error, SystemExit):  # its exit code would be taken for ours
        return f"{workload.name} ended Python (SystemExit {error.code}) where it should have returned"
    own = own_traceback(error, workload)
    return None if own is None else f"{workload.name} failed:\n{own.rstrip()}"


def own_traceback(error: BaseException, workload: WorkloadConfig) -> str | None:
    """Format an error from the first of the user's frames on; None if no frame is theirs."""
    if not isinstance(workload, CustomConfig):
        return None
    if isinstance(error, SyntaxError) and error.filename == workload.file:  # their code, though none of it ran
        return "".join(traceback.format_exception_only(error))
    frames = traceback.extract_tb(error.__traceback__)
    first = next((at for at, frame in enumerate(frames) if _is_theirs(frame.filename, workload)), None)
    if first is None:
        return None
    theirs = [frame for frame in frames[first:] if not _is_ours(frame.filename)]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(theirs)]
    return "".join([*lines, *traceback.format_exception_only(error)])


def _is_theirs(file: str, workload: CustomConfig) -> bool:
    if file == workload.file:
        return True
    return not (_is_ours(file) or file.startswith((*_INSTALLED, "<")))


def _is_ours(file: str) -> bool:
    return is_own_source(file) or file.startswith("<frozen importlib")
