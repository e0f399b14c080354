"""What a person reads: figures with units, ratios, what is missing and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dpscope.plain_text import SUMMARY_WIDTH, render_plain
from dpscope.reports.report import Report
from dpscope.reports.text import summary
from dpscope.results.store import Skipped

GIB = 2**30


@pytest.fixture
def shown(make_result):
    """The summary of results as plain text."""

    def show(*results, **options):
        return render_plain(summary(Report.of(results, options.pop("skipped", ())), **options))

    return show


def row_of(method, text):
    """The cells of a method's row in the table."""
    line = next(line for line in text.splitlines() if line.startswith(f"{method} "))
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def in_one_line(text):
    return " ".join(text.split())


def test_a_row_has_absolute_figures_with_units_the_spread_and_the_ratios(shown, make_result):
    flat = make_result(method="flat", median=25.04, peak=3 * GIB)
    flat = replace(flat, timing={**flat.timing, "p10_ms": 24.0, "p90_ms": 31.26})
    text = shown(make_result(median=10.0, peak=GIB), flat)
    assert row_of("standard", text) == [
        "standard",
        "2",
        "8",
        "10.0 ms",
        "10.0–10.0",
        "200",
        "1,600",
        "1.00×",
        "1.00 GiB",
        "1.00×",
        "ok",
    ]
    assert row_of("flat", text)[3:] == ["25.0 ms", "24.0–31.3", "79.9", "639", "2.50×", "3.00 GiB", "3.00×", "ok"]


def test_what_the_figures_say_is_said_in_a_sentence_for_each_size(shown, make_result):
    text = shown(
        make_result(median=10.0, peak=100),
        make_result(method="flat", median=25.0, peak=400),
        make_result(method="ghost", median=15.0, peak=150),
    )
    sentence = (
        "Batch 2, sequence 8. Of the private methods ghost costs least: 1.50× the time and 1.50× the memory of "
        "ordinary training. Against flat it saves 10.0 ms (40% of the time) and 250 B (62% of the memory) a step."
    )
    assert sentence in in_one_line(text)


@pytest.mark.parametrize("status", ["oom", "failed", "timeout", "skipped"])
def test_a_row_without_figures_shows_dashes_its_status_and_the_reason(shown, make_result, status):
    text = shown(make_result(), make_result(method="flat", status=status, reason="a reason: and what to do"))
    assert row_of("flat", text) == ["flat", "2", "8", *["—"] * 7, status]
    assert f"{status}: flat at batch 2, sequence 8: a reason: and what to do" in text
    assert "flat takes" not in text


def test_without_standard_the_ratios_are_missing_and_the_reason_is_given(shown, make_result):
    text = shown(make_result(method="flat"))
    assert row_of("flat", text) == ["flat", "2", "8", "10.0 ms", "10.0–10.0", "200", "1,600", "—", "1.0 MiB", "—", "ok"]
    assert "× is — where standard has no figures at that size" in in_one_line(text)


def test_with_standard_nobody_is_told_that_it_is_missing(shown, make_result):
    text = shown(make_result(), make_result(method="flat"), make_result(method="ghost", status="oom"))
    assert "× is —" not in text


def test_when_every_row_failed_the_summary_still_says_why(shown, make_result):
    failed = [replace(make_result(method=m, status="failed"), environment={}) for m in ("standard", "flat")]
    text = shown(*failed)
    assert row_of("standard", text)[-1] == "failed"
    assert "failed: standard, flat at batch 2, sequence 8: because it failed" in in_one_line(text)


def test_a_reason_that_many_rows_share_is_told_once_with_all_their_sizes(shown, make_result):
    sizes = [("flat", 2), ("flat", 4), ("ghost", 2), ("ghost", 4), ("flash", 4)]
    refused = [make_result(method=method, batch_size=size, status="skipped") for method, size in sizes]
    text = in_one_line(shown(make_result(), *refused))
    both = "batch 2, sequence 8; batch 4, sequence 8"
    assert f"skipped: flat, ghost at {both}, flash at batch 4, sequence 8: because it skipped" in text
    assert text.count("because it skipped") == 1


def test_the_model_the_settings_and_the_machine_are_named(shown, make_result):
    text = in_one_line(shown(make_result(noise_multiplier=0.5, max_grad_norm=2.0)))
    assert "Model tiny (vocab size 50, hidden dim 16, num layers 1, num heads 2" in text
    assert "fp32, adamw, noise multiplier 0.5, max grad norm 2; 0 warm-up and 1 timed step" in text
    assert "On a processor, 2 threads; torch 2.13.0, opacus 1.6.0, dpscope 0.1.0" in text


def test_a_gpu_is_named_with_its_memory(shown, make_result):
    gpu = {"gpu": "NVIDIA H200", "gpu_memory_bytes": 140 * GIB, "cuda": "13.0", "driver": "580.1"}
    result = make_result()
    text = shown(replace(result, environment={**result.environment, **gpu}))
    assert "On NVIDIA H200 (140 GiB), CUDA 13.0" in text


def test_rows_from_two_machines_are_not_passed_off_as_one(shown, make_result):
    here, there = make_result(), make_result(method="flat")
    text = shown(here, replace(there, environment={**there.environment, "torch": "2.6.0"}))
    assert "torch 2.13.0" in text
    assert "torch 2.6.0" in text


def test_each_source_of_memory_figures_is_explained_once(shown, make_result):
    text = in_one_line(shown(make_result(), make_result(method="flat")))
    assert text.count("Peak memory: live tensors at their peak during one step, from torch's CPU allocator") == 1


def test_images_have_no_column_of_sequence_lengths(shown, make_result):
    from dpscope.workloads.configs import make_config

    cnn = {"workload": make_config("cnn"), "seq_len": None}
    text = shown(make_result(**cnn), make_result(method="flat", status="oom", **cnn))
    assert " seq " not in text
    assert "oom: flat at batch 2: because it oom" in text


def test_dtypes_and_models_get_a_column_when_they_differ(shown, make_result):
    assert "dtype" not in shown(make_result())
    text = shown(make_result(), make_result(dtype="bf16"))
    rows = [line.split() for line in text.splitlines() if line.startswith("standard ")]
    assert [row[3] for row in rows] == ["fp32", "bf16"]
    assert "dtype" in text


def test_files_left_out_are_named_with_the_reason(shown, make_result):
    text = shown(make_result(), skipped=[Skipped(Path("results/cut.json"), "not complete JSON")])
    assert "Left out: cut.json: not complete JSON" in text


def test_a_reason_with_brackets_is_shown_as_it_is(shown, make_result):
    reason = "IndexError: index [bold]3[/bold] of [/a/path]"
    assert reason in shown(make_result(status="failed", reason=reason))


def test_plain_text_has_no_control_characters_no_trailing_blanks_and_fits_its_width(shown, make_result):
    text = shown(make_result(), make_result(method="flat", status="failed"))
    assert "\x1b" not in text
    assert all(line == line.rstrip() and len(line) <= SUMMARY_WIDTH for line in text.splitlines())
    assert text.endswith("\n")


def test_the_terminal_names_the_winner_that_the_page_names(shown, make_result):
    def steady(method, median, peak):
        result = make_result(method=method, median=median, peak=peak, steps=3)
        return replace(result, timing={**result.timing, "step_ms": [median] * 5})

    text = shown(steady("standard", 10.0, GIB), steady("flat", 25.0, 2 * GIB), steady("flash", 11.0, GIB))
    sentence = (
        "Batch 2, sequence 8. Of the private methods flash costs least: 1.10× the time and 1.00× the memory of "
        "ordinary training. Against flat it saves 14.0 ms (56% of the time) and 1.00 GiB (50% of the memory) a step."
    )
    assert sentence in in_one_line(text)


def test_each_size_of_several_models_is_told_with_its_model(shown, make_result):
    def of(model, **options):
        result = make_result(**options)
        return replace(result, spec={**result.spec, "workload": {**result.spec["workload"], "name": model}})

    text = in_one_line(shown(*(of(model, method=m) for model in ("one", "two") for m in ("standard", "flat"))))
    assert "one: batch 2, sequence 8. flat takes" in text
    assert "two: batch 2, sequence 8. flat takes" in text


def test_numbers_of_steps_have_a_column_where_they_keep_rows_apart(shown, make_result):
    apart = [make_result(method=m, steps=steps) for steps in (2, 3) for m in ("standard", "flat")]
    assert "steps  time/step" in shown(*apart)
    assert "2 timed steps: batch 2, sequence 8. flat takes" in in_one_line(shown(*apart))
    assert "steps  time/step" not in shown(*apart[:2])


def test_a_ratio_that_is_missing_is_not_in_doubt_as_well(shown, make_result):
    result = make_result()
    shaky = replace(result, timing={**result.timing, "p10_ms": 1.0, "p90_ms": 99.0})
    text = shown(shaky, make_result(method="flat", status="oom", reason="full"))
    assert row_of("flat", text)[3:] == ["—"] * 7 + ["oom"]


def test_a_table_too_wide_for_the_summary_loses_columns_and_no_word_of_the_others(shown, make_result):
    results = [
        make_result(noise_multiplier=n, max_grad_norm=n, optimizer=o) for n in (1.0, 0.5) for o in ("sgd", "adam")
    ]
    text = shown(*results)
    heading = next(line for line in text.splitlines() if line.startswith("method"))
    assert "noise multiplier  max grad norm" in heading and "p10–p90" not in heading
    assert "…" not in text
