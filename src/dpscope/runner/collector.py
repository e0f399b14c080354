"""Python's garbage collector in a process that measures.

It is off while libraries are imported, and their objects are frozen before there is a model. Traversing these permanent
objects would take a quarter of the process's time, partly during measured steps.
"""

from __future__ import annotations

import gc


def rest() -> None:
    gc.disable()


def resume() -> None:
    """Collect garbage again after `rest`, but leave out objects that exist now."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
