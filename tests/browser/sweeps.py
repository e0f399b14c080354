"""Folders of results to make pages of: measured here, measured on an H200, multiplied, hostile, and damaged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dpscope.comparison import Comparison
from dpscope.reports.against.text import AGAINST_PAGE
from dpscope.reports.page.render import PAGE
from dpscope.results.schema import Result, result_for
from dpscope.results.store import ResultStore
from dpscope.vocabulary.statuses import FAILED, OOM
from tests import ROOT

METHODS = ("standard", "flat", "flash")
INSTRUMENTS = ("time", "memory", "trace", "ncu")
FULL, PART = (2, 16), (4, 16)  # batch, sequence: seen by every instrument, and only timed and weighed

H200 = ROOT / "benchmarks" / "results"
H200_TWICE = (H200 / "2026-11-15-h200-traffic", H200 / "2026-11-15-h200-flash-grid" / "bf16-1024")  # now, before

BATCHES = range(1, 68)  # 201 rows with the methods

FOLDER = "<img src=x onerror=planted=1>"
LONG = "a-name-without-an-end-" * 12
SCRIPT = "<script>window.planted = 'script'</script>"
IMAGE = '"><img src=x onerror="window.planted = \'image\'">'
CLOSING = "</script><script>window.planted = 'closing'</script>"
LINK = "javascript:window.planted='link'"
TEMPLATE = "{{ 7 * 191 }}${7 * 191}"
BACKWARDS = "\u202etxt.nepo\u202c"


def measure_sweep(make_spec: Callable[..., Any]) -> list[Result]:
    """In this process: a child for each measurement would take minutes."""
    import torch

    from dpscope.runner.measure import measure

    torch.set_num_threads(1)  # tests share the machine
    plan = {FULL: INSTRUMENTS, PART: ("time", "memory")}
    return [
        measure(make_spec(method=method, instrument=instrument, warmup=1, steps=4, batch_size=batch, seq_len=length))
        for (batch, length), instruments in plan.items()
        for method in METHODS
        for instrument in instruments
    ]


def read_h200() -> list[Result]:
    """What an H200 gave for the model of 1B parameters: four methods at four sizes, one of them by every instrument."""
    seen: dict[tuple[Any, ...], Result] = {}
    for name in ("traffic", "memory/8x1024", "traces"):
        for result in Comparison.read(H200 / f"2026-11-15-h200-{name}").results:
            # The traces' own times were taken with fewer steps, and would be rows of their own.
            looked = (result.experiment, result.spec["batch_size"], result.spec["seq_len"], result.instrument)
            seen.setdefault(looked, result)
    return list(seen.values())


def at(size: tuple[int, int], results: Iterable[Result]) -> list[Result]:
    return [result for result in results if (result.spec["batch_size"], result.spec["seq_len"]) == size]


def with_spec(result: Result, **changes: Any) -> Result:
    return replace(result, spec={**result.spec, **changes}, config={**result.config, **changes})


def multiply(results: Sequence[Result], batches: Iterable[int], size: tuple[int, int] = FULL) -> list[Result]:
    """The rows of one size again at other batch sizes: real figures, so that every chart has its full weight."""
    return [with_spec(result, batch_size=batch) for batch in batches for result in at(size, results)]


def slow_down(results: Iterable[Result], factor: float = 1.5) -> list[Result]:
    """The same sweep when every step took longer."""

    def scale(value: Any) -> Any:
        return [factor * each for each in value] if isinstance(value, list) else factor * value

    return [replace(r, timing={key: scale(value) for key, value in r.timing.items()}) for r in results]


def make_hostile(measured: Sequence[Result]) -> list[Result]:
    """Markup and code wherever a result holds text that somebody else chose."""
    one_size = at(FULL, measured)
    hostile = [_poison(result) for result in one_size]
    first = one_size[0]
    failed = {**first.spec, "method": IMAGE, "workload": {**first.spec["workload"], "name": SCRIPT}}
    reason = f"{CLOSING} {IMAGE} {LINK} {BACKWARDS} {LONG}"
    return [*hostile, result_for(failed, status=FAILED, reason=reason, details=reason, environment=_gpu(first))]


def _poison(result: Result) -> Result:
    renamed = {"standard": "standard", "flat": CLOSING, "flash": f"=1+1'\"&{TEMPLATE}{LONG}"}
    name = renamed[result.experiment]
    # Names of modules, operators and kernels, wherever an instrument wrote them.
    poisoned = _replace_names(asdict(result), {"module": IMAGE, "operator": SCRIPT, "name": CLOSING, "phase": ""})
    return Result(
        **{
            **poisoned,
            "experiment": name,
            "spec": {**result.spec, "method": name, "workload": {**result.spec["workload"], "name": SCRIPT}},
            "environment": _gpu(result),
            "timeline": result.timeline,  # its names are dpscope's own
        }
    )


def _gpu(result: Result) -> dict[str, Any]:
    return {**result.environment, "gpu": f"GPU {IMAGE}", "cpu": f"CPU {SCRIPT}{BACKWARDS}"}


def _replace_names(value: Any, poison: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {
            key: poison[key] + part if poison.get(key) and isinstance(part, str) else _replace_names(part, poison)
            for key, part in value.items()
        }
    return [_replace_names(part, poison) for part in value] if isinstance(value, list) else value


def break_some(measured: Sequence[Result]) -> list[Result]:
    """One size whole, one in which flat ran out of memory and flash failed, one that nobody finished."""
    endings = {
        "flat": (OOM, "out of memory: 12.0 GiB asked for, 3.1 GiB free; try --batch-size 1"),
        "flash": (FAILED, "RuntimeError: no norm for a layer of this kind"),
    }

    def end(result: Result) -> Result:
        status, reason = endings[result.experiment]
        return result_for(result.spec, status=status, reason=reason, environment=result.environment)

    second = [end(result) if result.experiment in endings else result for result in at(PART, measured)]
    third = [
        with_spec(result, seq_len=32)
        for result in at(FULL, measured)
        if result.instrument == "time" and result.experiment != "flash"
    ]
    return [*at(FULL, measured), *second, *third]


def write_sweep(folder: Path, results: Iterable[Result]) -> Path:
    store = ResultStore(folder)
    store.create()
    for number, result in enumerate(results):
        store.write(f"{number:04d}-{result.instrument}.json", result)
    return folder


def add_damaged_files(folder: Path, measured: Sequence[Result]) -> None:
    """A file cut in the middle, one of a later version, one of somebody else's, an empty one."""
    text = measured[0].to_json()
    later = json.dumps({**json.loads(text), "schema_version": 99})
    damaged = {"truncated": text[: len(text) // 2], "later": later, "foreign": '{"hello": "world"}', "empty": ""}
    for name, content in damaged.items():
        (folder / "results" / f"{name}.json").write_text(content, encoding="utf-8")


def page_of(folder: Path) -> Path:
    """report.html of a folder, as `dpscope report` makes it."""
    comparison = Comparison.read(folder)
    return PAGE.write(comparison.report, folder, ())[0]


def against_page_of(now: Path, before: Path, *, out: Path) -> Path:
    """report-against.html of two folders, as `dpscope report NOW --against BEFORE` makes it."""
    return AGAINST_PAGE.write(Comparison.read(now).against(before), out, ())[0]
