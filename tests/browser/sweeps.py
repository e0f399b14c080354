"""Folders of results to make pages of: measured here, measured on an H200, multiplied, hostile, and damaged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dpscope.comparison import Comparison
from dpscope.reports.page import write_page
from dpscope.results.schema import FAILED, OOM, Result, parse_result, result_for
from dpscope.results.store import ResultStore

METHODS = ("standard", "flat", "ghost", "flash")
INSTRUMENTS = ("time", "memory", "trace", "ncu")
SIZES = ((2, 16), (4, 16), (2, 32))  # batch, sequence: 12 rows with the methods
H200 = Path(__file__).parents[2] / "benchmarks" / "results"

BATCHES = range(1, 51)  # 200 rows with the methods

LONG = "a-name-without-an-end-" * 12
SCRIPT = "<script>window.planted = 'script'</script>"
IMAGE = '"><img src=x onerror="window.planted = \'image\'">'
CLOSING = "</script><script>window.planted = 'closing'</script>"
LINK = "javascript:window.planted='link'"
TEMPLATE = "{{ 7 * 191 }}${7 * 191}"
BACKWARDS = "\u202etxt.nepo\u202c"


def measure_sweep(make_spec: Callable[..., Any]) -> list[Result]:
    """Every instrument on every method at three sizes, in this process: starting 48 children would take minutes."""
    import torch

    from dpscope.runner.measure import measure

    torch.set_num_threads(1)  # tests share the machine
    sizes = ({"batch_size": batch, "seq_len": length} for batch, length in SIZES)
    specs = (
        make_spec(method=method, instrument=instrument, warmup=1, steps=4, **size)
        for size in sizes
        for method in METHODS
        for instrument in INSTRUMENTS
    )
    return [measure(spec) for spec in specs]


def read_h200() -> list[Result]:
    """What an H200 gave for the model of 1B parameters, each file a real result, as of one sweep."""
    folders = ("traces", "memory/8x1024", "memory/1x16384", "flash-grid/bf16-16384", "flash-grid/bf16-256")
    paths = [path for name in folders for path in sorted((H200 / f"2026-11-15-h200-{name}" / "results").glob("*.json"))]
    assert paths, f"no results in {H200}"
    results = [parse_result(path.read_text(encoding="utf-8")) for path in paths]
    # They were taken on one day with different numbers of steps; equal ones make them rows of one table.
    return [replace(result, spec={**result.spec, "warmup": 3, "steps": 10}) for result in results]


def multiply(measured: Sequence[Result]) -> list[Result]:
    """The rows of one size again at fifty batch sizes: real figures, so that every chart has its full weight."""
    one_size = [result for result in measured if _size(result) == SIZES[0]]
    return [
        replace(result, spec={**result.spec, "batch_size": batch}, config={**result.config, "batch_size": batch})
        for batch in BATCHES
        for result in one_size
    ]


def make_hostile(measured: Sequence[Result]) -> list[Result]:
    """Markup and code wherever a result holds text that somebody else chose."""
    one_size = [result for result in measured if _size(result) == SIZES[0]]
    hostile = [_poison(result) for result in one_size]
    first = one_size[0]
    failed = {**first.spec, "method": IMAGE, "workload": {**first.spec["workload"], "name": SCRIPT}}
    reason = f"{CLOSING} {IMAGE} {LINK} {BACKWARDS} {LONG}"
    return [*hostile, result_for(failed, status=FAILED, reason=reason, details=reason, environment=_gpu(first))]


def _poison(result: Result) -> Result:
    renamed = {"standard": "standard", "flat": CLOSING, "ghost": f"'\"&{TEMPLATE}", "flash": LONG}
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
    """One size whole, one in which flat ran out of memory and ghost failed, one that nobody finished."""

    def of(size: tuple[int, int]) -> list[Result]:
        return [result for result in measured if _size(result) == size]

    def ended(result: Result, status: str, reason: str) -> Result:
        return result_for(result.spec, status=status, reason=reason, environment=result.environment)

    endings = {
        "flat": (OOM, "out of memory: 12.0 GiB asked for, 3.1 GiB free; try --batch-size 1"),
        "ghost": (FAILED, "RuntimeError: no ghost norm for a layer of this kind"),
    }
    second = [ended(r, *endings[r.experiment]) if r.experiment in endings else r for r in of(SIZES[1])]
    third = [r for r in of(SIZES[2]) if r.instrument == "time" and r.experiment != "flash"]
    return [*of(SIZES[0]), *second, *third]


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
    return write_page(comparison.results, folder, skipped=comparison.skipped)[0]


def _size(result: Result) -> tuple[int, int]:
    return result.spec["batch_size"], result.spec["seq_len"]
