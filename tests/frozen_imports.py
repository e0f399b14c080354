"""A pytest plugin that keeps the garbage collector away from what is imported.

Modules stay. To walk through their million objects again and again takes half of the processor time in which tests are
collected, and a tenth of that in which they run. What a file of tests has imported by itself is frozen after it:
forecasts and audits ask the collector to look through everything, a quarter of a second each time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)  # objects before it looks for cycles; 700 would be thousands of times a run
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def freeze_imports() -> Iterator[None]:
    yield
    gc.collect()
    gc.freeze()
