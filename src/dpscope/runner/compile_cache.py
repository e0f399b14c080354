"""Compiler cache of a sweep: a folder of its own for what torch.compile makes, removed after it.

The time instrument looks first, with an empty cache, so that seconds of compilation are those of a first run. Other
instruments, and every pass of ncu, find what that row has compiled.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from dpscope.runner.spec import RunSpec
from dpscope.vocabulary.settings import EAGER

# Environment variables: where Inductor keeps graphs, and Triton kernels below it; its C++ headers are in the second.
CACHE_FOLDER, TEMPORARY = "TORCHINDUCTOR_CACHE_DIR", "TMPDIR"
Environment = dict[str, str]


@contextmanager
def compile_caches(specs: Sequence[RunSpec]) -> Iterator[Callable[[RunSpec], Environment]]:
    """Give a function that returns the variables for the environment of a spec's child."""
    if all(spec.compile == EAGER for spec in specs):
        yield lambda spec: {}
        return
    with tempfile.TemporaryDirectory(prefix="dpscope-compiled-", ignore_cleanup_errors=True) as folder:
        yield partial(_environment, Path(folder))


def _environment(folder: Path, spec: RunSpec) -> Environment:
    if spec.compile == EAGER:
        return {}
    of_the_row = folder / replace(spec, instrument="time", options={}).digest  # the same for all its instruments
    of_the_row.mkdir(exist_ok=True)
    return {CACHE_FOLDER: str(of_the_row / "inductor"), TEMPORARY: str(of_the_row)}
