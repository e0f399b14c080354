"""A program: dpscope with two more settings, and what it then says of them, as JSON.

`FIELDS` is written into a copy of the settings' file, as someone would who adds them, before anything imports it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import dpscope.vocabulary

FIELDS = """\
    lookahead: int = setting(1, numbers.WholeNumber("lookahead"), help="Micro-batches.", heading="Micro-batches")
    freeze_norms: bool = setting(False, Switch("freeze norms"), help="No training of norms.")
"""
ASKED = {"lookahead": 4, "freeze_norms": True}
FLAGS = ("--lookahead", "4", "--freeze-norms")


def add_fields():
    found = importlib.util.find_spec("dpscope.vocabulary.settings")
    before, seed, after = Path(found.origin).read_text().partition("    seed: int = setting(")
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = dpscope.vocabulary.settings = module
    exec(compile(before + FIELDS + seed + after, found.origin, "exec"), vars(module))


def refusal_of(do, *arguments, **keywords):
    from dpscope.errors import UserError

    try:
        do(*arguments, **keywords)
    except UserError as error:
        return str(error)
    return None


def planned_by_command():
    """What `dpscope memory` plans, instead of measuring it."""
    from click.testing import CliRunner

    from dpscope.cli import main
    from dpscope.commands import memory
    from dpscope.comparison import Comparison

    planned = []
    memory.follow_sweep = lambda command, specs, **options: planned.extend(specs) or Comparison([], Path(), [], [])
    arguments = ("--device", "cpu", "--batch-size", "2", "--methods", "standard", *FLAGS)
    CliRunner().invoke(main, ["memory", *arguments])
    return [spec.to_dict() for spec in planned]


def planned_in_python():
    from dpscope.comparison import specs_of

    sweep = {"device": "cpu", "batch_size": 2, "methods": ["standard"], "instruments": ["memory"], **ASKED}
    return [spec.to_dict() for spec in specs_of("tiny", sweep)]


def look_at_specs(usual, other):
    from click.testing import CliRunner

    from dpscope.cli import main
    from dpscope.reports.page.render import command_lines
    from dpscope.runner.spec import RunSpec

    return {
        "usual": [usual.digest, usual.file_name, usual.to_dict()],
        "other": [other.digest, other.file_name, other.label, other.to_dict()],
        "again": RunSpec.from_dict(json.loads(json.dumps(other.to_dict()))) == other,
        "told to trainers": [other.settings.lookahead, usual.settings.lookahead],
        "refusals": [refusal_of(replace, usual, lookahead=0), refusal_of(replace, usual, freeze_norms=1)],
        "help": CliRunner().invoke(main, ["compare", "--help"]).output,
        "planned by command": planned_by_command(),
        "planned in Python": planned_in_python(),
        "commands": command_lines([usual.to_dict(), other.to_dict()]),
    }


def results_of(specs):
    from dpscope.results.schema import parse_result, result_for

    for spec, ms in specs.items():
        timing = {"median_ms": ms, "step_ms": [ms] * 9, "p10_ms": ms, "p90_ms": ms}
        yield parse_result(result_for(spec.to_dict(), timing=timing, environment={"cpu": "a CPU"}).to_json())


def look_at_results(usual, other):
    from dpscope.comparison import Comparison
    from dpscope.plain_text import render_plain
    from dpscope.reports.page.render import render_page
    from dpscope.reports.report import Report
    from dpscope.reports.text import summary
    from dpscope.results.schema import parse_result
    from dpscope.runner.sweep import still_valid

    specs = {usual: 10.0, replace(usual, method="flat"): 30.0, other: 20.0, replace(other, method="flat"): 80.0}
    results = list(results_of(specs))
    first, _, third, _ = results
    here = first.environment
    report, comparison = Report.of(results), Comparison(results, Path(), [], [])
    before = Comparison(results[:2], Path(), [], [])
    return {
        "kept": [still_valid(first, usual, here), still_valid(first, other, here), still_valid(third, other, here)],
        "damage": refusal_of(parse_result, replace(third, spec={**third.spec, "lookahead": "four"}).to_json()),
        "labels": [setting.label for setting in report.settings],
        "ratios": [row.time_ratio for row in report.rows],
        "summary": render_plain(summary(report), 160),
        "page": render_page(report),
        "frame": comparison.to_pandas().to_dict("list"),
        "latex": comparison.to_latex(),
        "in both sweeps": [pair.now.first.spec for pair in comparison.against(before).pairs],
    }


def main():
    add_fields()
    from dpscope.runner.spec import RunSpec
    from dpscope.workloads.configs import make_config

    usual = RunSpec(workload=make_config("tiny"), method="standard", batch_size=2)
    other = replace(usual, **ASKED)
    print(json.dumps(look_at_specs(usual, other) | look_at_results(usual, other)))


if __name__ == "__main__":
    main()
