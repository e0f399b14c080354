"""A pytest plugin that keeps the garbage collector away from what is imported.

Modules stay. To walk through their million objects again and again takes half of the processor time in which tests are
collected, and a tenth of that in which they run.
"""

from __future__ import annotations

import gc

gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)  # objects before it looks for cycles; 700 would be thousands of times a run
    gc.enable()
