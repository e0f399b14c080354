"""What a result's spec says of the row it belongs to."""

from __future__ import annotations

import pytest

from dpscope.results.identity import hashable, identity_of, size_in_words, step_counts_of, step_in_words


def test_how_a_row_was_measured_does_not_tell_it_from_others(make_result):
    spec = make_result().spec
    otherwise = {**spec, "method": "ghost", "instrument": "memory", "options": {"x": 1}, "warmup": 9, "steps": 99}
    assert identity_of(otherwise) == identity_of(spec)
    assert step_counts_of(otherwise) == (("warmup", 9), ("steps", 99))


@pytest.mark.parametrize("changed", [{"batch_size": 64}, {"dtype": "bf16"}, {"compile": "default"}, {"gpus": 2}])
def test_a_setting_of_the_step_tells_rows_apart(make_result, changed):
    assert identity_of({**make_result().spec, **changed}) != identity_of(make_result().spec)


def test_a_file_from_before_a_setting_is_of_the_same_row_as_one_that_states_its_default(make_result):
    spec = make_result().spec
    assert identity_of({**spec, "gpus": 1, "compile": "none"}) == identity_of(spec)


def test_equal_values_have_equal_keys_whatever_the_order_of_names():
    one, other = {"a": [1, {"b": 2}], "c": (3,)}, {"c": [3], "a": (1, {"b": 2})}
    assert len({hashable(one), hashable(other)}) == 1
    assert hashable({**one, "c": [4]}) != hashable(one)


def test_a_size_without_a_sequence_is_told_by_its_batch_alone():
    assert size_in_words({"batch_size": 8, "seq_len": 1024}) == "batch 8, sequence 1024"
    assert size_in_words({"batch_size": 8, "seq_len": None}) == "batch 8"


def test_later_settings_are_told_only_where_a_spec_has_them():
    spec = {"dtype": "bf16", "optimizer": "adamw"}
    assert step_in_words(spec) == "bf16, adamw"
    assert step_in_words({**spec, "compile": "default", "gpus": 2}) == "bf16, adamw, compiled, 2 GPUs"
