"""Where the bytes go, in words: tables that add up, what is private, what can be acted on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpscope.plain_text import render_plain
from dpscope.reports.report import Report
from dpscope.reports.text import summary

MIB = 2**20


def shown(*results, width=110, **options):
    return render_plain(summary(Report.of(results), width=width, **options), width=width)


def cells(label, text):
    """The cells of the first line that begins with a label."""
    line = next(line for line in text.splitlines() if line.startswith(label))
    return [cell for cell in line.removeprefix(label).split("  ") if cell.strip()]


def in_one_line(text):
    return " ".join(text.split())


@pytest.fixture(scope="module")
def text(measured_both_ways):
    return shown(*measured_both_ways())


def test_a_line_a_component_and_a_column_a_method(text):
    header = next(line for line in text.splitlines() if line.startswith("component"))
    assert header.split() == ["component", "standard", "flat", "ghost", "flash"]
    assert [cell.strip() for cell in cells("activations", text)] == ["300.0 MiB", "40.0 MiB", "300.0 MiB", "290.0 MiB"]
    assert [cell.strip() for cell in cells("total", text)] == ["709.0 MiB", "1.28 GiB", "937.0 MiB", "659.0 MiB"]


def test_what_only_private_training_holds_is_marked_and_ordinary_training_shows_none(text):
    assert [cell.strip() for cell in cells("per-sample gradients *", text)] == ["—", "800.0 MiB", "—", "—"]
    assert [cell.strip() for cell in cells("norm samples *", text)] == ["—", "—", "1.0 KiB", "—"]
    assert "* only private training holds this." in text
    assert "temporary matrices *" not in text


def test_time_and_the_ratios_stand_below_the_total(text):
    assert [cell.strip() for cell in cells("time/step", text)] == ["127.0 ms", "256.0 ms", "347.0 ms", "139.0 ms"]
    ratios = [line.split()[2:] for line in text.splitlines() if line.startswith("  × standard")]
    assert ratios == [["1.00×", "1.85×", "1.32×", "0.93×"], ["1.00×", "2.02×", "2.73×", "1.09×"]]
    assert cells("memory/time", text)[0].strip() == f"{709 / 127:.2f} MiB/ms"


def test_without_times_there_is_no_line_for_them(make_memory_result):
    text = shown(make_memory_result())
    assert "memory/time" not in text
    assert "time/step" not in text.split("Memory at the peak")[1]
    assert "where standard has no figures" not in text


def test_the_extra_over_standard_is_said_largest_first_with_its_sign(text):
    assert (
        "flat holds 600.0 MiB more than standard at the peak: per-sample gradients +800.0 MiB, "
        "activations −260.0 MiB, activation hooks +60.0 MiB."
    ) in in_one_line(text)
    assert "flash holds 50.0 MiB less than standard at the peak: gradients −40.0 MiB" in in_one_line(text)


def test_small_differences_are_summed_up_as_the_rest(make_memory_result):
    standard = make_memory_result(peak={"activations": 1000})
    peak = {"activations": 1100, "gradients": 3, "inputs": 4, "temp_matrices": 5}
    text = in_one_line(shown(standard, make_memory_result("ghost", peak=peak)))
    assert "ghost holds 112.0 MiB more than standard at the peak: activations +100.0 MiB, the rest +12.0 MiB." in text


def test_a_method_that_holds_the_same_says_so(make_memory_result):
    standard = make_memory_result()
    same = replace(standard, experiment="flash", spec={**standard.spec, "method": "flash"})
    text = shown(standard, same)
    assert "flash holds as much as standard at the peak." in text


def test_without_standard_there_is_a_hint_and_no_comparison(make_memory_result):
    text = shown(make_memory_result("ghost"))
    assert "No standard at this size to compare with" in text
    assert "ghost holds" not in text


def test_who_makes_the_peak_and_which_modules_weigh_most_are_named(text):
    line = next(line for line in text.splitlines() if "backward: aten::bmm in blocks.3.up" in line)
    assert line.startswith("standard")
    assert line.rstrip().endswith("blocks.4.up 5.0 MiB, blocks.3.up 4.0 MiB, blocks.2.up 3.0 MiB")


def test_modules_are_ranked_by_what_they_keep_for_the_backward_pass_and_the_lump_of_others_is_none(make_memory_result):
    result = make_memory_result()
    modules = [
        {"module": "embedding", "components": {"model_parameters": 90 * MIB, "activations": MIB}},
        {"module": "head", "components": {"activations": 2 * MIB, "activation_hooks": 5 * MIB}},
        {"module": "(other)", "components": {"activations": 50 * MIB}},
    ]
    text = shown(replace(result, memory={**result.memory, "modules": modules}))
    assert "head 7.0 MiB, embedding 1.0 MiB" in text
    assert "(other)" not in text


def test_what_is_unattributed_is_explained(text):
    assert (
        "Unattributed (the allocator's peak less all that was tracked): "
        "standard, flat, ghost, flash: 8.0 MiB (cuBLAS workspaces 8.0 MiB)."
    ) in in_one_line(text)


def test_a_row_without_a_breakdown_is_named_with_the_reason(make_result, make_memory_result):
    text = shown(make_memory_result(), make_result(method="ghost"), make_result(method="flat", status="oom"))
    assert "Not broken down: ghost (no breakdown by component was measured), flat (out of memory)" in text


def test_sizes_are_not_mixed(make_memory_result):
    results = [make_memory_result(method, batch_size=batch) for batch in (2, 4) for method in ("standard", "flat")]
    text = shown(*results)
    assert text.count("Memory at the peak: batch 2, sequence 8") == 1
    assert text.count("Memory at the peak: batch 4, sequence 8") == 1
    assert text.count("flat holds 600.0 MiB more than standard") == 2


@pytest.mark.parametrize("width", [40, 60, 80, 110])
def test_on_a_narrow_terminal_no_figure_is_cut(measured_both_ways, width):
    """Methods that do not fit beside each other stand below each other."""
    text = shown(*measured_both_ways(), width=width)
    assert all(len(line) <= width for line in text.splitlines())
    section = text.split("Memory at the peak")[1]
    for figure in ("709.0 MiB", "1.28 GiB", "937.0 MiB", "659.0 MiB"):
        assert figure in section


def test_twelve_methods_with_long_names_keep_their_figures(make_memory_result):
    results = [make_memory_result()]
    results += [replace(make_memory_result("ghost"), experiment="x" * 60 + str(number)) for number in range(11)]
    section = shown(*results).split("Memory at the peak")[1]
    totals = [line for line in section.splitlines() if line.startswith("total")]
    assert sum(line.count("MiB") for line in totals) == 12


def test_stages_are_for_the_file_alone(make_memory_result):
    results = [make_memory_result(), make_memory_result("flat")]
    assert "0_model_loaded" not in shown(*results)
    text = shown(*results, detailed=True)
    assert "Allocated at each stage: batch 2, sequence 8" in text
    assert [cell.strip() for cell in cells("3_after_warmup", text)] == ["300.0 MiB", "300.0 MiB"]


def test_a_stage_that_one_method_does_not_have_is_missing_there(make_memory_result):
    standard, flat = make_memory_result(), make_memory_result("flat")
    flat = replace(flat, snapshots=[*flat.snapshots, {"name": "1_wrapped_with_dp", "allocated_mb": 100.0}])
    text = shown(standard, flat, detailed=True)
    assert [cell.strip() for cell in cells("1_wrapped_with_dp", text)] == ["—", "100.0 MiB"]


def test_results_of_the_time_instrument_alone_have_no_such_section(make_result):
    assert "Memory at the peak" not in shown(make_result(), make_result(method="flat"))
