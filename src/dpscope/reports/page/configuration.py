"""What was trained, and on what: the settings of the rows, and the machines they were measured on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpscope.reports.page.settings import Setting
from dpscope.reports.text import workload_sizes
from dpscope.results.schema import Result
from dpscope.units import GIB

# What is shown of an environment, and what two of them can differ in.
SHOWN = {
    "gpu": "GPU",
    "cpu": "CPU",
    "threads": "CPU threads",
    "cuda": "CUDA",
    "driver": "driver",
    "torch": "torch",
    "opacus": "Opacus",
    "triton": "Triton",
    "transformers": "transformers",
    "peft": "PEFT",
    "python": "Python",
    "dpscope": "dpscope",
    "git_commit": "its commit",
}
Facts = dict[str, str]


@dataclass(frozen=True)
class Configuration:
    settings: list[tuple[str, Facts]]
    environments: list[Facts]
    differing: str  # a warning, where results come from unlike environments
    measured: str  # when, if a result knows it


def describe_configuration(settings: Sequence[Setting], results: Sequence[Result]) -> Configuration:
    environments = [result.environment for result in results if result.environment]
    shown = list(dict.fromkeys(tuple(_environment(each).items()) for each in environments))
    return Configuration(
        settings=[(setting.label, _setting(setting)) for setting in settings],
        environments=[dict(facts) for facts in shown],
        differing=_warning(environments),
        measured=_dates(results),
    )


def _setting(setting: Setting) -> Facts:
    spec = setting.rows[0].first.spec
    batches = dict.fromkeys(row.first.spec["batch_size"] for row in setting.rows)
    lengths = dict.fromkeys(row.first.spec.get("seq_len") for row in setting.rows)
    rate = f", learning rate {spec['learning_rate']:g}" if "learning_rate" in spec else ""
    facts = {
        "Model": str(spec["workload"]["name"]),
        "Its size": ", ".join(workload_sizes(spec["workload"])),
        "Batch sizes": ", ".join(map(str, batches)),
        "Sequence lengths": ", ".join(str(length) for length in lengths if length),
        "Number format": str(spec["dtype"]),
        "Optimizer": f"{spec['optimizer']}{rate}",
        "Noise multiplier": f"{spec['noise_multiplier']:g}",
        "Clipping norm": f"{spec['max_grad_norm']:g}",
        "Steps": f"{spec['steps']} timed after {spec['warmup']} of warm-up",
    }
    return {name: text for name, text in facts.items() if text}


def _environment(environment: dict[str, Any]) -> Facts:
    facts = {name: str(environment[key]) for key, name in SHOWN.items() if environment.get(key) is not None}
    if memory := environment.get("gpu_memory_bytes"):
        facts["GPU"] = f"{facts.get('GPU', '')} ({memory / GIB:.0f} GiB)".strip()
    return facts


def _warning(environments: Sequence[dict[str, Any]]) -> str:
    values = {name: {str(each.get(key)) for each in environments} for key, name in SHOWN.items()}
    differing = [f"{name} ({' / '.join(sorted(found))})" for name, found in values.items() if len(found) > 1]
    if not differing:
        return ""
    return (
        f"These results do not all come from one environment. They differ in {', '.join(differing)}: a ratio "
        "between rows of different environments is not the cost of privacy alone."
    )


def _dates(results: Sequence[Result]) -> str:
    """The day or days, in UTC, as far as memory snapshots know the time."""
    stamps = [snapshot.get("timestamp") for result in results for snapshot in result.snapshots[:1]]
    days = sorted({time.strftime("%Y-%m-%d", time.gmtime(stamp)) for stamp in stamps if isinstance(stamp, int | float)})
    return " to ".join(dict.fromkeys((days[0], days[-1]))) if days else ""
