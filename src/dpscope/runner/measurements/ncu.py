"""Measurement of the bytes a step moves: counted by Nsight Compute around `ranged_step`, or estimated."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dpscope.errors import MeasurementFailed, UserError
from dpscope.instruments.ncu import metrics, reading, running
from dpscope.instruments.ncu.metrics import KERNEL_METRICS, TENSOR_OPS_OF, TRAFFIC_FORMULAS
from dpscope.instruments.ncu.reading import Action, UnreadableReport, read_report
from dpscope.instruments.ncu.running import NcuCapture, find_ncu
from dpscope.instruments.timing import Progress
from dpscope.results.payloads.ncu import ESTIMATE, MEASURED, READ, WRITE, NcuPayload
from dpscope.results.schema import Result, result_for
from dpscope.runner.ranged_step import program, read_outcome
from dpscope.runner.spec import RunSpec
from dpscope.runner.sweep import ROW_SECONDS
from dpscope.vocabulary.statuses import OK

STEP_REPORT, KERNELS_REPORT = "step.ncu-rep", "kernels.ncu-rep"
MOST_SECONDS = 900.0
NOT_ESTIMATED = "an estimate knows the sizes of tensors, not what caches and units did"


class NotCounted(Exception):
    """Failure of ncu to count, with the reason. An estimate takes its place."""


class ProgramFailed(Exception):
    """The step itself failed under ncu: the row's status and reason."""


def measure_ncu(spec: RunSpec, progress: Progress, folder: Path) -> Result:
    from dpscope.instruments.estimate import measure_ceilings

    payload: NcuPayload = {"source": MEASURED, "reason": None, "ncu_version": None, "traffic": {}, "flops": {}}
    payload |= {"metrics": {}, "missing": {}, "estimate": {}, "kernels": {}, "ceilings": {}, "command": []}
    files: dict[str, str] = {}  # what it is -> file
    outcome: dict[str, Any] = {}
    try:
        _count_step(spec, progress, folder, payload, files)
        if spec.option("per_kernel"):
            _count_kernels(spec, progress, folder, payload, files)
    except ProgramFailed as error:
        outcome = dict(zip(("status", "reason"), error.args, strict=True))
    except NotCounted as why:
        if spec.option("require_measured"):
            raise UserError(f"not measured, and an estimate was not wanted (--require-measured): {why}") from None
        payload |= {"source": ESTIMATE, "reason": f"{str(why)[0].upper()}{str(why)[1:]}."}
    if not outcome:
        progress("ceilings and estimate", 0, 1)
        payload["ceilings"] = measure_ceilings(spec.device)
        _add_estimate(spec, payload)
    return result_for(spec.to_dict(), ncu=payload, files=files, **outcome)


def obstacle(device: str) -> str | None:
    """Return why ncu cannot count on a device here; None if it may work."""
    if device != "cuda":
        return running.NO_GPU_TO_COUNT
    return None if find_ncu() else running.NO_NCU


def ncu_here() -> str:
    """Return this machine's ncu, or the usual name for a command to run elsewhere."""
    return find_ncu() or "ncu"


def step_command(spec: RunSpec, ncu: str, report: Path, counters: Sequence[str] | None = None) -> list[str]:
    """Return the command that counts one step as a whole."""
    return running.range_command(ncu, program(spec), report, counters or step_metrics(spec))


def kernels_command(spec: RunSpec, ncu: str, report: Path, counters: Sequence[str] = KERNEL_METRICS) -> list[str]:
    """Return the command that counts a step's kernels one by one."""
    limited = program(spec, str(spec.option("budget")))
    return running.kernel_command(ncu, limited, report, counters, kernel=spec.option("kernel") or None)


def printed_commands(spec: RunSpec) -> Iterator[str]:
    """Yield shell commands that count what a measurement would count, each after a comment that describes it."""
    ncu, name = ncu_here(), spec.label.replace(" ", "_")
    yield f"# {spec.label}: one step as a whole"
    yield shlex.join(step_command(spec, ncu, Path(f"{name}.ncu-rep")))
    if spec.option("per_kernel"):
        yield f"# {spec.label}: its kernels one by one"
        yield shlex.join(kernels_command(spec, ncu, Path(f"{name}_kernels.ncu-rep")))


def step_metrics(spec: RunSpec) -> list[str]:
    return metrics.resolve_metrics(
        [*metrics.RANGE_METRICS, TENSOR_OPS_OF[spec.dtype], *filter(None, spec.option("metrics").split(","))]
    )


def _count_step(spec: RunSpec, progress: Progress, folder: Path, payload: NcuPayload, files: dict[str, str]) -> None:
    if (why := obstacle(spec.device)) is not None:
        raise NotCounted(why)
    ncu = ncu_here()
    payload["ncu_version"] = running.ncu_version(ncu)
    wanted, report = step_metrics(spec), folder / STEP_REPORT
    taken = _capture(lambda counters: step_command(spec, ncu, report, counters), wanted, report, progress)
    payload["command"] = taken.command
    action = _read(taken, ncu, report)[0]
    files["Nsight Compute report of the step"] = STEP_REPORT
    values = {name: action.metrics[name] for name in (*wanted, metrics.PASSES) if name in action.metrics}
    counted = metrics.summarise_range(values)
    payload |= {"traffic": counted["traffic"], "flops": counted["flops"], "metrics": counted["metrics"]}
    absent = {name: "the report does not hold it" for name in wanted if name not in values}
    refused = dict.fromkeys(taken.refused, "this GPU, or this version of ncu, does not know it")
    payload["missing"] = {**absent, **refused, **counted["missing"]}


def _count_kernels(spec: RunSpec, progress: Progress, folder: Path, payload: NcuPayload, files: dict[str, str]) -> None:
    """Count kernels one by one. If that fails the row keeps its other figures."""
    ncu, report = ncu_here(), folder / KERNELS_REPORT
    progress("which counters fit in one pass", 0, 1)
    try:
        wanted = running.one_pass_metrics(ncu, TENSOR_OPS_OF[spec.dtype])
        taken = _capture(
            lambda counters: kernels_command(spec, ncu, report, counters), wanted, report, progress, may_be_cut=True
        )
        actions = _read(taken, ncu, report)
    except (NotCounted, ProgramFailed) as error:
        payload["missing"]["kernels"] = str(error.args[-1])
        return
    files["Nsight Compute report of the kernels"] = KERNELS_REPORT
    payload["kernels"] = reading.describe_kernels(actions, top=spec.option("top"), kernel=spec.option("kernel"))


def _capture(
    make_command: Callable[[Sequence[str]], list[str]],
    counters: Sequence[str],
    report: Path,
    progress: Progress,
    *,
    may_be_cut: bool = False,
) -> NcuCapture:
    """Run ncu, watch its program, and raise `ProgramFailed` if the step failed."""
    report.parent.mkdir(parents=True, exist_ok=True)
    outcomes: list[dict[str, str]] = []

    def on_line(line: str) -> None:
        if outcome := read_outcome(line):
            outcomes.append(outcome)
            progress(f"under ncu, {len(outcomes)} runs done", 0, 1)

    progress("under ncu", 0, 1)
    # Shorter than the row's, so that the row can still estimate if ncu hangs.
    limit = min(MOST_SECONDS, 0.6 * float(os.environ.get(ROW_SECONDS, MOST_SECONDS)))
    taken = running.take_report(make_command, counters, report, limit=limit, on_line=on_line, may_be_cut=may_be_cut)
    if failed := next((outcome for outcome in outcomes if outcome["status"] != OK), None):
        raise ProgramFailed(failed["status"], f"under ncu: {failed['reason']}")
    return taken


def _read(taken: NcuCapture, ncu: str, report: Path) -> list[Action]:
    if taken.failure is not None:
        raise NotCounted(taken.failure)
    try:
        return read_report(report, ncu=ncu)
    except UnreadableReport as error:
        raise NotCounted(str(error)) from None


def _add_estimate(spec: RunSpec, payload: NcuPayload) -> None:
    """Add bytes estimated from tensor sizes: instead of a measurement, or beside it to show the estimate's error.

    Where kernels were counted, note how many the step launches.
    """
    from dpscope.instruments.estimate import estimate_traffic
    from dpscope.runner.steps import TrainingSteps
    from dpscope.trainers.modes import eager_calls

    measured = payload["source"] == MEASURED
    try:
        step = TrainingSteps(spec, warmup=max(spec.warmup, 1))
        step.warm_up()
        if measured and payload["kernels"]:
            payload["kernels"]["calls_total"] = reading.count_launches(step)
        with eager_calls():
            estimate = estimate_traffic(step, device=spec.device)
        step.require_finite()
    except MeasurementFailed:
        raise
    except Exception as error:
        if not measured:
            raise
        payload["missing"]["estimate"] = f"{type(error).__name__}: {error}"
        return
    if not measured:
        traffic: dict[str, int] = {READ: estimate[READ], WRITE: estimate[WRITE]}
        payload |= {"traffic": traffic, "flops": estimate["flops"], "kernels": estimate.pop("kernels")}
        payload["missing"] = {name: NOT_ESTIMATED for name in TRAFFIC_FORMULAS if name not in traffic}
    payload["estimate"] = estimate


Figures = dict[str, Any]


def read_ncu_reports(reports: Iterable[Path], steps: int) -> tuple[dict[Path, Figures], dict[Path, str]]:
    """Return the figures of an average step by report, kernels added up; and why others could not be read."""
    figures: dict[Path, Figures] = {}
    broken: dict[Path, str] = {}
    for report in reports:
        try:
            actions = read_report(report)
        except UnreadableReport as error:
            broken[report] = str(error)
            continue
        values = reading.add_up_metrics(actions)
        traffic, _ = metrics.make_figures(values, TRAFFIC_FORMULAS)
        flops = {f"{unit}_flops": count for unit, count in metrics.make_flops(values).items()}
        averages = {name: value / steps for name, value in {**traffic, **flops}.items()}
        figures[report] = averages | {"rows": len(actions)}
    return figures, broken
