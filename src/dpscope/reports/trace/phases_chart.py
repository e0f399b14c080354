"""Where the time of a step goes: phase by phase, a bar a method."""

from __future__ import annotations

from collections.abc import Sequence

from dpscope.reports.page.chart import Chart, Table, View
from dpscope.reports.palette import is_dark, phase_colour
from dpscope.reports.tables import STANDARD, Row
from dpscope.reports.trace.data import IDLE, on_gpu, phase_names, phase_times, stretched_in_words, traced
from dpscope.reports.words import size_in_words
from dpscope.units import format_ms

HOW = {
    True: (
        "GPU time of each phase, from a step under torch.profiler, which leaves kernels as long as they are; "
        f"'{IDLE}' is what the step takes beyond that without the profiler. It does not see what overlaps on "
        "several streams, nor what the host does meanwhile."
    ),
    False: (
        "Time on the host by phase, of a step under torch.profiler, which makes the step longer: compare parts, and "
        "take times of steps from the chart of times. It does not see inside a phase: the operators do."
    ),
}


def phases(rows: Sequence[Row]) -> Chart | None:
    groups = traced(rows)
    if not groups:
        return None
    return Chart(
        key="phases",
        title="Where the time of a step goes",
        nav_label="Phases",
        kind="phases",
        how=" ".join(HOW[gpu] for gpu in dict.fromkeys(map(on_gpu, groups))),
        views=[_view(group) for group in groups],
    )


def _view(rows: Sequence[Row]) -> View:
    gpu = on_gpu(rows)
    times = [(row.method, phase_times(row, gpu=gpu)) for row in rows]
    names = [name for name in (*phase_names(rows), IDLE) if any(own.get(name) for _, own in times)]
    parts = [
        {
            "phase": name,
            "colour": phase_colour(name),
            "dark": is_dark(phase_colour(name)),
            "ms": [own.get(name) for _, own in times],
        }
        for name in names
    ]
    what = "GPU milliseconds of an unprofiled step" if gpu else "milliseconds of a traced step"
    return View(
        size=size_in_words(rows[0].first.spec),
        # GPU time is as long as without the profiler; time on the host is not.
        says=("" if gpu else stretched_in_words(rows)) or _says(times),
        data={
            "methods": [method for method, _ in times],
            "axis": what,
            "parts": parts,
            "unprofiled_ms": [row.median_ms for row in rows],
        },
        table=Table(
            columns=("method", "phase", "gpu_ms" if gpu else "host_ms"),
            rows=[(method, name, own[name]) for method, own in times for name in names if name in own],
        ),
    )


def _says(times: Sequence[tuple[str, dict[str, float]]]) -> str:
    """What each method adds to ordinary training and where most of that is; without standard, its longest phase."""
    standard = dict(times).get(STANDARD)
    told = []
    for method, own in times:
        total = sum(own.values())
        if standard is None or method == STANDARD:
            longest = max(own, key=lambda name: own[name])
            told.append(f"{method} {format_ms(total)}, most of it in {longest} ({format_ms(own[longest])})")
            continue
        extra = {name: own.get(name, 0.0) - standard.get(name, 0.0) for name in {**own, **standard}}
        most = max(extra, key=lambda name: extra[name])
        more = total - sum(standard.values())
        change = f"{format_ms(abs(more))} {'more' if more > 0 else 'less'} than {STANDARD}"
        told.append(f"{method} {change}; what grows most is {most} ({extra[most]:+.1f} ms)")
    return f"A step: {'. '.join(told)}."
