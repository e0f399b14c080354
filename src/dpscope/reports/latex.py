"""Rows as tables for a paper: booktabs, captions that name the hardware, nothing that LaTeX would stumble over."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from dpscope.reports.doubt import explain, marked
from dpscope.reports.memory.data import composition_of, in_order, is_private_only, label_of
from dpscope.reports.output import text_output
from dpscope.reports.report import Report
from dpscope.reports.tables import SIZES, SPEEDS, Row, group_by_size, worth_a_column
from dpscope.reports.words import distinct, peak_notes, step_in_words
from dpscope.units import GIB, MIB, MISSING, format_throughput
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
    """Text as LaTeX prints it."""
    return " ".join(str(text).split()).translate(SPECIAL)


def to_latex(rows: Sequence[Row]) -> str:
    """A table of time and peak memory, and one of components for each size that has them."""
    tables = [_cost_table(rows)]
    groups = [group for group in group_by_size(rows) if any(composition_of(row) for row in group)]
    tables += [_component_table(group, number) for number, group in enumerate(groups, start=1)]
    return HEAD + "\n".join(tables)


def _cost_table(rows: Sequence[Row]) -> str:
    fields = worth_a_column(rows, ("method", "model", *COMPARED, "steps", "device", *SIZES))
    unit, name = _unit([row.peak_bytes or 0.0 for row in rows])
    rate = next(name for name in reversed(SPEEDS) if name == "samples/s" or any(SPEEDS[name](row) for row in rows))
    lines = []
    for row in rows:
        low, high = (_number(end, 1) for end in row.spread_ms or (None, None))
        line = {TITLES.get(name, name): row.field(name) for name in fields} | {
            "time (ms)": marked(_number(row.median_ms, 1), row.time_doubt),
            "p10–p90 (ms)": f"{low}–{high}" if row.spread_ms else MISSING,
            rate: marked(format_throughput(SPEEDS[rate](row)), row.time_doubt),
            "time (×)": marked(_number(row.time_ratio, 2), row.ratio_doubt),
            f"peak ({name})": _number(row.peak_bytes, 2, unit),
            "peak (×)": _number(row.memory_ratio, 2),
        }
        lines.append(line if all(row.result.ok for row in rows) else {**line, "status": row.result.status})
    notes = [*peak_notes(row.peak_source for row in rows), explain(row.ratio_doubt for row in rows), _measured_on(rows)]
    caption = "Time of a training step (median, with 10th and 90th percentile) and peak memory."
    caption = " ".join([caption, "×: multiple of standard, non-private training.", *filter(None, notes)])
    return _table(lines, caption, "tab:dpscope-cost")


def _component_table(rows: Sequence[Row], number: int) -> str:
    found = [(row.method, composition) for row in rows if (composition := composition_of(row))]
    unit, name = _unit([composition.total for _, composition in found])
    present = in_order(key for _, each in found for key, count in each.components.items() if count)
    columns = ["component", *distinct([method for method, _ in found])]  # one may have been measured twice
    lines = [
        (_component(key), *(_number(each.components.get(key) or None, 2, unit) for _, each in found)) for key in present
    ]
    lines.append(("total", *(_number(each.total, 2, unit) for _, each in found)))
    private = f"{STAR} held by private training only. " if any(map(is_private_only, present)) else ""
    caption = f"Memory at the peak of a training step by component, in {name}, by the memory instrument. {private}"
    caption += f"{rows[0].size}; {_measured_on(rows)}"
    return _table([dict(zip(columns, line, strict=True)) for line in lines], caption, f"tab:dpscope-memory-{number}")


def _component(key: str) -> str:
    return label_of(key) + (STAR if is_private_only(key) else "")


def _table(lines: Sequence[dict[str, Any]], caption: str, label: str) -> str:
    """Lines of text and numbers, the first column to the left."""
    import pandas

    escaped = [
        {escape(name): escape(MISSING if value is None else value) for name, value in line.items()} for line in lines
    ]
    style = pandas.DataFrame(escaped).style.hide(axis="index")
    columns, caption = f"l{'r' * (len(lines[0]) - 1)}", escape(caption)
    to_latex = partial(style.to_latex, hrules=True, position="t", position_float="centering")
    return str(to_latex(column_format=columns, caption=caption, label=label))


def _measured_on(rows: Sequence[Row]) -> str:
    """The model and the machine, as a caption has to name them."""
    models = dict.fromkeys(row.field("model") for row in rows)
    settings = dict.fromkeys(step_in_words(row.spec) for row in rows)
    machines = dict.fromkeys(_machine(row.first.environment) for row in rows if row.first.environment)
    named = [f"Model {', '.join(models)}", "; ".join(settings), "; ".join(machines)]
    return "; ".join(filter(None, named)) + "."


def _machine(environment: dict[str, Any]) -> str:
    software = ", ".join(f"{name} {environment[name]}" for name in ("torch", "opacus") if environment.get(name))
    return ", ".join(filter(None, (environment.get("gpu") or environment.get("cpu"), software)))


def _unit(counts: Sequence[float]) -> tuple[int, str]:
    return (GIB, "GiB") if max(counts, default=0.0) >= GIB else (MIB, "MiB")


def _number(value: float | None, decimals: int, unit: int = 1) -> str:
    return MISSING if value is None else f"{value / unit:.{decimals}f}".replace("-", "−")


def _render(report: Report) -> str:
    return to_latex(report.rows)


LATEX = text_output("results.tex", "tables for a paper, with booktabs", _render, asked_for="latex")
