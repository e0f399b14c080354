"""The sections of a report as data: reads what `ncu --import REPORT --page details --csv` prints.

One row a metric (section, metric, unit, value), and the advice of ncu's rules. Values stay in the unit that ncu chose.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dpscope.instruments.ncu.reading import UnreadableReport

if TYPE_CHECKING:
    from pandas import DataFrame


# ncu's rules name sections by their identifiers; metrics, by their titles. What follows an underscore is a chart or a
# table of the same section.
SECTION_TITLES = {
    "SpeedOfLight": "GPU Speed Of Light Throughput",
    "ComputeWorkloadAnalysis": "Compute Workload Analysis",
    "MemoryWorkloadAnalysis": "Memory Workload Analysis",
    "SchedulerStats": "Scheduler Statistics",
    "WarpStateStats": "Warp State Statistics",
    "InstructionStats": "Instruction Statistics",
    "LaunchStats": "Launch Statistics",
    "WorkloadDistribution": "GPU and Memory Workload Distribution",
    "SourceCounters": "Source Counters",
}


class Metric(NamedTuple):
    section: str
    name: str
    unit: str
    value: str

    @property
    def number(self) -> float:
        """`1,135,307,776` as a number; NaN if it is none."""
        try:
            return float(self.value.replace(",", ""))
        except ValueError:
            return float("nan")


class Advice(NamedTuple):
    section: str
    rule: str
    text: str


@dataclass(frozen=True)
class KernelDetails:
    """One profiled launch: its name, shape, metrics by section, and the advice of ncu's rules."""

    kernel: str
    grid: str
    block: str
    metrics: list[Metric]
    advice: list[Advice]

    def number(self, name: str) -> float:
        """Return the value of a metric by the name that the Details page shows, in its own unit."""
        found = next((metric for metric in self.metrics if metric.name == name), None)
        if found is None:
            raise KeyError(f"no metric {name!r}; there are: {', '.join(metric.name for metric in self.metrics)}")
        return found.number

    def section(self, name: str) -> DataFrame:
        """Return the metrics of the sections whose name contains `name`."""
        import pandas as pd

        rows = [m for m in self.metrics if name.lower() in m.section.lower()]
        return pd.DataFrame({"metric": m.name, "value": m.value, "unit": m.unit} for m in rows)

    def advice_on(self, section: str) -> list[str]:
        return [each.text for each in self.advice if section.lower() in each.section.lower()]

    @property
    def sections(self) -> list[str]:
        return list(dict.fromkeys(metric.section for metric in self.metrics))


def read_details(path: Path | str) -> list[KernelDetails]:
    """Return every launch in a CSV file of ncu's Details page, in order. Lines before the header are skipped."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        raise UnreadableReport(
            f"{path} is no CSV of ncu's Details page: write it with `ncu --import REPORT.ncu-rep --page details --csv`"
        )
    launches: dict[str, KernelDetails] = {}
    for row in csv.DictReader(lines[first:]):
        section, rule = row.get("Section Name") or "", row.get("Rule Name")
        if not section and not rule:
            continue
        shape = row.get("Grid Size", ""), row.get("Block Size", "")
        launch = launches.setdefault(row["ID"], KernelDetails(row["Kernel Name"], *shape, [], []))
        if name := row.get("Metric Name"):
            launch.metrics.append(Metric(section, name, row.get("Metric Unit") or "", row["Metric Value"]))
        if rule:
            title = SECTION_TITLES.get(section.partition("_")[0], section)
            launch.advice.append(Advice(title, rule, row.get("Rule Description") or ""))
    return list(launches.values())
