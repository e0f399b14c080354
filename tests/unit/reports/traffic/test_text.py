"""The section on traffic: what it says, what it refuses to say, and that an estimate is never mistaken."""

from __future__ import annotations

import pytest
from rich.console import Group

from dpscope.plain_text import render_plain
from dpscope.reports.report import Report, compare_results
from dpscope.reports.text import summary
from dpscope.reports.traffic.data import by_size
from dpscope.reports.traffic.text import traffic_section, traffic_verdict
from tests.unit.reports.traffic_results import REASON, results_for


def section(results, width=110):
    return render_plain(Group(*traffic_section(compare_results(results), width)), width)


def verdict(*methods, **options):
    return " ".join(traffic_verdict(by_size(compare_results(results_for(*methods, **options)))))


def test_a_row_shows_bytes_ratio_intensity_and_bandwidth():
    line = next(line for line in section(results_for()).splitlines() if line.startswith("flat "))
    assert " ".join(line.split()) == "flat 4 256 2.19 GB 1.96 GB 1.93× 4.05 MB 26 98.7 GB/s 2%"


def test_counted_bytes_with_estimated_operations_are_marked_where_it_matters():
    results = results_for("standard")
    results[1].ncu["flops"] = {"tensor": 0}
    results[1].ncu["estimate"]["flops"] = {"total": 10**11}
    text = section(results)
    line = next(line for line in text.splitlines() if line.startswith("standard "))
    assert line.count("≈") == 1 and " ≈47 " in line
    assert "operations are those of torch's formulas" in text
    assert "ESTIMATE" not in text


def test_caches_and_the_estimates_error_have_their_own_table():
    text = section(results_for())
    line = [line for line in text.splitlines() if line.startswith("standard ")][1]
    assert " ".join(line.split()) == "standard 4 256 3.45 GB 1.78 GB 4.57 GB 1.18 GB −20% +10%"
    assert "how far the bytes computed from tensor sizes are" in text


def test_the_verdict_in_plain_words():
    assert verdict("standard", "ghost", per_kernel=True) == (
        "Batch 4, sequence 256: ghost moves 1.25× the DRAM bytes of standard; 53% of the extra is copies, casts and "
        "fills, 27% matrix products, 20% elementwise."
    )


def test_without_kernels_the_verdict_names_no_family():
    assert verdict("standard", "ghost") == "Batch 4, sequence 256: ghost moves 1.25× the DRAM bytes of standard."


def test_the_verdict_says_how_much_of_the_extra_time_the_bytes_account_for():
    """(1.93 - 1) × 2.15 GB at 4 TB/s is half a millisecond; flat is 23 ms slower."""
    assert "takes 0.5 ms of the 23.0 ms it is slower" in verdict("standard", "flat")


def test_no_time_is_explained_on_a_busy_machine():
    results = results_for("standard", "flat")
    for result in results:
        if result.timing:
            result.timing["p90_ms"] *= 3
    assert "slower" not in section(results)


def test_the_verdict_on_a_sample_of_kernels_says_so():
    results = results_for("standard", "ghost", per_kernel=True)
    for result in results:
        if result.ncu:
            result.ncu["kernels"]["calls_total"] = 5000
    assert "of the 298 of 5000 kernel launches that were looked at" in section(results).replace("\n", " ")


def test_shares_from_the_estimate_beside_a_measurement_say_so():
    results = results_for("standard", "ghost")
    for result, whole in zip(results, results_for("standard", "ghost", per_kernel=True), strict=True):
        if result.ncu:
            result.ncu["estimate"]["kernels"] = whole.ncu["kernels"]
    text = section(results)
    assert "(by the estimate)" in text.replace("\n", " ")
    assert "(estimate, by operator)" in text
    assert "≈" in text


@pytest.mark.parametrize("width", [60, 80, 110, 160])
def test_an_estimate_is_called_one_at_every_width(width):
    lines = section(results_for(measured=False), width).splitlines()
    flat = " ".join(lines)
    assert "ESTIMATE: All figures are computed from tensor sizes, not measured." in flat
    assert REASON in flat
    assert "has to move 1.93× the DRAM bytes of standard (estimate)" in flat
    assert "Caches are not seen." in flat
    for line in lines:
        if line.startswith(("standard ", "flat ", "ghost ", "flash ")) and "B" in line and "×" in line:
            assert line.count("≈") >= 3
    assert "counted by" not in flat


def test_measured_and_estimated_rows_are_told_apart():
    text = section(results_for("standard") + results_for("ghost", measured=False))
    assert "Figures marked ≈ are computed from tensor sizes" in text
    assert [line.split()[-1] for line in text.splitlines()[4:6]] == ["measured", "estimate"]


def test_what_is_missing_is_shown_as_missing_with_the_reason():
    text = section(results_for("ghost", timed=False))
    assert "—" in text
    assert "no unprofiled time was measured" in text
    assert "standard has no bytes of the same kind" in text
    assert "Not there: l2_tex_read_bytes (the report does not hold it)." in text


def test_kernels_that_move_most_are_listed_and_the_rest_is_not():
    text = section(results_for("standard", per_kernel=True))
    assert "multi_tensor_apply_kernel<PointwiseOpScalarListFunc" in text
    assert "others" not in text


@pytest.mark.parametrize("width", [56, 60, 72, 80, 100, 110])
@pytest.mark.parametrize("kind", [{}, {"measured": False}])
def test_no_figure_is_cut_off(width, kind):
    text = section(results_for(**kind), width)
    assert "…" not in text.replace("--methods standard,…", "")
    assert max(map(len, text.splitlines())) <= width


def test_bandwidth_is_said_to_combine_two_runs():
    assert "the median time of an unprofiled step" in " ".join(section(results_for()).split())


def test_results_without_traffic_have_no_section(make_result):
    assert traffic_section(compare_results([make_result()]), 110) == []
    assert "DRAM" not in render_plain(summary(Report.of([make_result()])))


def test_the_section_is_part_of_the_summary():
    assert "DRAM traffic of one step, counted by Nsight Compute 2025.3.1" in render_plain(
        summary(Report.of(results_for()))
    )
