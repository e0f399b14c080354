"""Rows of traced methods."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpscope.reports.report import compare_results
from dpscope.results.schema import parse_result


@pytest.fixture
def rows(make_result):
    """Timed and traced rows of methods -> their traces."""

    def make(median=10.0, **traces):
        results = []
        for method, trace in traces.items():
            if median:
                results.append(make_result(method=method, median=median))
            traced = make_result(method=method, instrument="trace")
            results.append(parse_result(replace(traced, timing={}, memory={}, avg_time_ms=None, trace=trace).to_json()))
        return compare_results(results)

    return make
