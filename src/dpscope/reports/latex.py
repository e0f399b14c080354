"""Rows as tables for a paper: booktabs, captions that name the hardware, with text escaped for LaTeX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from dpscope.reports.doubt import explain, marked
from dpscope.reports.memory.data import described_of, present
from dpscope.reports.output import Output, text_output
from dpscope.reports.report import Report
from dpscope.reports.story import compilation_notes
from dpscope.reports.tables import SIZES, SPEEDS, Row, group_by_size, worth_a_column
from dpscope.reports.words import distinct, peak_notes, spread_in_words
from dpscope.results.environments import machine_of
from dpscope.results.identity import step_in_words
from dpscope.results.memory import Composition
from dpscope.units import GIB, MIB, MISSING
from dpscope.vocabulary.components import component_named
from dpscope.vocabulary.settings import COMPARED

HEAD = "% Made by dpscope. Needs \\usepackage{booktabs}; then \\input this file.\n"
TITLES = {"batch_size": "batch", "seq_len": "sequence"}
STAR = "∗"  # behind a component that only private training holds
SPECIAL = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "×": r"$\times$",
        "−": "$-$",
        "–": "--",
        "—": "---",
        "…": r"\ldots{}",
        STAR: r"$^\ast$",
    }
)


def escape(text: object) -> str:
    """Escape text for LaTeX."""
    return " ".join(str(text).split()).translate(SPECIAL)


def to_latex(rows: Sequence[Row]) -> str:
    """Return a table of time and peak memory, and one of components for each size that has them."""
    described = [found for group in group_by_size(rows) if (found := described_of(group))]
    return HEAD + "\n".join([_cost_table(rows), *(_component_table(*each) for each in enumerate(described, start=1))])


def _cost_table(rows: Sequence[Row]) -> str:
    fields = worth_a_column(rows, ("method", "model", *COMPARED, "steps", "device", *SIZES))
    unit, name = _unit([row.peak_bytes or 0.0 for row in rows])
    rate = next((name for name in reversed(SPEEDS) if any(name in row.speeds for row in rows)), SPEEDS[0])
    compiled = any(row.eager_time_ratio for row in rows)
    status = [] if all(row.result.ok for row in rows) else ["status"]
    lines = [
        {TITLES.get(name, name): row.field(name) for name in fields}
        | {
            "time (ms)": marked(_number(row.median_ms, 1), row.time_doubt),
            "p10–p90 (ms)": spread_in_words(row.spread_ms),
            rate: row.speed_shown(rate),
            "time (×)": marked(_number(row.time_ratio, 2), row.ratio_doubt),
            **({"time (× eager)": marked(_number(row.eager_time_ratio, 2), row.eager_ratio_doubt)} if compiled else {}),
            f"peak ({name})": _number(row.peak_bytes, 2, unit),
            "peak (×)": _number(row.memory_ratio, 2),
        }
        | dict.fromkeys(status, row.result.status)
        for row in rows
    ]
    notes = [
        *compilation_notes(rows),
        *peak_notes(row.peak_source for row in rows),
        explain(row.ratio_doubt for row in rows),
        _measured_on(rows),
    ]
    caption = "Time of a training step (median, with 10th and 90th percentile) and peak memory."
    caption = " ".join([caption, "×: multiple of standard, non-private training.", *filter(None, notes)])
    return _table(lines, caption, "tab:dpscope-cost")


def _component_table(number: int, described: Mapping[Row, Composition]) -> str:
    rows, compositions = list(described), list(described.values())
    unit, name = _unit([each.total for each in compositions])
    held_ones = [component_named(key) for key in present(each.components for each in compositions)]
    columns = ["component", *distinct([row.method for row in rows])]  # one may have been measured twice
    held = {one.marked(STAR): [each.components.get(one.key) or None for each in compositions] for one in held_ones}
    held["total"] = [each.total for each in compositions]
    lines = [(label, *(_number(count, 2, unit) for count in counts)) for label, counts in held.items()]
    private = f"{STAR} held by private training only. " if any(one.private_only for one in held_ones) else ""
    caption = f"Memory at the peak of a training step by component, in {name}, by the memory instrument. {private}"
    caption += f"{rows[0].size}; {_measured_on(rows)}"
    return _table([dict(zip(columns, line, strict=True)) for line in lines], caption, f"tab:dpscope-memory-{number}")


def _table(lines: Sequence[dict[str, Any]], caption: str, label: str) -> str:
    """Return the table's lines, the first column left-aligned."""
    import pandas

    escaped = [{escape(name): escape(MISSING if v is None else v) for name, v in line.items()} for line in lines]
    to_latex = partial(pandas.DataFrame(escaped).style.hide(axis="index").to_latex, hrules=True, position="t")
    columns = f"l{'r' * (len(lines[0]) - 1)}"
    return str(to_latex(position_float="centering", column_format=columns, caption=escape(caption), label=label))


def _measured_on(rows: Sequence[Row]) -> str:
    """Return the model and the machine, for a caption."""
    machines = []
    for environment in (row.first.environment for row in rows if row.first.environment):
        software = ", ".join(f"{name} {environment[name]}" for name in ("torch", "opacus") if environment.get(name))
        machines.append(", ".join(filter(None, (machine_of(environment), software))))
    settings = (step_in_words(row.spec) for row in rows)
    models = f"Model {', '.join(dict.fromkeys(row.field('model') for row in rows))}"
    return "; ".join(filter(None, (models, *("; ".join(dict.fromkeys(each)) for each in (settings, machines))))) + "."


def _unit(counts: Sequence[float]) -> tuple[int, str]:
    return (GIB, "GiB") if max(counts, default=0.0) >= GIB else (MIB, "MiB")


def _number(value: float | None, decimals: int, unit: int = 1) -> str:
    return MISSING if value is None else f"{value / unit:.{decimals}f}".replace("-", "−")


LATEX: Output[Report] = text_output(
    "results.tex", "tables for a paper, with booktabs", lambda report: to_latex(report.rows), asked_for="latex"
)
