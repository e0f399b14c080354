"""Where the rows of a sweep keep what torch.compile makes: a folder of the sweep's own, which is gone after it.

The time instrument looks first, with an empty cache, so that seconds of compilation are those of a first run. Other
instruments, and every pass of ncu, find what that row has compiled.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from dpscope.runner.spec import RunSpec
from dpscope.vocabulary.settings import EAGER

CACHE_FOLDER = (
    "TORCHINDUCTOR_CACHE_DIR"  # environment variable of torch; Triton's kernels of compiled graphs are below it
)
Environment = dict[str, str]


@contextmanager
def compile_caches(specs: Sequence[RunSpec]) -> Iterator[Callable[[RunSpec], Environment]]:
    """Gives what the environment of a spec's child has to hold."""
    if all(spec.compile == EAGER for spec in specs):
        yield lambda spec: {}
        return
    with tempfile.TemporaryDirectory(prefix="dpscope-compiled-", ignore_cleanup_errors=True) as folder:
        yield lambda spec: {} if spec.compile == EAGER else {CACHE_FOLDER: f"{folder}/{_row(spec)}"}


def _row(spec: RunSpec) -> str:
    """The same for all that measures one row; a time row that is measured again with other steps finds it empty."""
    return replace(spec, instrument="time", options={}).digest
