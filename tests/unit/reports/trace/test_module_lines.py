"""Modules that cost alike share a line."""

from __future__ import annotations

from dpscope.reports.trace.layers_chart import fold


def test_layers_that_hold_more_than_earlier_ones_are_a_run_of_their_own():
    lines = fold([{f"blocks.{n}.up": {"activations": 1.0 if n < 10 else 2.0} for n in range(20)}])
    assert [line.name for line in lines] == ["blocks.10–19.up", "blocks.0–9.up"]


def test_modules_that_differ_stand_alone():
    lines = fold([{"0": {"activations": 1.0}, "2": {"activations": 100.0}}])
    assert [line.name for line in lines] == ["2", "0"]


def test_numbers_within_a_name_are_not_folded():
    lines = fold([{"conv1": {"activations": 1.0}, "conv2": {"activations": 1.0}}])
    assert [line.name for line in lines] == ["conv1", "conv2"]
