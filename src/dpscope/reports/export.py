"""Rows as data, for pandas and CSV, and as LaTeX tables: one record for each method at each size.

Units are in the columns' names. LaTeX is booktabs with captions that name the hardware, and text is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dpscope.reports.looks import distinct, peak_notes, spread_in_words
from dpscope.reports.memory.text import composition_of, described_of, present, timeline_of
from dpscope.reports.output import Output, csv_output, text_output
from dpscope.reports.report import Report
from dpscope.reports.story import compilation_notes
from dpscope.reports.tables import SIZES, SPEEDS, Row, explain, group_by_size, marked, worth_a_column
from dpscope.reports.text import rank_records
from dpscope.reports.trace.data import traced_steps
from dpscope.reports.traffic.data import Traffic, by_size
from dpscope.results.derived import Composition
from dpscope.results.identity import machine_of, step_in_words
from dpscope.results.payloads.ncu import BYTES, ESTIMATE, KERNEL_FIGURES, MEASURED, READ, WRITE
from dpscope.units import GIB, MIB, MISSING
from dpscope.vocabulary.components import KEYS, component_named, in_order
from dpscope.vocabulary.settings import COMPARED, EAGER, EAGERLY

if TYPE_CHECKING:
    import pandas


IDENTITY = ("model", "method", "batch_size", "seq_len", "dtype")  # the rest of a spec only where it varies
NOT_SETTINGS = (*IDENTITY, "workload", "instrument", "options", "name", "kind")
SOFTWARE = ("torch", "opacus", "dpscope")
COMPILATION = ("seconds", "graphs", "graph_breaks", "recompiles")


def line_identity(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return the fields that every line of a table of these rows begins with."""
    told = [name for name, eager in EAGERLY.items() if any(row.field(name) != eager for row in rows)]
    return (*IDENTITY, *told)


def to_records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return all known figures of each row; None for what was not measured."""
    names = dict.fromkeys(name for row in rows for name in (*row.spec, *row.spec["workload"]))
    settings = [name for name in names if name not in NOT_SETTINGS and len({repr(row.field(name)) for row in rows}) > 1]
    compositions = [composition for row in rows if (composition := composition_of(row))]
    components = in_order([*(KEYS if compositions else ()), *(key for each in compositions for key in each.components)])
    captured, compiled = any(not row.is_eager for row in rows), any(row.field("compile") != EAGER for row in rows)
    return [
        {
            **row.fields(*IDENTITY, *settings),
            **_cost(row),
            **({"time_ratio_to_eager": row.eager_time_ratio} if captured else {}),
            **({"memory_ratio_to_eager": row.eager_memory_ratio} if captured else {}),
            **({f"compile_{name}": dict(row.compilation or {}).get(name) for name in COMPILATION} if compiled else {}),
            **by_rank,
            **(_memory(row, components) if components else {}),
            **({"notes": " ".join(row.notes) or None} if any(each.notes for each in rows) else {}),
            "hardware": row.machine,
            **{name: row.first.environment.get(name) for name in SOFTWARE},
        }
        for row, by_rank in zip(rows, rank_records(rows), strict=True)
    ]


def to_pandas(rows: Sequence[Row]) -> pandas.DataFrame:
    return frame_of(to_records(rows))


def frame_of(records: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    import pandas

    return pandas.DataFrame(list(records)).convert_dtypes()


def frame_to_csv(frame: pandas.DataFrame) -> str:
    return str(frame.to_csv(index=False)) if len(frame) else ""


def _cost(row: Row) -> dict[str, Any]:
    low, high = row.spread_ms or (None, None)
    return {
        "status": row.result.status,
        "reason": row.result.reason,
        "time_median_ms": row.median_ms,
        "time_p10_ms": low,
        "time_p90_ms": high,
        "time_steps": row.steps,
        "time_doubt": row.time_doubt or None,
        "samples_per_second": row.speeds.get("samples/s"),
        "tokens_per_second": row.speeds.get("tokens/s"),
        "time_ratio": row.time_ratio,
        "time_ratio_doubt": row.ratio_doubt or None,
        "time_steady": None if row.median_ms is None else not row.ratio_doubt,
        "peak_memory_bytes": None if row.peak_bytes is None else round(row.peak_bytes),
        "peak_memory_source": row.peak_source or None,
        "memory_ratio": row.memory_ratio,
    }


def _memory(row: Row, components: Sequence[str]) -> dict[str, Any]:
    found = composition_of(row)
    known = found or Composition({})
    counts = {f"{key}_bytes": round(known.components.get(key, 0.0)) if found else None for key in components}
    return {**counts, "peak_phase": known.phase, "peak_operator": known.operator, "peak_module": known.module}


def _points(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield a record for each event of each timeline, with the phase it fell in."""
    identity = line_identity(rows)
    for row in rows:
        if timeline := timeline_of(row):
            for place, event in enumerate(timeline.events):
                levels = {f"{key}_bytes": round(level[place]) for key, level in timeline.levels.items()}
                yield {**row.fields(*identity), "event": event, "phase": timeline.phase_at(event), **levels}


def _csv_output(name: str, holds: str, to_lines: Callable[[Sequence[Row]], Iterable[dict[str, Any]]]) -> Output[Report]:
    return text_output(name, holds, lambda report: frame_to_csv(frame_of(to_lines(report.rows))), asked_for="csv")


CSV = (
    _csv_output("results.csv", "a line for each method and size", to_records),
    _csv_output("timeline.csv", "live bytes by component after each event", _points),
)


def _traffics(rows: Sequence[Row]) -> list[tuple[dict[str, Any], Traffic]]:
    """Return the traffic of rows, each with what its lines begin with."""
    names, found = (*line_identity(rows), "optimizer"), [traffic for group in by_size(rows) for traffic in group]
    return [({**traffic.row.fields(*names), "source": traffic.source}, traffic) for traffic in found]


def _figures(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        {
            **identity,
            "gpu": t.row.first.environment.get("gpu"),
            **{name: t.figure(name) for name in BYTES},
            "dram_bytes": t.dram_bytes,
            "dram_bytes_ratio_to_standard": t.ratio,
            "dram_bytes_per_item": t.bytes_per_item,
            "item": t.items[1],
            "flops": t.flops,
            "flops_source": None if t.flops is None else ESTIMATE if t.flops_estimated else MEASURED,
            "arithmetic_intensity_flops_per_byte": t.intensity,
            "median_step_ms": t.row.median_ms,
            "time_doubt": t.row.time_doubt or None,
            "dram_bytes_per_second": t.bandwidth,
            "flops_per_second": t.flop_rate,
            "fraction_of_measured_dram_ceiling": t.bandwidth_fraction,
            "ceiling_dram_bytes_per_second": t.ceilings.get("dram_bytes_per_second"),
            "ceiling_tensor_flops_per_second": t.ceilings.get("tensor_flops_per_second"),
            "ceiling_fp32_flops_per_second": t.ceilings.get("fp32_flops_per_second"),
            "estimated_dram_read_bytes": t.estimate.get(READ),
            "estimated_dram_write_bytes": t.estimate.get(WRITE),
            "estimate_error_dram_read_fraction": t.estimate_error(READ),
            "estimate_error_dram_write_fraction": t.estimate_error(WRITE),
            "ncu_version": t.data.get("ncu_version"),
            "reason": t.data.get("reason"),
        }
        for identity, t in _traffics(rows)
    ]


def _kernels(rows: Sequence[Row]) -> list[dict[str, Any]]:
    names = ("family", "phase", *KERNEL_FIGURES)
    return [
        {**identity, "kernels_source": t.kernels.source, "kernel": kernel["name"]}
        | {name: kernel.get(name) for name in names}
        for identity, t in _traffics(rows)
        if t.kernels
        for kernel in t.kernels.rows
    ]


TRAFFIC_CSV = (
    csv_output("traffic.csv", "bytes, operations and rates of each row", _figures, instrument="ncu"),
    csv_output("traffic_kernels.csv", "bytes of each kernel", _kernels, instrument="ncu"),
)


def _lines(part: str, rows: Sequence[Row]) -> list[dict[str, Any]]:
    identity = line_identity(rows)
    traces: list[tuple[Row, dict[str, Any]]] = [(step.row, {**step.trace}) for step in traced_steps(rows)]
    return [
        row.fields(*identity) | {key: round(v, 6) if isinstance(v, float) else v for key, v in line.items()}
        for row, trace in traces
        for line in trace.get(part, [])
    ]


TRACE_CSV = tuple(
    csv_output(f"trace_{part}.csv", f"all {part} of a step", partial(_lines, part), instrument="trace")
    for part in ("operators", "kernels")
)


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
