"""The result file: what it holds, and what is refused as not being one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpscope.results.schema import SCHEMA_VERSION, Result, UnreadableResult, parse_result
from dpscope.vocabulary.statuses import STATUSES


@pytest.fixture
def document(make_result):
    """A result file as plain data, to be damaged."""
    return json.loads(make_result().to_json())


def test_a_result_comes_back_the_same_from_its_file(make_result):
    for status in STATUSES:
        result = make_result(status=status, method="ghost")
        assert parse_result(result.to_json()) == result


def test_the_keys_that_older_consumers_read_come_first(make_result):
    document = json.loads(make_result(method="flat", median=12.5, peak=3 * 2**20).to_json())
    assert document["experiment"] == "flat"
    assert document["avg_time_ms"] == 12.5
    assert document["peak_memory_mb"] == 3.0
    assert {"breakdown", "snapshots"} <= set(document)
    assert document["config"]["model"] == "tiny"
    assert document["config"]["hidden_dim"] == 16
    assert document["config"]["batch_size"] == 2
    assert document["schema_version"] == SCHEMA_VERSION


def test_only_an_ok_result_is_ok(make_result):
    assert [status for status in STATUSES if make_result(status=status).ok] == ["ok"]


def test_every_beginning_of_a_result_file_is_refused_as_incomplete(make_result):
    text = make_result().to_json().rstrip()
    for length in range(len(text)):
        with pytest.raises(UnreadableResult, match="not complete JSON"):
            parse_result(text[:length])


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1, "1", None, [1]])
def test_another_schema_version_is_refused_with_what_to_do(document, version):
    document["schema_version"] = version
    with pytest.raises(UnreadableResult, match=r"written with result schema .* measure again"):
        parse_result(json.dumps(document))


@pytest.mark.parametrize("text", ["[]", "3", "null", '"text"', "{}", '{"experiment": "flat"}', '{"schema_version": 1}'])
def test_json_of_somebody_else_is_not_a_dpscope_result(text):
    with pytest.raises(UnreadableResult, match="not a dpscope result"):
        parse_result(text)


@pytest.mark.parametrize("key", ["config", "spec", "status"])
def test_a_result_without_a_part_is_damaged_and_says_which(document, key):
    del document[key]
    with pytest.raises(UnreadableResult, match=f"damaged dpscope result .*{key}"):
        parse_result(json.dumps(document))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("status", "splendid"),
        ("status", None),
        ("experiment", 7),
        ("spec", {}),
        ("spec", {"workload": None}),
        ("spec", []),
        ("config", "tiny"),
        ("timing", None),
        ("timing", [1.0]),
        ("memory", 12),
        ("environment", None),
        ("snapshots", [3.5]),
    ],
)
def test_a_part_of_the_wrong_kind_is_damage(document, key, value):
    document[key] = value
    with pytest.raises(UnreadableResult, match=f"damaged dpscope result .*{key}"):
        parse_result(json.dumps(document))


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("spec", "batch_size", "8"),
        ("spec", "batch_size", -1),
        ("spec", "seq_len", "long"),
        ("spec", "seq_len", float("nan")),
        ("spec", "steps", {"timed": 3}),
        ("spec", "warmup", True),
        ("spec", "seed", []),
        ("spec", "learning_rate", None),
        ("spec", "noise_multiplier", "much"),
        ("spec", "max_grad_norm", float("inf")),
        ("spec", "method", 7),
        ("spec", "device", {}),
        ("spec", "workload", {"name": None}),
        ("spec", "options", [None]),
        ("environment", "gpu", 3),
        ("environment", "cpu", ["AMD"]),
    ],
)
def test_a_value_of_the_wrong_kind_within_a_part_is_damage(document, part, name, value):
    document[part][name] = value
    with pytest.raises(UnreadableResult, match=f"damaged dpscope result .*{part}"):
        parse_result(json.dumps(document))


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"schema_version": ' + "9" * 5000 + "}", '{"peak_memory_mb": 1' + "0" * 400 + "}"]
)
def test_json_that_no_parser_takes_is_refused_like_any_other_damage(text):
    with pytest.raises(UnreadableResult):
        parse_result(text)


def test_keys_of_a_later_dpscope_are_passed_over(document):
    document["mood"] = "good"
    assert parse_result(json.dumps(document)).experiment == "standard"


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
def test_whatever_is_in_a_file_it_is_a_result_or_refused(make_result, data):
    document = json.loads(make_result().to_json())
    key = data.draw(st.sampled_from(sorted(document)))
    document[key] = data.draw(anything)
    try:
        assert isinstance(parse_result(json.dumps(document)), Result)
    except UnreadableResult as refusal:
        assert str(refusal)
