"""Rows of a sweep that will not fit are named in one line."""

from __future__ import annotations

from dataclasses import replace

from dpscope.forecast.cards import CARDS
from dpscope.forecast.fitting import rows_that_will_not_fit
from dpscope.forecast.step import forecast_step
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
