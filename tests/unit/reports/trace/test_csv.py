"""The tables of traces as files."""

from __future__ import annotations

import pytest

from dpscope.reports.export import TRACE_CSV
from dpscope.reports.report import compare_results
from tests.unit.reports.trace_results import FLAT, STANDARD, make_trace
from tests.unit.reports.writing import write


def test_the_tables_are_there_in_full_as_csv(rows, tmp_path):
    import pandas as pd

    (path,) = write(TRACE_CSV, rows(standard=make_trace(STANDARD), flat=make_trace(FLAT)), tmp_path)
    table = pd.read_csv(path)
    assert list(table.method) == ["standard"] * 2 + ["flat"] * 3
    assert table.self_cpu_ms.sum() == pytest.approx(5 + 2 + 4 + 9 + 3)
    assert set(table.operator) == {"aten::mm", "aten::add", "aten::bmm"}


def test_no_traces_no_csv(make_result, tmp_path):
    assert write(TRACE_CSV, compare_results([make_result()]), tmp_path) == []
