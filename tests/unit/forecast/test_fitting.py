"""The largest batch that fits, and rows of a sweep that do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpscope.forecast import fitting
from dpscope.forecast.allocator import OutOfFakeMemory
from dpscope.forecast.cards import CARDS
from dpscope.forecast.fitting import largest_batch, rows_that_will_not_fit
from dpscope.forecast.step import StepForecast, forecast_step
from dpscope.runner.spec import RunSpec
from dpscope.workloads.configs import make_config

SMALL = RunSpec(workload=make_config("tiny", vocab_size=64), method="standard", batch_size=2, seq_len=32, device="cuda")
LARGE = replace(SMALL, batch_size=4096)


def test_one_line_names_the_rows_whose_predicted_peak_is_above_the_memory():
    card = CARDS["h200"]
    room = forecast_step(SMALL, card, detailed=False).peak_bytes * 2
    specs = [SMALL, LARGE, replace(LARGE, instrument="memory")]
    line = rows_that_will_not_fit(specs, room, card.capability)
    assert line.startswith("1 row is predicted not to fit into ")
    assert f"{LARGE.label} (" in line
    assert "\n" not in line
    assert rows_that_will_not_fit([SMALL], room, card.capability) == ""


@pytest.mark.parametrize(
    ("does_not_fit", "largest"),
    [
        (lambda batch: batch > 18, 18),
        (lambda batch: batch == 19 or batch > 20, 18),  # 20 fits by chance
        (lambda batch: batch > 400, range(392, 401)),
        (lambda batch: batch > 0, 0),
    ],
)
def test_the_largest_batch_is_no_exception_among_smaller_ones(monkeypatch, does_not_fit, largest):
    def step(spec, card, *, detailed, limit=None):
        if limit is not None and does_not_fit(spec.batch_size):
            raise OutOfFakeMemory
        return StepForecast(spec.batch_size, spec.batch_size)

    monkeypatch.setattr(fitting, "forecast_step", step)
    fit = largest_batch(SMALL, CARDS["h200"], 1000, lambda line: None, limit=1000)
    assert fit.batch in ([largest] if isinstance(largest, int) else largest)
    assert min(fit.points) == 1
