"""Rows as tables for a paper: booktabs, captions that name the hardware, nothing that LaTeX would stumble over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpscope.reports.doubt import explain, marked
from dpscope.reports.memory.data import composition_of, in_order, is_private_only, label_of
from dpscope.reports.output import text_output
from dpscope.reports.report import Report
from dpscope.reports.tables import RATES, Row, group_by_size, worth_a_column
from dpscope.reports.words import peak_notes, size_in_words, step_in_words
from dpscope.units import GIB, MIB, format_throughput
from dpscope.vocabulary.settings import COMPARED, LATER_DEFAULTS

HEAD = "% Made by dpscope. Needs \\usepackage{booktabs}; then \\input this file.\n"
NONE = "---"
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
    models = ["workload"] if len({row.first.spec["workload"]["name"] for row in rows}) > 1 else []
    sizes = [name for name in ("batch_size", "seq_len") if any(row.first.spec.get(name) for row in rows)]
    settings = [*models, *worth_a_column(rows, (*COMPARED, "steps", "device"))]
    unit, name = _unit([row.peak_bytes or 0.0 for row in rows])
    rate = next(name for name in reversed(RATES) if name == "samples/s" or any(RATES[name](row) for row in rows))
    titles = {"workload": "model", "batch_size": "batch", "seq_len": "sequence"}
    lines = []
    for row in rows:
        spec = {**LATER_DEFAULTS, **row.first.spec, "workload": row.first.spec["workload"]["name"]}
        line = {"method": escape(row.method)}
        line |= {escape(titles.get(key, key)): _text(spec.get(key)) for key in (*settings, *sizes)}
        low, high = row.spread_ms or (None, None)
        line |= {
            "time (ms)": _doubted(_number(row.median_ms, 1), row.time_doubt),
            "p10--p90 (ms)": NONE if low is None else f"{_number(low, 1)}--{_number(high, 1)}",
            rate: _doubted(escape(format_throughput(RATES[rate](row))), row.time_doubt),
            r"time ($\times$)": _doubted(_number(row.time_ratio, 2), row.ratio_doubt),
            f"peak ({name})": _number(None if row.peak_bytes is None else row.peak_bytes / unit, 2),
            r"peak ($\times$)": _number(row.memory_ratio, 2),
        }
        line |= {} if all(row.result.ok for row in rows) else {"status": escape(row.result.status)}
        lines.append(line)
    caption = "Time of a training step (median, with 10th and 90th percentile) and peak memory. " + (
        r"$\times$: multiple of standard, non-private training. "
    )
    notes = [*peak_notes(row.peak_source for row in rows), explain(row.ratio_doubt for row in rows)]
    caption += "".join(f"{escape(note)} " for note in notes if note)
    return _table(lines, caption + _measured_on(rows), "tab:dpscope-cost", text_columns=1)


def _doubted(text: str, doubt: str) -> str:
    return NONE if text == NONE else marked(text, doubt)


def _component_table(rows: Sequence[Row], number: int) -> str:
    found = [(row, composition) for row in rows if (composition := composition_of(row))]
    unit, name = _unit([composition.total for _, composition in found])
    present = in_order(key for _, each in found for key, count in each.components.items() if count)
    marks = {key: r"$^\ast$" if is_private_only(key) else "" for key in present}
    lines: list[dict[str, str]] = []
    columns = _distinct([escape(row.method) for row, _ in found])
    for key in present:
        counts = [each.components.get(key, 0.0) for _, each in found]
        cells = [_number(count / unit, 2) if count else NONE for count in counts]
        lines.append({"component": escape(label_of(key)) + marks[key], **dict(zip(columns, cells, strict=True))})
    totals = [_number(each.total / unit, 2) for _, each in found]
    lines.append({"component": "total", **dict(zip(columns, totals, strict=True))})
    private = r"$^\ast$ held by private training only. " if any(marks.values()) else ""
    caption = f"Memory at the peak of a training step by component, in {name}, by the memory instrument. {private}"
    where = escape(size_in_words(rows[0].first.spec)) + "; "
    return _table(lines, caption + where + _measured_on(rows), f"tab:dpscope-memory-{number}", text_columns=1)


def _distinct(names: Sequence[str]) -> list[str]:
    """Columns need names of their own, even where a method was measured twice."""
    return [name if name not in names[:n] else f"{name} ({names[:n].count(name) + 1})" for n, name in enumerate(names)]


def _table(lines: Sequence[dict[str, str]], caption: str, label: str, *, text_columns: int) -> str:
    import pandas

    columns = len(lines[0])
    return str(
        pandas.DataFrame(lines)
        .style.hide(axis="index")
        .to_latex(
            hrules=True,
            caption=caption,
            label=label,
            position="t",
            position_float="centering",
            column_format="l" * text_columns + "r" * (columns - text_columns),
        )
    )


def _measured_on(rows: Sequence[Row]) -> str:
    """The model and the machine, as a caption has to name them."""
    models = dict.fromkeys(row.first.spec["workload"]["name"] for row in rows)
    settings = dict.fromkeys(step_in_words(row.first.spec) for row in rows)
    machines = dict.fromkeys(_machine(row.first.environment) for row in rows if row.first.environment)
    named = [f"Model {', '.join(models)}", "; ".join(settings), "; ".join(machines)]
    return escape("; ".join(part for part in named if part)) + "."


def _machine(environment: dict[str, Any]) -> str:
    software = ", ".join(f"{name} {environment[name]}" for name in ("torch", "opacus") if environment.get(name))
    return ", ".join(part for part in (environment.get("gpu") or environment.get("cpu"), software) if part)


def _unit(counts: Sequence[float]) -> tuple[int, str]:
    return (GIB, "GiB") if max(counts, default=0.0) >= GIB else (MIB, "MiB")


def _text(value: Any) -> str:
    return NONE if value is None else escape(value)


def _number(value: float | None, decimals: int) -> str:
    return NONE if value is None else f"{value:.{decimals}f}".replace("-", "$-$")


def _results_tex(report: Report) -> str:
    return to_latex(report.rows)


LATEX = text_output("results.tex", "tables for a paper, with booktabs", _results_tex, asked_for="latex")
