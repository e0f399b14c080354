"""Worlds of one, two and four processes, each started once, in which all cases run; and one process alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.flash.ranks import cases
from tests.unit.flash.ranks.world import in_world, trained


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """Size of the world -> what each rank found. Four ranks write checkpoints, which two ranks read."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {size: in_world(size, cases.all_cases, folder) for size in (4, 2, 1)}


@pytest.fixture(scope="session")
def alone() -> dict[str, dict[str, Any]]:
    """Parameters after the same steps by one process, by the optimizer's name."""
    return {name: trained("alone", name) for name in ("sgd", "adamw")}
