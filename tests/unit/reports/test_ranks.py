"""Rows over several processes: figures by rank, in tables, sentences and exports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpscope.plain_text import render_plain
from dpscope.reports.export import to_records
from dpscope.reports.page.table import make_table
from dpscope.reports.report import Report, compare_results
from dpscope.reports.tables import BATCH_OF_A_RANK, BATCH_OF_A_STEP
from dpscope.reports.text import summary
from tests.unit.rank_payloads import MEASURED, SIMULATED


@pytest.fixture
def spread(make_result):
    """A row on two GPUs and, with `alone`, one in one process with that batch."""

    def make(ranks=MEASURED, alone=None, **spec):
        spec = {"gpus": 2, "parallel": "fsdp", **spec}
        results = [replace(make_result(batch_size=4, **spec), ranks=ranks)]
        if alone is not None:
            results.append(make_result(batch_size=alone))
        return results

    return make


@pytest.mark.parametrize(
    ("alone", "scaling", "equal"), [(4, 2.0, BATCH_OF_A_RANK), (8, 1.0, BATCH_OF_A_STEP), (16, None, "")]
)
def test_scaling_is_against_one_process_with_the_batch_of_a_rank_or_of_a_step(spread, alone, scaling, equal):
    row = compare_results(spread(alone=alone))[0]  # as long a step in both
    assert (row.scaling, row.scaling_batch) == (scaling, equal)


def test_text_csv_and_page_hold_the_same_figures(spread):
    results = spread(alone=4)
    text = " ".join(render_plain(summary(Report.of(results))).split())
    assert "rank 1 3.0–5.0 MiB (0) 8.0 MiB 2.0 MiB 25% 2.00× of 2" in text
    assert "with as large a batch as one rank has" in text
    record, other = to_records(compare_results(results))
    assert (record["rank_peak_least_bytes"], record["rank_peak_most_bytes"]) == (3 << 20, 5 << 20)
    assert (record["all_gather_bytes"], record["collective_share"], record["scaling"]) == (8 << 20, 0.25, 2.0)
    assert record["scaling_equal"] == BATCH_OF_A_RANK
    assert other.keys() == record.keys()
    assert other["scaling"] is None
    table = make_table(Report.of(results))
    headings = [name for name, _ in table.columns]
    cells = {name: cell.text for name, cell in zip(headings, table.lines[0][2], strict=True)}
    shown = {name: cells[name] for name in ("scaling", "collectives", "in collectives")}
    assert shown == {"scaling": "2.00× of 2", "collectives": "10.0 MiB", "in collectives": "25%"}


def test_what_is_computed_of_a_simulated_world_says_so_everywhere(spread):
    results = spread(SIMULATED, gpus=1, simulate_world=8)
    text = " ".join(render_plain(summary(Report.of(results))).split())
    assert "One rank of a simulated world" in text
    assert "≈10.0 ms at 100 Gbit/s" in text
    (record,) = to_records(compare_results(results))
    assert (record["ranks_simulated"], record["computed_send_ms"], record["computed_link_gbps"]) == (True, 10.0, 100.0)


def test_rows_of_one_process_have_no_such_columns(make_result):
    results = [make_result()]
    assert "ranks" not in to_records(compare_results(results))[0]
    assert not {"scaling", "collectives"} & {name for name, _ in make_table(Report.of(results)).columns}
