"""Methods that exist for the length of a test."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dpscope.exactness.check import check
from dpscope.exactness.report import Check, MethodCheck
from dpscope.vocabulary import methods as registry
from tests.unit.exactness import planted_faults


@pytest.fixture
def planted(monkeypatch) -> Callable[[str], None]:
    """Registers a class of planted_faults as a method under the name "planted"."""

    def plant(fault: str) -> None:
        method = registry.Method("planted", f"{planted_faults.__name__}:{fault}", "a fault")
        monkeypatch.setattr(registry, "methods", lambda: {"planted": method})

    return plant


@pytest.fixture
def check_planted(planted) -> Callable[..., tuple[Check, MethodCheck]]:
    def run(fault: str, workload=planted_faults.LITTLE, **options) -> tuple[Check, MethodCheck]:
        planted(fault)
        found = check(workload, ["planted"], neighbours=False, **options)
        return found, found.methods[0]

    return run
