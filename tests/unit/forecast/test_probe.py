"""From short steps to larger batches: predictions corrected by what they missed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpscope.forecast.probe import GAP_SECONDS, Correction, Probe
from dpscope.forecast.step import StepForecast
from dpscope.vocabulary.components import UNATTRIBUTED


def forecast(batch, gpu=0.001, begin=0.002):
    peak = 1000 + 50 * batch
    seconds = begin + gpu * batch
    return StepForecast(peak, 0, step_bytes=peak, components={UNATTRIBUTED: 0}, gpu_seconds=seconds, kernels=100)


def truth(batch, *, host=0.0, rate=1.3, workspace=300, per_sample=2):
    """A GPU that is slower than predicted by `rate`, waits for a host, and takes memory that no prediction knows."""
    busy = rate * forecast(batch).gpu_seconds
    return Probe(batch, forecast(batch).peak_bytes + workspace + per_sample * batch, max(busy, host), busy)


@pytest.mark.parametrize("host", [0.0, 0.03, 0.08, 0.5], ids=["gpu", "gpu-bound above 8", "between", "host-bound"])
def test_a_larger_batch_is_as_on_a_machine_that_differs_from_the_prediction(host):
    correct = Correction([truth(n, host=host) for n in (8, 16)], [forecast(n) for n in (8, 16)])
    found, expected = correct(forecast(64), 64), truth(64, host=host)
    assert found.peak_bytes == expected.peak_bytes
    assert sum(found.components.values()) == 300 + 2 * 64
    assert found.seconds == pytest.approx(expected.seconds, rel=0.1)  # GPU and host at once take a little longer


def test_steps_that_wait_for_the_host_do_not_grow_with_the_batch():
    correct = Correction([truth(n, host=0.5) for n in (2, 4)], [forecast(n) for n in (2, 4)])
    assert correct(forecast(64), 64).seconds == pytest.approx(0.5, rel=1e-3)


def test_gaps_between_kernels_do_not_grow_with_the_batch():
    probes = [Probe(n, 0, 0.001 + forecast(n).gpu_seconds, forecast(n).gpu_seconds) for n in (8, 16)]
    correct = Correction(probes, [forecast(n) for n in (8, 16)])
    assert correct(forecast(64), 64).seconds == pytest.approx(0.001 + forecast(64).gpu_seconds)
    assert correct(replace(forecast(64), kernels=200), 64).seconds == pytest.approx(0.002 + forecast(64).gpu_seconds)


def test_gaps_are_expected_where_every_probed_step_waits_for_the_host():
    correct = Correction([truth(n, host=0.08, rate=1.0) for n in (8, 16)], [forecast(n) for n in (8, 16)])
    assert correct(forecast(640), 640).gpu_seconds == pytest.approx(forecast(640).gpu_seconds + 100 * GAP_SECONDS)


def test_one_probe_shifts_the_peak():
    correct = Correction([truth(4)], [forecast(4)])
    assert correct(forecast(8), 8).peak_bytes == forecast(8).peak_bytes + 308


@pytest.mark.parametrize(("low", "high"), [(900, 0), (0, 900), (900, 300), (-900, 900)])
def test_what_happens_at_one_size_alone_is_no_line(low, high):
    probes = [Probe(n, forecast(n).peak_bytes + missed, 1.0, 1.0) for n, missed in ((4, low), (8, high))]
    correct = Correction(probes, [forecast(n) for n in (4, 8)])
    missed = [correct.missed_bytes(forecast(n), n) for n in (64, 6, 1)]
    assert missed == [high, (low + high) / 2, low]


def test_what_verification_takes_more_says_nothing_about_a_step():
    verified = replace(forecast(4), peak_bytes=5000)
    correct = Correction([Probe(4, 5900, 1.0, 1.0), truth(8)], [verified, forecast(8)])
    assert correct.missed_bytes(forecast(64), 64) == 316
    assert correct.missed_bytes(verified, 4) == 900
    assert Correction([Probe(4, 5900, 1.0, 1.0)], [verified]).missed_bytes(forecast(64), 64) == 0
