"""Names of modules that differ in the numbers of their layers alone are told as one."""

from __future__ import annotations

import pytest

from dpscope.reports.trace.layers_chart import ancestor, is_sum_of_others, is_summary, name_of_run, pattern_of


@pytest.mark.parametrize(
    ("run", "pattern", "name"),
    [
        (["blocks.3.up"], "", "blocks.3.up"),
        (["blocks.3.up"], "blocks.*.up", "blocks.3.up"),
        (["blocks.0.up", "blocks.1.up", "blocks.9.up"], "blocks.*.up", "blocks.*.up"),
        (["blocks.0.up", "blocks.9.up"], "", "blocks.0–9.up"),
        (["stages.1.blocks.0", "stages.1.blocks.4"], "", "stages.1.blocks.0–4"),
        (["stages.1.blocks.0", "stages.2.blocks.4"], "", "stages.1.blocks.0 to stages.2.blocks.4"),
    ],
)
def test_a_run_of_modules_is_named_by_its_pattern_or_by_its_ends(run, pattern, name):
    assert name_of_run(run, pattern) == name


def test_only_a_whole_part_of_a_name_is_the_number_of_a_layer():
    assert pattern_of("0.conv1.12.fc2") == "*.conv1.*.fc2"


def test_what_is_no_module_has_a_name_in_brackets_and_no_parent():
    assert ancestor("blocks.3.up", 2) == "blocks.3"
    assert ancestor("head", 2) == "head"
    assert ancestor("(outside e.g. the modules)", 1) == "(outside e.g. the modules)"
    assert is_summary("(outside the modules)") and not is_summary("head")


@pytest.mark.parametrize("name", ["(other)", "(1 others)", "(12 others)"])
def test_the_modules_that_an_instrument_does_not_list_are_known_by_their_name(name):
    assert is_sum_of_others(name)
    assert not is_sum_of_others("(outside the modules)")
