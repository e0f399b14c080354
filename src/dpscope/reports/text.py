"""The table and the sentences a person reads, on a terminal and in summary.txt alike."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from dpscope.reports.memory_text import memory_section, snapshot_section
from dpscope.reports.nsys_text import nsys_section
from dpscope.reports.story import tell
from dpscope.reports.tables import STANDARD, STEADY, Row, compare_results, group_by_size, varying_columns
from dpscope.reports.trace_text import trace_section
from dpscope.reports.traffic_text import traffic_section
from dpscope.reports.words import shorten, size_in_words
from dpscope.results.schema import FAILED, Result
from dpscope.results.store import Skipped
from dpscope.units import GIB, MISSING, format_bytes, format_ms, format_ratio

TITLE = "What privacy costs"
SUMMARY_WIDTH = 110
NARROW = 86  # columns
LONGEST_NAME = 24  # characters of a method in the table

MEMORY_NOTES = {
    "cuda_allocator": "Peak memory: the CUDA allocator's peak of allocated bytes over the whole run.",
    "tracker": "Peak memory: of one step after warm-up; its parts from one more step whose every storage was tracked.",
    "cpu_allocator": (
        "Peak memory: live tensors at their peak during one step, from torch's CPU allocator (a step after the "
        "timed ones)."
    ),
}


def summary(
    results: Sequence[Result], skipped: Sequence[Skipped] = (), *, width: int = SUMMARY_WIDTH, detailed: bool = False
) -> RenderableType:
    """Everything there is to say about a set of results; `detailed` for readers who have the time."""
    rows = compare_results(results)
    parts: list[RenderableType] = [Text(line, style="bold") for line in _headline(results)]
    for section in (*SECTIONS, *(DETAILS if detailed else ())):
        if lines := section(rows, width):
            parts += ["", *lines]
    parts += [Text(line) for line in _troubles(rows)]
    parts += [Text(f"Left out: {item.path.name}: {item.reason}", style="yellow") for item in skipped]
    return Group(*parts)


def _cost(rows: Sequence[Row], width: int) -> list[RenderableType]:
    """Time and peak memory of every row, and what the figures say."""
    if not any(row.timing or row.memory or not row.result.ok for row in rows):
        return []
    parts: list[RenderableType] = [_table(rows, narrow=width < NARROW)]
    if sentences := verdict(rows):
        parts += ["", *(Text(sentence) for sentence in sentences)]
    return [*parts, "", *(Text(note, style="dim") for note in notes(rows))]


# What a summary is made of, in this order. A section without anything to say is empty.
Section = Callable[[Sequence[Row], int], list[RenderableType]]
SECTIONS: tuple[Section, ...] = (_cost, memory_section, trace_section, nsys_section, traffic_section)
DETAILS: tuple[Section, ...] = (snapshot_section,)  # for the file, where there is room


def render_plain(renderable: RenderableType, width: int = SUMMARY_WIDTH) -> str:
    """The same without colours or terminal control, for files and pipes."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def _headline(results: Sequence[Result]) -> list[str]:
    lines = [f"{TITLE}: each method next to ordinary training (standard) of the same model"]
    lines += list(dict.fromkeys(_describe(result.spec) for result in results))
    environments = [r.environment for r in results if r.environment]
    lines += list(dict.fromkeys(_describe_environment(environment) for environment in environments))
    return lines


def _describe(spec: dict[str, Any]) -> str:
    workload = spec["workload"]
    sizes = ", ".join(workload_sizes(workload))
    return (
        f"Model {workload['name']} ({sizes}); {spec['dtype']}, {spec['optimizer']}, "
        f"noise multiplier {spec['noise_multiplier']:g}, max grad norm {spec['max_grad_norm']:g}; "
        f"{spec['warmup']} warm-up and {spec['steps']} timed steps"
    )


def workload_sizes(workload: dict[str, Any]) -> Iterator[str]:
    """What describes a workload, and the numbers of what is nested in it (a model's own configuration)."""
    for name, value in workload.items():
        if name == "lora":
            yield f"LoRA r {value['r']}, alpha {value['alpha']} on {' '.join(value['target'])}"
        elif isinstance(value, dict):
            yield from (f"{key.replace('_', ' ')} {size}" for key, size in value.items() if _is_number(size))
        elif value is not None and name not in ("kind", "name", "sha256"):
            yield f"{name.replace('_', ' ')} {value}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _describe_environment(environment: dict[str, Any]) -> str:
    if environment.get("gpu"):
        memory = environment.get("gpu_memory_bytes", 0) / GIB
        where = f"{environment['gpu']} ({memory:.0f} GiB), CUDA {environment.get('cuda')}"
    else:
        where = f"{environment.get('cpu')}, {environment.get('threads')} threads"
    return f"On {where}; " + ", ".join(f"{name} {environment.get(name)}" for name in ("torch", "opacus", "dpscope"))


def _table(rows: Sequence[Row], *, narrow: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    extra = [name for name in varying_columns(rows, ("dtype", "optimizer")) if name]
    several_models = len({row.result.spec["workload"]["name"] for row in rows}) > 1
    sequences = any(row.result.spec["seq_len"] is not None for row in rows)
    if several_models:
        table.add_column("model")
    table.add_column("method", no_wrap=True)
    # What tells rows apart keeps its place on the narrowest terminal; the spread is the first to go.
    table.add_column("batch", justify="right", no_wrap=True, min_width=5)
    if sequences:
        table.add_column("seq", justify="right", no_wrap=True, min_width=3)
    for name in extra:
        table.add_column(name)
    spread = [] if narrow else ["p10–p90"]
    time, memory = ("time", "memory") if narrow else ("time/step", "peak memory")
    for heading in (time, *spread, "×", memory, "×"):
        table.add_column(heading, justify="right", no_wrap=True)
    statuses = not (narrow and all(row.result.ok for row in rows))
    if statuses:
        table.add_column("status", no_wrap=True, min_width=4)
    groups = group_by_size(rows)
    for group in groups:
        for row in group:
            spec = row.result.spec
            cells = [spec["workload"]["name"]] if several_models else []
            cells += [shorten(row.method, LONGEST_NAME), str(spec["batch_size"])]
            cells += [str(spec["seq_len"] or MISSING)] if sequences else []
            cells += [str(spec[name]) for name in extra]
            cells += [
                format_ms(row.median_ms),
                *([] if narrow else [_spread(row)]),
                format_ratio(row.time_ratio) + ("" if row.steady else "?"),
                format_bytes(row.peak_bytes),
                format_ratio(row.memory_ratio),
            ]
            status = Text(row.result.status, style="green" if row.result.ok else "bold red")
            table.add_row(*cells, *([status] if statuses else []), end_section=row is group[-1])
    return table


def _spread(row: Row) -> str:
    if row.spread_ms is None:
        return MISSING
    low, high = row.spread_ms
    return f"{low:.1f}–{high:.1f}"


def _troubles(rows: Sequence[Row]) -> list[str]:
    """One line for each row without figures: which, and what to do."""
    lines = []
    for row in rows:
        if not row.result.ok:
            size = size_in_words(row.result.spec)
            lines.append(f"{row.result.status}: {row.method} at {size}: {row.result.reason}")
    return ["", *lines, *_own_tracebacks(rows)] if lines else []


def _own_tracebacks(rows: Sequence[Row]) -> list[str]:
    """Where the user's own code failed, each place once."""
    results = (row.result for row in rows if row.result.spec["workload"].get("kind") == "custom")
    found = dict.fromkeys(result.details for result in results if result.status == FAILED and result.details)
    return [line for details in found for line in ("", details.rstrip())]


def verdict(rows: Sequence[Row]) -> list[str]:
    """What the figures say, a sentence for each size."""
    sentences = []
    for group in group_by_size(rows):
        costs = [
            f"{row.method} takes {format_ratio(row.time_ratio)} the time and "
            f"{format_ratio(row.memory_ratio)} the memory"
            for row in group
            if row.method != STANDARD and row.time_ratio is not None and row.steady
        ]
        where = size_in_words(group[0].result.spec).capitalize()
        if costs:
            sentences.append(f"{where}: {'; '.join(costs)}.")
        story = tell(group)
        if story.winner:
            sentences.append(f"{where}: of the private methods {story.winner} {story.praise}. {story.saves}".rstrip())
        shaky = [row.method for row in group if row.method != STANDARD and not row.steady]
        if shaky:
            sentences.append(
                f"{where}: no verdict on the time of {', '.join(shaky)}: step times varied too much. Close other "
                "programs, or raise --steps."
            )
    return sentences


def notes(rows: Sequence[Row]) -> list[str]:
    notes = ["× is the ratio to standard. Time: median over the timed steps, with 10th and 90th percentile."]
    if not all(row.steady for row in rows):
        notes.append(f"? marks a ratio of times that varied by more than {STEADY:g}× within a row: a busy machine.")
    if any(row.median_ms is not None and row.time_ratio is None for row in rows):
        notes.append(f"× is {MISSING} where standard has no figures at that size: measure it with --methods standard,…")
    sources = dict.fromkeys(row.memory.get("source") for row in rows)
    return notes + [MEMORY_NOTES[source] for source in sources if source in MEMORY_NOTES]


def files_written(paths: Sequence[Path]) -> str:
    return "\n".join(["Written:", *(f"  {path}" for path in paths)])
