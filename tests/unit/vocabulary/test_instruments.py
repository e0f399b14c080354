"""A new instrument is an entry in the table and a function that measures: the rest follows."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
from click.testing import CliRunner

from dpscope import cli, numbers
from dpscope.commands import sweeping
from dpscope.comparison import Comparison
from dpscope.errors import UserError
from dpscope.plain_text import render_plain
from dpscope.reports.page.render import IN_ORDER, find_missing
from dpscope.reports.report import Report
from dpscope.reports.text import section_at, summary
from dpscope.results.schema import parse_result, result_for
from dpscope.runner.measure import choose_instruments, measure
from dpscope.runner.spec import RunSpec
from dpscope.vocabulary.instruments import DETAILS, INSTRUMENTS, SECTIONS, Instrument, Option
from dpscope.vocabulary.settings import FLAGS

ENERGY = Instrument(
    summary="Joules of a step.",
    shows="Energy",
    options={
        "every": Option(5.0, "Milliseconds between readings.", numbers.RealNumber("--every", 0.1, 1e3)),
        "sensors": Option(2, "Sensors to read.", numbers.WholeNumber("--sensors", 1, 9)),
        "kind": Option("board", "Which.", choices=("board", "chip")),
        "raw": Option(False, "Keep every reading."),
    },
    with_time=True,
    instead="joules are estimated from time",
)


@pytest.fixture
def energy(monkeypatch):
    """As if the entry were in the table and the file in its folder."""
    module = ModuleType("dpscope.runner.measurements.energy")
    module.measure_energy = lambda spec, progress, folder: result_for(
        spec.to_dict(), parts={"energy": {"joules": 3.0, "every": spec.option("every")}}
    )
    module.obstacle = lambda device: None if device == "cuda" else "there is no meter"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(INSTRUMENTS, "energy", ENERGY)
    monkeypatch.setitem(cli.COMMANDS, "energy", ENERGY.summary)


def invoke(*arguments):
    return CliRunner().invoke(cli.main, [*arguments], catch_exceptions=False)


def test_it_has_a_subcommand_with_its_options_that_plans_its_rows(energy, monkeypatch):
    planned = []
    follow = lambda _, specs, **options: planned.extend(specs) or Comparison([], None, [], [])  # noqa: E731
    monkeypatch.setattr(sweeping, "follow_sweep", follow)
    words = " ".join(invoke("energy", "--help").output.split())
    assert "Joules of a step." in words
    assert "--every FLOAT RANGE Milliseconds between readings. [default: 5.0; x>0]" in words
    assert "--sensors INTEGER RANGE Sensors to read. [default: 2; x>=1]" in words
    assert "--kind [board|chip] Which. [default: board]" in words
    assert "--raw Keep every reading." in words
    done = invoke("energy", "--device", "cpu", "--methods", "standard", "--every", "0.5", "--raw", "--steps", "2")
    assert done.exit_code == 0
    assert [spec.instrument for spec in planned] == ["time", "energy"]
    assert (planned[1].options, planned[1].steps) == ({"every": 0.5, "raw": True}, 2)


def test_what_it_cannot_do_is_refused_in_a_sentence(energy):
    assert "--every must be a number above 0, from 0.1 to 1000" in invoke("energy", "--every", "1e9").output
    assert "'tree' is not one of" in invoke("energy", "--kind", "tree").output


def test_its_function_measures_and_what_it_saw_is_in_the_result_under_its_name(energy, make_spec):
    result = measure(make_spec(instrument="energy", options={"every": 7}))
    assert result.parts == {"energy": {"joules": 3.0, "every": 7.0}}
    document = json.loads(result.to_json())
    assert document["energy"] == result.parts["energy"]
    assert "parts" not in document
    assert parse_result(result.to_json()) == result
    with pytest.raises(UserError, match=r"a damaged dpscope result \(energy\)"):
        parse_result(json.dumps({**document, "energy": 3.0}))


def test_all_takes_it_in_and_says_what_it_does_where_it_cannot_work(energy):
    assert "energy" in choose_instruments("all", "cpu").instruments
    assert "energy: joules are estimated from time: there is no meter" in choose_instruments("all", "cpu").remarks


def test_the_page_says_that_it_did_not_look(energy, monkeypatch, make_result):
    monkeypatch.setattr("dpscope.reports.page.render.IN_ORDER", [*IN_ORDER, "energy"])
    gaps = find_missing(Report.of([make_result()])).gaps
    (gap,) = [gap for gap in gaps if gap.what == "Energy"]
    assert gap.commands[0].startswith("dpscope compare --instruments energy ")


def test_the_summary_has_a_section_of_it_where_one_is_named(energy, monkeypatch, make_spec):
    section = SimpleNamespace(energy_section=lambda rows, width: [f"{len(rows)} row, {width} wide: 3 joules"])
    monkeypatch.setitem(sys.modules, "dpscope.reports.energy", section)
    monkeypatch.setattr("dpscope.reports.text.SECTIONS", (("energy", "energy:energy_section"),))
    assert "1 row, 70 wide: 3 joules" in render_plain(
        summary(Report.of([measure(make_spec(instrument="energy"))]), width=70)
    )


@pytest.mark.parametrize(("instrument", "where"), [*SECTIONS, *DETAILS])
def test_every_section_is_a_function_that_says_nothing_of_nothing(instrument, where):
    assert instrument in INSTRUMENTS
    assert section_at(where)([], 80) == []


def test_a_command_can_tell_an_instruments_options_from_those_of_a_sweep():
    sweep = {parameter.name for parameter in cli.main.get_command(None, "compare").params}
    assert set(FLAGS) < sweep
    taken = {name: set(each.options) & sweep for name, each in INSTRUMENTS.items()}
    assert {name: names for name, names in taken.items() if names} == {}


@pytest.mark.parametrize("name", INSTRUMENTS)
def test_every_instrument_has_a_function_of_its_name(name):
    from dpscope.runner.measure import measurement_module

    assert callable(getattr(measurement_module(name), f"measure_{name}"))
    assert INSTRUMENTS[name].works_everywhere or callable(measurement_module(name).obstacle)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"blue": 1}, "instrument 'ncu' has no option blue: it knows per_kernel, kernel"),
        ({"kernel": 3}, "option 'kernel' must be a str, not 3"),
        ({"per_kernel": "yes"}, "option 'per_kernel' must be a bool, not 'yes'"),
    ],
)
def test_an_option_that_means_nothing_is_refused(options, sentence):
    from dpscope.workloads.configs import make_config

    with pytest.raises(UserError, match=sentence):
        RunSpec(workload=make_config("tiny"), method="flat", batch_size=1, instrument="ncu", options=options)
