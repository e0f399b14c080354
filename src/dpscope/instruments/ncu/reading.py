"""Reader of `.ncu-rep` files on any machine, with ncu's own importer or NVIDIA's `ncu-report` package.

Values are in base units (bytes, ns, sectors), whichever tool read them. Launches are added up by kernel and phase.
"""

from __future__ import annotations

import csv
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpscope.errors import UserError
from dpscope.instruments.families import FigureRow, kernel_family, short_kernel_name
from dpscope.instruments.ncu.metrics import GPU_TIME, TRAFFIC_FORMULAS, make_figures, make_flops
from dpscope.instruments.ncu.running import csv_command, find_ncu
from dpscope.packages import install_command
from dpscope.results.payloads.ncu import KERNEL_FIGURES, Kernels
from dpscope.vocabulary.phases import PHASES

IMPORT_SECONDS = 300.0
PHASE_RANGE = "dpscope.phase."  # how the phases of a step are called in NVTX; found again wherever ncu prints ranges
_PHASE = re.compile(re.escape(PHASE_RANGE) + f"({'|'.join(PHASES)})")


# What ncu says of the machine and of the launch in every row, 200 values of it: not what was counted.
_MACHINE_METRICS = ("device__", "launch__", "numa__", "nvlink__", "c2clink__")


class UnreadableReport(UserError):
    """A file that is no report, or one that was cut short, and why."""


@dataclass(frozen=True)
class Action:
    """Metrics of one range or one kernel: raw, by name, in base units."""

    name: str
    metrics: dict[str, float]
    phase: str | None = None


def read_report(path: Path, *, ncu: str | None = None) -> list[Action]:
    """Return every range or kernel of a report in order of launch. Raise `UnreadableReport` with a sentence."""
    if not path.is_file():
        raise UnreadableReport(f"{path} is not there: give a .ncu-rep file")
    ncu = ncu or find_ncu()
    actions = _read_with_ncu(ncu, path) if ncu else _read_with_package(path)
    if not actions:
        raise UnreadableReport(f"{path.name} holds no ranges and no kernels: it is no report of ncu, or an empty one")
    if not all(action.metrics for action in actions):
        raise UnreadableReport(f"{path.name} was cut short (a row without figures): run ncu again")
    return actions


def _read_with_ncu(ncu: str, path: Path) -> list[Action]:
    try:
        done = subprocess.run(
            csv_command(ncu, path), capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise UnreadableReport(f"ncu did not read {path.name} within {IMPORT_SECONDS:.0f} s") from None
    except OSError as error:
        raise UnreadableReport(f"ncu cannot be run ({error.strerror})") from None
    actions = parse_raw_csv(done.stdout)
    if not actions:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        last = said[-1].replace("==ERROR==", "").strip() if said else f"exit code {done.returncode}"
        raise UnreadableReport(f"ncu cannot read {path.name} ({last})")
    return actions


def parse_raw_csv(text: str) -> list[Action]:
    """Parse the output of `--csv --page raw --print-units base`, skipping lines before the header (`==PROF== …`)."""
    lines = iter(text.splitlines())
    header = next((line for line in lines if line.startswith('"ID"')), None)
    if header is None:
        return []
    names = next(csv.reader([header]))
    rows = csv.reader(lines)
    next(rows, None)  # units: base ones were asked for
    actions = []
    for row in (dict(zip(names, cells, strict=False)) for cells in rows if len(cells) > 1):
        numbers = {name: _number(cell) for name, cell in row.items() if _is_counted(name)}
        metrics = {name: number for name, number in numbers.items() if number is not None}
        actions.append(Action(row.get("Kernel Name", ""), metrics, find_phase(row.values())))
    return actions


def _is_counted(name: str) -> bool:
    return "__" in name and not name.startswith(_MACHINE_METRICS)


def _number(cell: str) -> float | None:
    """Parse `1,135,307,776`; None for what is no number (`n/a`, names, enumerations)."""
    try:
        return float(cell.replace(",", ""))
    except ValueError:
        return None


def find_phase(texts: Iterable[str]) -> str | None:
    """Return the phase among a row's NVTX ranges; the column's layout differs between versions."""
    return next((match.group(1) for text in texts if (match := _PHASE.search(text))), None)


def _read_with_package(path: Path) -> list[Action]:
    try:
        import ncu_report
    except ImportError:
        raise UnreadableReport(
            f"{path.name} can be read with `ncu` or the package ncu-report, and neither is here: "
            + install_command("ncu_report")
        ) from None
    try:
        context = ncu_report.load_report(str(path))
        ranges = [context.range_by_idx(index) for index in range(context.num_ranges())]
        return [_package_action(part.action_by_idx(i)) for part in ranges for i in range(part.num_actions())]
    except (RuntimeError, OSError, AttributeError) as error:
        raise UnreadableReport(f"{path.name} cannot be read ({error})") from None


def _package_action(action: Any) -> Action:
    values = {name: action.metric_by_name(name).value() for name in action.metric_names() if _is_counted(name)}
    metrics = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
    state = action.nvtx_state()
    domains = [] if state is None else [state.domain_by_id(domain) for domain in state.domains()]
    ranges = (str(each) for d in domains for each in (*d.start_end_ranges(), *d.push_pop_ranges()))
    return Action(str(action.name(action.NameBase_DEMANGLED)), metrics, find_phase(ranges))


# Caches are left as they are: what a kernel has written may leave L2 only while a later one runs.
CACHED = "DRAM writes count for the kernel during which they leave L2"
TENSOR_ONLY = "operations are those of the tensor cores"


def describe_kernels(actions: Sequence[Action], *, top: int, kernel: str = "") -> Kernels:
    """Return the kernels of a step as a result holds them; the number of launches is counted without ncu."""
    only = [f"only kernels matching {kernel!r} were counted"] if kernel else []
    no_phases = ["no NVTX ranges in the report: phases are unknown"] if not any(a.phase for a in actions) else []
    note = "; ".join([*only, *no_phases, CACHED, TENSOR_ONLY])
    return {"rows": keep_top(kernel_rows(actions), top), "calls_seen": len(actions), "calls_total": None, "note": note}


def kernel_rows(actions: Iterable[Action]) -> list[Any]:
    """Return a row for each kernel in each phase, those that move the most DRAM bytes first."""
    return _add_up(map(_row, actions))


def keep_top(rows: Sequence[Any], top: int) -> list[Any]:
    """Return the first `top` rows, and the rest added up by family and phase, so that sums stay whole."""
    return [*rows[:top], *_add_up({**row, "name": "others"} for row in rows[top:])]


def _row(action: Action) -> FigureRow:
    formulas = {name: TRAFFIC_FORMULAS[name] for name in KERNEL_FIGURES if name in TRAFFIC_FORMULAS}
    figures, _ = make_figures(action.metrics, formulas)
    name, family = short_kernel_name(action.name), kernel_family(action.name, action.phase)
    row: FigureRow = {"name": name, "family": family, "phase": action.phase, "calls": 1, **figures}
    if flops := make_flops(action.metrics):
        row["flops"] = flops.get("total", sum(flops.values()))
    if GPU_TIME in action.metrics:
        row["time_ns"] = round(action.metrics[GPU_TIME])
    return row


def _add_up(rows: Iterable[FigureRow]) -> list[FigureRow]:
    """Add up the rows of one name, family and phase. A figure that one of them lacks is left out of the sum."""
    groups: dict[tuple[Any, ...], list[FigureRow]] = {}
    for row in rows:
        groups.setdefault((row["name"], row["family"], row["phase"]), []).append(row)
    added = [
        {"name": name, "family": family, "phase": phase}
        | {figure: sum(row[figure] for row in same) for figure in KERNEL_FIGURES if all(figure in row for row in same)}
        for (name, family, phase), same in groups.items()
    ]
    return sorted(added, key=lambda row: row.get("dram_read_bytes", 0) + row.get("dram_write_bytes", 0), reverse=True)


def add_up_metrics(actions: Iterable[Action]) -> dict[str, float]:
    """Add up the raw counts of several ranges or kernels; rates and shares cannot be added and are left out."""
    total: dict[str, float] = defaultdict(float)
    for action in actions:
        for name, value in action.metrics.items():
            if name.endswith(".sum"):
                total[name] += value
    return dict(total)


def count_launches(step: Callable[[], object]) -> int | None:
    """Count the kernels (no copies, no fills) of one step without ncu; None if torch.profiler sees none."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        events = [event.name for event in profiler.events() or () if event.device_type.name == "CUDA"]
    except (RuntimeError, AttributeError):
        return None
    return sum(not name.startswith(("Memcpy", "Memset")) for name in events) or None
