"""Rows as data: what a data frame, a CSV file and a LaTeX table hold."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace

import pandas
import pytest

from dpscope.comparison import Comparison
from dpscope.reports.export import CSV, escape, to_latex, to_pandas, to_records
from dpscope.reports.report import compare_results
from dpscope.vocabulary.components import COMPONENTS
from tests.unit.reports.writing import write

MIB = 2**20


@pytest.fixture(scope="module")
def rows(measured_both_ways):
    return compare_results(measured_both_ways())


def test_a_record_for_each_method_with_units_in_the_names(rows):
    frame = to_pandas(rows).set_index("method")
    assert list(frame.index) == ["standard", "flat", "ghost", "flash"]
    flat = frame.loc["flat"]
    assert (flat.model, flat.batch_size, flat.seq_len, flat["dtype"], flat.status) == ("tiny", 2, 8, "fp32", "ok")
    assert (flat.time_median_ms, flat.time_p10_ms) == (256.0, pytest.approx(0.97 * 256))
    assert flat.time_ratio == pytest.approx(256 / 127)
    assert flat.peak_memory_bytes == 1309 * MIB
    assert flat.per_sample_gradients_bytes == 800 * MIB
    assert (flat.peak_phase, flat.peak_module, flat.hardware) == ("backward", "blocks.3.up", "a processor")


def test_the_components_of_a_record_add_up_to_its_peak(rows):
    frame = to_pandas(rows)
    columns = [f"{component.key}_bytes" for component in COMPONENTS]
    assert (frame[columns].sum(axis="columns") == frame["peak_memory_bytes"]).all()
    assert all(pandas.api.types.is_integer_dtype(frame[column]) for column in columns)


def test_a_row_without_figures_keeps_its_status_and_reason_and_nothing_is_zero(make_result, make_memory_result):
    rows = compare_results([make_memory_result(), make_result(method="flat", status="oom", reason="too large")])
    flat = to_pandas(rows).set_index("method").loc["flat"]
    assert (flat.status, flat.reason) == ("oom", "too large")
    assert pandas.isna(flat.time_median_ms) and pandas.isna(flat.activations_bytes)


def test_settings_and_sizes_of_the_model_get_a_column_where_they_vary(make_result, make_spec):
    deeper = make_result(method="flat")
    workload = {**deeper.spec["workload"], "num_layers": 7}
    deeper = replace(deeper, spec={**deeper.spec, "workload": workload, "optimizer": "sgd"})
    records = to_records(compare_results([make_result(), deeper]))
    assert [(record["num_layers"], record["optimizer"]) for record in records] == [(1, "adamw"), (7, "sgd")]
    assert "noise_multiplier" not in records[0]


def test_without_a_breakdown_there_are_no_columns_for_it(make_result):
    assert not any(
        name.endswith("_bytes") and name != "peak_memory_bytes"
        for name in to_records(compare_results([make_result()]))[0]
    )


def test_a_users_own_component_has_a_column(make_memory_result):
    peak = {"model_parameters": 10, "my_cache": 3}
    (record,) = to_records(compare_results([make_memory_result(peak=peak)]))
    assert record["my_cache_bytes"] == 3 * MIB


def test_a_csv_file_comes_back_the_same(rows, tmp_path):
    results, timeline = write(CSV, rows, tmp_path)
    frame = pandas.read_csv(results)
    assert list(frame["peak_memory_bytes"]) == [709 * MIB, 1309 * MIB, 937 * MIB + 1049, 659 * MIB]
    points = pandas.read_csv(timeline)
    ghost = points[points["method"] == "ghost"]
    assert list(ghost["event"]) == list(range(60))
    assert ghost["phase"].iloc[0] == "forward" and ghost["phase"].iloc[30] == "backward"
    held = [column for column in points if column.endswith("_bytes")]
    assert ghost[held].sum(axis="columns").max() == 929 * MIB + 1049


def test_without_a_timeline_there_is_no_file_for_it(make_result, tmp_path):
    assert [path.name for path in write(CSV, compare_results([make_result()]), tmp_path)] == ["results.csv"]


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("my_method & 100%", r"my\_method \& 100\%"),
        ("a\\b{c}$d#e~f^g", r"a\textbackslash{}b\{c\}\$d\#e\textasciitilde{}f\textasciicircum{}g"),
        ("2.00× — p10–p90 <x>", r"2.00$\times$ --- p10--p90 \textless{}x\textgreater{}"),
        ("two\nlines", "two lines"),
    ],
)
def test_what_latex_would_stumble_over_is_escaped(text, escaped):
    assert escape(text) == escaped


def test_the_latex_table_has_figures_rules_and_a_caption_that_names_the_hardware(rows):
    text = to_latex(rows)
    assert r"flat & 2 & 8 & 256.0 & 248.3--268.8 & 62.5 & 2.02 & 1.28 & 1.85 \\" in text
    assert all(rule in text for rule in (r"\toprule", r"\midrule", r"\bottomrule"))
    assert "a processor, torch 2.13.0, opacus 1.6.0" in text
    assert text.count(r"\begin{table}") == 2
    assert r"per-sample gradients$^\ast$ & --- & 0.78 & --- & --- \\" in text
    assert r"total & 0.69 & 1.28 & 0.92 & 0.64 \\" in text


def test_a_row_that_is_not_ok_has_dashes_and_its_status(make_result):
    text = to_latex(compare_results([make_result(), make_result(method="flat", status="oom")]))
    assert r"flat & 2 & 8 & --- & --- & --- & --- & --- & --- & oom \\" in text


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX on this machine")
def test_the_latex_file_compiles(rows, tmp_path):
    odd = [replace(row, measured={name: _odd(result) for name, result in row.measured.items()}) for row in rows]
    (tmp_path / "results.tex").write_text(to_latex([*rows, *odd]))
    document = r"\documentclass{article}\usepackage{booktabs}\begin{document}\input{results.tex}\end{document}"
    (tmp_path / "paper.tex").write_text(document)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def _odd(result):
    environment = {**result.environment, "cpu": "50% of a #1 CPU_x {^~\\} & $more"}
    return replace(result, experiment="my_method & 100%", environment=environment)


def test_a_comparison_gives_all_of_it(measured_both_ways, tmp_path):
    comparison = Comparison(measured_both_ways(), tmp_path, [], [])
    assert len(comparison.to_pandas()) == 4
    assert comparison.to_latex().startswith("% Made by dpscope")
    comparison.to_csv(tmp_path / "mine.csv")
    assert list(pandas.read_csv(tmp_path / "mine.csv")["method"]) == ["standard", "flat", "ghost", "flash"]
    assert len(comparison.results) == 8


def test_rows_that_differ_only_in_their_steps_are_told_apart_in_every_table(make_result, make_memory_result):
    """The memory instrument's single step is the first thing known of both rows."""
    time = make_result(steps=1)
    memory = replace(time, spec={**time.spec, "instrument": "memory"})
    rows = compare_results([memory, make_result(steps=2), make_result(steps=3)])
    assert [record["steps"] for record in to_records(rows)] == [2, 3]
    lines = [line.split(" & ") for line in to_latex(rows).splitlines() if " & " in line]
    place = lines[0].index("steps")
    assert [line[place] for line in lines[1:]] == ["2", "3"]
