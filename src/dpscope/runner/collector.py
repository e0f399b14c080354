"""Python's garbage collector in a process that measures.

It rests while libraries are imported, and what they leave is frozen before there is a model: to walk through objects
that stay takes a quarter of such a process's time, some of it in the middle of measured steps.
"""

from __future__ import annotations

import gc


def rest() -> None:
    gc.disable()


def resume() -> None:
    """Collect garbage again after `rest`, but nothing of what exists by now."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
