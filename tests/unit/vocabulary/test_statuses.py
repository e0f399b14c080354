"""Every status a result can have is told in every report, and so is one that this version does not know."""

from __future__ import annotations

import pytest

from dpscope.plain_text import render_plain
from dpscope.reports.page.table import make_cards
from dpscope.reports.report import Report
from dpscope.reports.text import summary
from dpscope.runner.sweep import still_valid
from dpscope.vocabulary.statuses import OK, STATUS_TABLE, Status, status_named

UNKNOWN = "preempted"


def headline_of(report):
    """Sentences, and what became of each method."""
    (size,), (story,) = report.sizes, report.stories
    return story.sentences, [card["outcome"] for card in make_cards(size, story)]


@pytest.mark.parametrize("status", [*STATUS_TABLE[1:], status_named(UNKNOWN)], ids=lambda status: status.name)
def test_summary_and_headline_say_what_became_of_a_method(make_result, status):
    results = [
        make_result(method="standard"),
        make_result(method="flat", status=status.name),
        make_result(method="ghost"),
    ]
    report = Report.of(results)
    sentences, outcomes = headline_of(report)
    assert outcomes == ["", status.outcome, ""]
    assert f"flat {status.outcome} here." in sentences
    text = " ".join(render_plain(summary(report)).split())
    assert f"flat {status.outcome} here." in text
    assert f"{status.name}: flat at batch 2" in text


def test_several_methods_that_ended_alike_share_a_sentence(make_result):
    results = [make_result(method=method, status="skipped") for method in ("flat", "ghost")]
    assert "flat and ghost were not run here." in headline_of(Report.of([make_result(), *results]))[0]


def test_a_status_that_is_not_known_is_measured_again(make_result, make_spec):
    ended, here = make_result(status=UNKNOWN), make_result().environment
    assert still_valid(make_result(), make_spec(), here)
    assert not still_valid(ended, make_spec(), here)


def test_a_status_in_the_table_is_known_by_its_name():
    assert [status_named(status.name) for status in STATUS_TABLE] == list(STATUS_TABLE)
    assert [status.name for status in STATUS_TABLE if not status.is_failure] == [OK]
    assert status_named(UNKNOWN) == Status(UNKNOWN, "ended as preempted", "ended as preempted", UNKNOWN)
