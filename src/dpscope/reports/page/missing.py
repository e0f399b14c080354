"""What the page cannot show, and why: rows that failed, files that were left out, instruments that did not look."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpscope.reports.settings import Size, all_sizes
from dpscope.reports.tables import Row
from dpscope.results.store import Skipped

# Instrument -> what it would have shown. Each is a subcommand's name but `time`, which `compare` takes.
SHOWS = {
    "time": "The time of a step",
    "memory": "Memory by component and over the step",
    "trace": "Operators, kernels and modules",
    "ncu": "DRAM bytes and the roofline",
    "nsys": "The timeline of kernels and idle gaps",
}
OPTIONS = (
    "dtype",
    "optimizer",
    "learning_rate",
    "noise_multiplier",
    "max_grad_norm",
    "warmup",
    "steps",
    "seed",
    "device",
)

# Kind of a built-in model -> what of it has a flag.
SIZED = {
    "transformer": ("vocab_size", "hidden_dim", "num_layers", "num_heads", "max_seq_len", "attention"),
    "cnn": ("image_size", "num_classes", "norm"),
    "resnet": ("width", "image_size", "num_classes", "norm"),
}


@dataclass(frozen=True)
class Gap:
    """An instrument that did not look, and the command that would make it."""

    what: str
    where: str  # "" for nowhere on the page
    command: str


@dataclass(frozen=True)
class Missing:
    failed: list[tuple[str, str, str, str]]  # method, size, status, reason
    skipped: list[tuple[str, str]]  # file, reason
    gaps: list[Gap]


def find_missing(rows: Sequence[Row], skipped: Sequence[Skipped]) -> Missing:
    sizes = all_sizes(rows)
    failed = [
        (row.method, size.label, result.status, result.reason or "no reason given")
        for size in sizes
        for row in size.rows
        for result in row.measured.values()
        if not result.ok
    ]
    return Missing(
        failed=list(dict.fromkeys(failed)),
        skipped=[(item.path.name, item.reason) for item in skipped],
        gaps=[gap for instrument in SHOWS if (gap := _gap(instrument, sizes))],
    )


def _gap(instrument: str, sizes: Sequence[Size]) -> Gap | None:
    """Sizes that no row was looked at with the instrument, though it was measured with another."""
    lacking = [size for size in sizes if not any(instrument in row.measured for row in size.rows)]
    if not lacking:
        return None
    where = "" if len(lacking) == len(sizes) else _some([size.label for size in lacking])
    return Gap(SHOWS[instrument], where, _command(instrument, lacking))


def _some(words: Sequence[str], most: int = 4) -> str:
    rest = f"; and {len(words) - most} more" if len(words) > most else ""
    return "; ".join(words[:most]) + rest


def _command(instrument: str, sizes: Sequence[Size]) -> str:
    """For the first setting of those: its rows with this instrument, into the folder that has the others."""
    same = [size for size in sizes if size.setting == sizes[0].setting]
    specs = [row.looked_at for size in same for row in size.rows]
    subcommand = ["compare", "--instruments", "time"] if instrument == "time" else [instrument]
    lists = {
        "--methods": dict.fromkeys(spec["method"] for spec in specs),
        "--batch-size": dict.fromkeys(spec["batch_size"] for spec in specs),
        "--seq-len": dict.fromkeys(spec["seq_len"] for spec in specs if spec.get("seq_len")),
    }
    words = [*subcommand, *_workload(specs[0]["workload"])]
    words += [word for flag, values in lists.items() if values for word in (flag, ",".join(map(str, values)))]
    settings = {name: specs[0][name] for name in OPTIONS if name in specs[0]}
    words += [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", _plain(value))]
    return " ".join(["dpscope", *map(shlex.quote, words), "--out DIR --resume"])


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _workload(workload: dict[str, Any]) -> list[str]:
    """The flags that name a workload, as far as a result knows them."""
    kind, name = workload.get("kind"), str(workload["name"]).partition("+lora")[0]
    if kind == "custom":
        return ["--workload", f"{workload.get('file')}:{workload.get('function')}"]
    words = ["--model", name] if kind in SIZED or name.startswith("hf:") else ["--hf-config", "FILE"]
    sizes = {key: workload[key] for key in SIZED.get(str(kind), ()) if workload.get(key) is not None}
    words += [word for key, value in sizes.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    if lora := workload.get("lora"):
        words += ["--lora", f"r={lora['r']},alpha={lora['alpha']},target={','.join(lora['target'])}"]
    return words
