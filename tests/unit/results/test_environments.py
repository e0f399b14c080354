"""What results say of where and when they were measured."""

from __future__ import annotations

from dataclasses import replace

from dpscope.results.identity import days_of, differing_facts, facts_of, machine_of, merge_facts

DAY = 86400.0


def test_a_machine_is_called_by_its_gpu_if_it_has_one():
    assert machine_of({"gpu": "H200", "cpu": "Xeon"}) == "H200"
    assert machine_of({"gpu": None, "cpu": "Xeon"}) == "Xeon"
    assert machine_of({}) is None


def test_facts_have_the_names_that_people_use_and_the_gpu_its_memory():
    facts = facts_of({"gpu": "H200", "gpu_memory_bytes": 140 << 30, "torch": "2.13.0", "opacus": None, "odd": 1})
    assert facts == {"GPU": "H200 (140 GiB)", "torch": "2.13.0"}


def test_environments_that_agree_are_one_and_know_what_either_knows():
    one, other, older = {"torch": "2.13"}, {"torch": "2.13", "PEFT": "0.21"}, {"torch": "2.6"}
    assert merge_facts([one, other, older]) == [{"torch": "2.13", "PEFT": "0.21"}, {"torch": "2.6"}]
    assert differing_facts([one, older, other]) == {"torch": ["2.13", "2.6"]}


def test_another_python_or_commit_is_no_other_environment():
    assert differing_facts([{"Python": "3.10", "dpscope's commit": "a"}, {"Python": "3.12"}]) == {}


def test_days_are_told_from_the_first_to_the_last(make_result):
    def taken(*stamps):
        return [replace(make_result(), snapshots=[{"name": "model", "timestamp": stamp}]) for stamp in stamps]

    assert days_of(taken(0.0, 1.0)) == "1970-01-01"
    assert days_of(taken(2 * DAY, 0.0, DAY)) == "1970-01-01 to 1970-01-03"
    assert days_of([make_result()]) == days_of(taken(None)) == ""
