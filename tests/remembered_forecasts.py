"""Predicted steps are remembered: plans that differ in what is said about a step predict the same one again."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any
from unittest import mock

import pytest

from dpscope.forecast import fitting, plan
from dpscope.forecast.allocator import OutOfFakeMemory
from dpscope.forecast.cards import Card
from dpscope.forecast.step import StepForecast, forecast_step
from dpscope.runner.spec import RunSpec
from dpscope.workloads.configs.custom import CustomConfig


@cache
def _known(spec: RunSpec, card: Card, options: tuple[tuple[str, Any], ...]) -> StepForecast | OutOfFakeMemory:
    try:
        return forecast_step(spec, card, **dict(options))
    except OutOfFakeMemory as full:
        return full.with_traceback(None)


def forecast_once(spec: RunSpec, card: Card, **options: Any) -> StepForecast:
    """Predict a step, or return what was predicted before for an equal spec and card."""
    if isinstance(spec.workload, CustomConfig):  # equal names may stand for other functions
        return forecast_step(spec, card, **options)
    found = _known(spec, card, tuple(sorted(options.items())))
    if isinstance(found, OutOfFakeMemory):
        raise found
    return deepcopy(found)


@pytest.fixture
def remembered_forecasts() -> Iterator[None]:
    """For plans whose text or figures are tested, not how a step is predicted."""
    with (
        mock.patch.object(plan, "forecast_step", forecast_once),
        mock.patch.object(fitting, "forecast_step", forecast_once),
    ):
        yield
