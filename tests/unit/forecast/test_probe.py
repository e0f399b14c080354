"""From short steps at small batches to larger ones."""

from __future__ import annotations

import pytest

from dpscope.forecast.probe import Probe, extrapolate


def probe(batch, **phases):
    return Probe(batch, max(phases.values()), 0.01 + 0.002 * batch, phases)


def test_a_phase_that_is_low_at_small_batches_is_the_peak_at_large_ones():
    def step(batch):
        return probe(batch, optimizer=1000, backward=100 + 20 * batch)

    found = extrapolate([step(4), step(8)], 200)
    assert found.peak_bytes == 100 + 20 * 200
    assert found.seconds == pytest.approx(0.01 + 0.002 * 200)


def test_what_only_early_steps_took_is_extrapolated_too():
    found = extrapolate([Probe(4, 900, 0.1, {"forward": 100}), Probe(8, 1300, 0.1, {"forward": 120})], 16)
    assert found.peak_bytes == 2100
    assert found.seconds == 0.1
