"""Sections of the page: the ten-second answer at each size, links to files beside it, what was trained and on what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from dpscope.reports.doubt import EXPLAINED, marked
from dpscope.reports.palette import looks_of
from dpscope.reports.report import Report, Setting, Size
from dpscope.reports.story import Story
from dpscope.reports.tables import SIZES, Row
from dpscope.reports.traffic.data import traffic_of
from dpscope.results.environments import Facts, days_of, differing_facts, facts_of, merge_facts
from dpscope.results.schema import Result
from dpscope.units import MISSING, format_bytes, format_ms, format_ratio, format_throughput, format_traffic
from dpscope.vocabulary.settings import SETTINGS
from dpscope.vocabulary.statuses import status_named
from dpscope.workloads.configs.described import workload_sizes

VERSIONS = ("torch", "Opacus", "dpscope")


def make_cards(size: Size, story: Story) -> list[dict[str, Any]]:
    """Return the card of a method: the winner has a badge; a method without figures says how it ended."""
    return [
        {
            **{"row": row, "colour": looks_of(size.rows)[row.method]["colour"], "figures": _figures(row)},
            "badge": story.badge if row.method == story.winner else "",
            "outcome": "" if row.result.ok else status_named(row.result.status).outcome,
        }
        for row in size.rows
    ]


def first_size(sizes: Sequence[Size]) -> int:
    """Return the size shown first: the one with the most figures, the largest of those."""
    return max(range(len(sizes)), key=lambda place: (*_known(sizes[place].rows), -place), default=0)


def _known(rows: Sequence[Row]) -> tuple[int, int, int]:
    instruments = {result.instrument for row in rows for result in row.ended_well}
    figures = sum((row.median_ms is not None) + (row.peak_bytes is not None) for row in rows)
    return len(instruments), figures, rows[0].work


def _figures(row: Row) -> list[dict[str, str]]:
    """Return ratios to ordinary training with the absolute figures below, and what makes one doubtful."""
    # `12.3 ms, 650 samples/s`; tokens where there is a sequence
    rates = [f"{format_throughput(speed)} {name}" for name, speed in row.speeds.items()]
    took = ", ".join(marked(text, row.time_doubt) for text in (format_ms(row.median_ms), *rates[-1:]))
    figures = [
        ("time", format_ratio(row.time_ratio), took, EXPLAINED.get(row.ratio_doubt, "")),
        ("memory", format_ratio(row.memory_ratio), format_bytes(row.peak_bytes), ""),
    ]
    if traffic := traffic_of(row):
        ratio, count = format_ratio(traffic.ratio), format_traffic(traffic.dram_bytes)
        figures.append(("DRAM bytes", traffic.show(ratio), traffic.show(count), ""))
    named = [dict(zip(("name", "ratio", "absolute", "doubt"), figure, strict=True)) for figure in figures]
    return [figure for figure in named if figure["absolute"] != MISSING]


def files_beside(report: Report) -> list[tuple[str, str, str, str]]:
    """Return row, instrument, name and link of files that exist now; none without a known folder."""
    found = [
        (f"{row.method}, {size.label}", instrument, PurePosixPath(path).name, quote(path))
        for size in report.sizes
        for row in size.rows
        for instrument, result in row.measured.items()
        for path in result.files.values()
        if _is_below(path, report.folder)
    ]
    return list(dict.fromkeys(found))


def _is_below(path: object, folder: Path | None) -> bool:
    """Return whether a path is a file inside the folder: results may come from anyone and name any path."""
    if folder is None or not isinstance(path, str) or "\0" in path:
        return False
    pure = PurePosixPath(path)
    return not pure.is_absolute() and ".." not in pure.parts and (folder / pure).is_file()


def describe_configuration(settings: Sequence[Setting], results: Sequence[Result]) -> dict[str, Any]:
    """Describe the configuration; `differing`: a warning about unlike environments; `summary`: all in a line."""
    shown = merge_facts([facts_of(result.environment) for result in results if result.environment])
    if measured := days_of(results):
        shown = [{**facts, "measured on": f"{measured} (UTC)"} for facts in shown] or [{"measured on": measured}]
    facts = [(setting.label, _setting(setting)) for setting in settings]
    told = {"differing": _warning(shown), "summary": _in_a_line(settings, shown)}
    return {"settings": facts, "environments": shown, **told}


def _in_a_line(settings: Sequence[Setting], environments: Sequence[Facts]) -> str:
    """Return `1b in bf16 on NVIDIA H200 (140 GiB); torch 2.11.0, Opacus 1.6.0, dpscope 0.1.0`."""
    specs = [setting.rows[0].spec for setting in settings]
    models = dict.fromkeys(f"{spec['workload']['name']} in {spec['dtype']}" for spec in specs)
    machines = dict.fromkeys(facts.get("GPU") or facts.get("CPU") or "an unknown machine" for facts in environments)
    versions = dict.fromkeys(f"{name} {facts[name]}" for name in VERSIONS for facts in environments if name in facts)
    where = [f"on {' and '.join(machines)}"] if machines else []
    return "; ".join(filter(None, (" ".join([", ".join(models), *where]), ", ".join(versions))))


def _setting(setting: Setting) -> Facts:
    spec = setting.rows[0].spec
    batches, lengths = (dict.fromkeys(row.spec.get(name) for row in setting.rows) for name in SIZES)
    repeats = [row.looked_at for row in setting.rows]
    steps = dict.fromkeys(f"{each['steps']} timed after {each['warmup']} of warm-up" for each in repeats)
    facts = {
        "Model": str(spec["workload"]["name"]),
        "Its size": ", ".join(workload_sizes(spec["workload"])),
        "Batch sizes": ", ".join(map(str, batches)),
        "Sequence lengths": ", ".join(str(length) for length in lengths if length),
        **{each.heading: each.cell(spec) for each in SETTINGS.values() if each.heading and each.name in spec},
        "Steps": ", ".join(steps),
    }
    if "learning_rate" in spec:
        facts[SETTINGS["optimizer"].heading] += f", learning rate {spec['learning_rate']:g}"
    return {name: text for name, text in facts.items() if text}


def _warning(environments: Sequence[Facts]) -> str:
    differing = ", ".join(f"{name} ({' / '.join(found)})" for name, found in differing_facts(environments).items())
    return differing and (
        f"These results come from {len(environments)} environments, which differ in {differing}: a ratio between rows "
        "of different environments is not the cost of privacy alone."
    )
