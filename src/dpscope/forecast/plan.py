"""`dpscope.plan`: for each method peak, largest batch, time, privacy, hours and money, before anything is run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from dpscope.errors import UserError
from dpscope.forecast.accounting import Privacy, PrivacyGoal, account
from dpscope.forecast.allocator import OutOfFakeMemory
from dpscope.forecast.cards import CARDS, Card, find_card
from dpscope.forecast.fitting import LEFT_FREE, MOST_SAMPLES, BatchFit, largest_batch, limited_by, memory_limit
from dpscope.forecast.probe import Correction, Probe, Say
from dpscope.forecast.side_by_side import run_side_by_side
from dpscope.forecast.step import MOST_PASSES, StepForecast, forecast_step
from dpscope.numbers import RealNumber, WholeNumber
from dpscope.packages import version_of
from dpscope.runner.planning import DEFAULT_METHODS
from dpscope.runner.spec import RunSpec
from dpscope.vocabulary.components import GRADIENTS
from dpscope.vocabulary.methods import resolve_method
from dpscope.vocabulary.settings import EAGER
from dpscope.workloads.configs import LoraSettings, WorkloadConfig, find_workload, with_lora
from dpscope.workloads.workload import ALL_LINEAR, build_workload, require_peft

DEFAULT_LOGICAL_BATCH = 256
ADAPTERS = LoraSettings(r=16, alpha=32, target=(ALL_LINEAR,))  # whose effect is shown
Prober = Callable[[RunSpec, Sequence[int], Say], list[Probe]]


_CHECKS: dict[str, RealNumber | WholeNumber] = {
    "hours": RealNumber("hours", 1e-9, 1e9),
    "price_per_hour": RealNumber("price per hour", 1e-9, 1e9),
    "samples": WholeNumber("samples", most=10**15),
    "batch_size": WholeNumber("batch size", most=MOST_SAMPLES),
    "logical_batch": WholeNumber("logical batch", most=10**15),
}


@dataclass(frozen=True, kw_only=True)
class Wish:
    """Requests to a plan besides the step itself. A value of None is left open."""

    card: str | None = None
    samples: int | None = None
    batch_size: int | None = None
    logical_batch: int | None = None
    epsilon: float | None = None
    delta: float | None = None
    noise_multiplier: float | None = None
    epochs: float | None = None
    hours: float | None = None
    price_per_hour: float | None = None
    accountant: str = "prv"

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            if (value := getattr(self, name)) is not None:
                check(value)
        if self.hours is not None and self.epochs is not None:
            raise UserError("--hours and --epochs both say how long to train: give one of them")
        if self.samples is None and (self.hours is not None or self.is_private):
            raise UserError("privacy and length depend on the data: give --samples")
        if self.price_per_hour is not None and self.epochs is None and self.hours is None and self.epsilon is None:
            raise UserError("the price depends on how long to train: give --samples, and --epochs or --hours")
        if self.samples is not None:
            self.goal()  # which checks the rest
        if self.card is not None:
            find_card(self.card)

    @property
    def logical(self) -> int:
        return self.logical_batch or min(DEFAULT_LOGICAL_BATCH, self.samples or DEFAULT_LOGICAL_BATCH)

    @property
    def is_private(self) -> bool:
        """True if something of the privacy is given."""
        given = (self.epsilon, self.epochs, self.noise_multiplier, self.delta)
        return any(value is not None for value in given)

    def goal(self, steps: int | None = None) -> PrivacyGoal:
        """Return the privacy goal, with the number of steps that the hours allow."""
        names = ("epsilon", "delta", "noise_multiplier", "epochs", "accountant")
        known = {name: getattr(self, name) for name in names}
        return PrivacyGoal(samples=self.samples or 1, logical_batch=self.logical, steps=steps, **known)


def plan(
    workload: WorkloadConfig | str | Any,
    *,
    methods: Iterable[str] = DEFAULT_METHODS,
    seq_len: int | None = None,
    say: Say = lambda line: None,
    prober: Prober | None = None,
    effects: bool = True,
    workers: int = 1,
    settings: dict[str, Any] | None = None,
    **wish: Any,
) -> dict[str, Any]:
    """Plan private training of a workload.

    Args:
        workload: A preset's name, a config, `FILE.py:function`, or a function that returns a `dpscope.Workload`.
        methods: Methods to plan, side by side.
        seq_len: The sequence length.
        say: Called with a line about what is done now.
        prober: Measures short steps on this machine's GPU. Without it, figures are predicted.
        effects: Also find out which change of a setting would help most.
        workers: Processes to use. More than one only if this process has not run torch yet.
        settings: Settings of a step, such as `{"dtype": "bf16"}`.
        **wish: `card`, `samples`, `batch_size`, `logical_batch`, `epsilon`, `delta`, `noise_multiplier`, `epochs`,
            `hours`, `price_per_hour` and `accountant`.

    Returns:
        The plan as plain data, as `dpscope plan --json` writes it.

    Raises:
        UserError: The input is wrong.

    Example:
        >>> plan = dpscope.plan("tiny", methods=["flash"], card="h100-80gb", seq_len=16, batch_size=2, effects=False)
        >>> print(plan["how"])
        predicted
    """
    asked = Wish(**wish)
    config = find_workload(workload)
    specs = [
        RunSpec(
            workload=config,
            method=name,
            seq_len=seq_len,
            batch_size=asked.batch_size or 1,
            **{**(settings or {}), "device": "cuda"},
        )
        for name in dict.fromkeys(resolve_method(name).name for name in methods)
    ]
    if specs[0].cuda_graph:
        raise UserError(
            "a plan does not know what a CUDA graph holds beside the steps that still run eagerly: leave out "
            "--cuda-graph here, and measure graphs with dpscope compare --cuda-graph off,on"
        )
    asked = _with_passes(asked, specs[0])
    private = any(resolve_method(spec.method).private for spec in specs)
    if private and asked.hours is not None and asked.epsilon is None and asked.noise_multiplier is None:
        raise UserError("the noise is open: give --epsilon or --noise-multiplier")
    if prober is not None and specs[0].world_size > 1:
        raise UserError("--probe measures on one GPU: leave it out for a prediction of several, or leave out --gpus")
    spent = None
    if private and asked.is_private and asked.hours is None:  # wrong input is said before anything runs
        say("noise and epsilon")
        spent = account(asked.goal())
    card, remarks = _card_for(asked, specs, say)
    workers = workers if prober is None else 1
    build_workload(config, batch_size=1, seq_len=seq_len)  # imports what each copy of this process would import
    tasks = [partial(_plan_method, spec, card, asked, spent, prober) for spec in specs]
    found = run_side_by_side(tasks, workers, say)
    if all("refused" in row for row in found):
        raise UserError(found[-1]["refused"])
    if specs[0].compile != EAGER and prober is None:
        remarks.append("Figures are of the eager step: what torch.compile fuses is not predicted.")
    if specs[0].dtype == "bf16" and not card.has_bf16:
        remarks.append(f"{card.title} has no tensor cores for bf16: its products take the time of float32's.")
    if specs[0].world_size > 1:
        remarks.append(
            f"Peaks and batches are those of each of {specs[0].world_size} processes ({specs[0].parallel}). "
            f"Sending takes what {specs[0].link_gbps:g} Gbit/s allow, behind computing as far as that reaches."
        )
    if not card.measured and prober is None:
        remarks.append(f"Times are scaled from the {card.title}'s data sheet: only an H200 was measured.")
    return {
        "how": "predicted" if prober is None else "probed",
        "workload": config.name,
        "seq_len": specs[0].seq_len,
        "dtype": specs[0].dtype,
        "card": {
            **asdict(card),
            "usable_bytes": card.usable_bytes,
            "limit_bytes": memory_limit(card),
            "margin": LEFT_FREE,
        },
        "wish": asdict(asked),
        "methods": found,
        "effects": _effects(specs, found, card, workers, say) if effects and prober is None else [],
        "remarks": remarks,
        "fits": any(row["batch_size"] for row in found if resolve_method(row["method"]).private or not private),
    }


def _with_passes(asked: Wish, spec: RunSpec) -> Wish:
    """Return the wish with the logical batch that `--batch-size` and `--accumulate` make."""
    if asked.batch_size is None or spec.accumulate == 1:
        return asked
    logical = spec.logical_batch_size
    if asked.logical_batch not in (None, logical):
        raise UserError(
            f"--batch-size {asked.batch_size}, {spec.accumulate} times on {spec.world_size} GPU(s), make a logical "
            f"batch of {logical}, not {asked.logical_batch}: leave out --accumulate or --logical-batch"
        )
    return replace(asked, logical_batch=logical)


def _card_for(asked: Wish, specs: list[RunSpec], say: Say) -> tuple[Card, list[str]]:
    if asked.card is not None:
        return find_card(asked.card), []
    if asked.batch_size is None:
        raise UserError("the card and the batch are both open: give --gpu, or --batch-size to find the smallest card")
    spec = next((each for each in specs if resolve_method(each.method).private), specs[0])
    spec = replace(spec, accumulate=math.ceil(asked.logical / spec.world_size / spec.batch_size))
    for card in sorted(CARDS.values(), key=lambda each: each.memory_gib):
        say(f"{spec.method} on {card.title}")
        try:
            forecast_step(spec, card, detailed=False, limit=memory_limit(card))
        except OutOfFakeMemory:
            continue
        return card, [
            f"{card.title} is the smallest card on which a step of {spec.method} with {spec.batch_size} fits."
        ]
    return max(CARDS.values(), key=lambda each: each.memory_gib), []


def _plan_method(
    spec: RunSpec, card: Card, asked: Wish, spent: Privacy | None, prober: Prober | None, say: Say
) -> dict[str, Any]:
    row: dict[str, Any] = {"method": spec.method, "batch_size": 0, "logical_batch": asked.logical}
    try:
        return row | _planned(spec, card, asked, spent, prober, say)
    except UserError as refusal:  # of the model, or of hours that are too few for this method
        return {**row, "refused": str(refusal)}


def _planned(
    spec: RunSpec, card: Card, asked: Wish, spent: Privacy | None, prober: Prober | None, say: Say
) -> dict[str, Any]:
    logical, ranks = asked.logical, spec.world_size
    share = math.ceil(logical / ranks)  # of a logical batch, on each process
    most = asked.batch_size or math.ceil(share / spec.accumulate)
    private = resolve_method(spec.method).private
    # Passes that follow the first hold the sum of gradients so far. Half of all Poisson draws are larger than expected,
    # so that private training has such passes even if one is expected.
    is_summed = private or share > (asked.batch_size or 1)
    spec = replace(spec, accumulate=MOST_PASSES if is_summed else 1)
    correct: Correction | None = None
    fit = largest_batch(spec, card, most, say)
    if prober is not None and fit.batch:
        correct = _probe(spec, card, fit.batch, say, prober)
        fit = _corrected_fit(spec, card, most, say, fit, correct)
    row: dict[str, Any] = {
        "largest_batch": fit.batch,
        "peaks": {size: fit.points[size].peak_bytes for size in sorted(fit.points)},
    }
    batch = asked.batch_size or 1
    if fit.batch < batch:
        needed = fit.points.get(batch) or forecast_step(replace(spec, batch_size=batch), card, detailed=False)
        return {**row, "needs_bytes": needed.reserved_bytes, "needs_batch": batch}
    # As few passes as a logical batch can take, none of them nearly empty.
    batch = asked.batch_size or min(fit.batch, math.ceil(share / math.ceil(share / fit.batch)))
    passes = math.ceil(share / batch)
    say(f"{spec.method}: a step of {batch} in detail")
    step = forecast_step(replace(spec, batch_size=batch, accumulate=passes), card)
    if passes == 1 and (drawn := fit.points.get(batch)) and correct is None:
        step = _with_sums(step, drawn)
    if correct is not None:
        step = correct(step, batch)
    row |= {
        "batch_size": batch,
        "accumulation": passes,
        "step": asdict(step),
        "limited_by": limited_by(step),
        "peaks_verifying": step.peaks_verifying,
    }
    row["samples_per_second"] = batch * passes * ranks / step.seconds
    expected = logical if asked.samples is None else asked.goal().expected_batch
    row["logical_seconds"] = expected / row["samples_per_second"]
    return row | _training(asked, spent, row["logical_seconds"], ranks, private=private)


def _with_sums(step: StepForecast, drawn: StepForecast) -> StepForecast:
    """Return a step of one pass with the peak that it has where a draw takes two."""
    more = max(0, drawn.peak_bytes - step.peak_bytes)
    return replace(
        step,
        peak_bytes=step.peak_bytes + more,
        reserved_bytes=max(step.reserved_bytes, drawn.reserved_bytes),
        step_bytes=max(step.step_bytes, drawn.step_bytes),
        components={**step.components, GRADIENTS: step.components.get(GRADIENTS, 0) + more},
    )


def _probe(spec: RunSpec, card: Card, largest: int, say: Say, prober: Prober) -> Correction:
    """Measure the largest batch that is predicted to fit, and smaller ones."""
    probes = prober(spec, sorted({max(1, largest // 4), max(1, largest // 2), largest}), say)
    at_sizes = (replace(spec, batch_size=each.batch_size) for each in probes)
    return Correction(probes, [forecast_step(each, card, attributed=False) for each in at_sizes])


def _corrected_fit(
    spec: RunSpec, card: Card, most: int, say: Say, predicted: BatchFit, correct: Correction
) -> BatchFit:
    """Find the largest batch again, with the prediction's error subtracted from the room."""
    missed = correct.missed_bytes(predicted.points[predicted.batch], predicted.batch)
    is_close = abs(missed) < LEFT_FREE / 4 * predicted.limit
    fit = predicted if is_close else largest_batch(spec, card, most, say, predicted.limit - missed)
    return replace(fit, points={size: correct(step, size) for size, step in fit.points.items()})


def _training(asked: Wish, spent: Privacy | None, seconds: float, cards: int, *, private: bool) -> dict[str, Any]:
    """Return privacy, hours and money of a run whose logical step takes so many seconds."""
    if asked.samples is None:
        return {}
    steps = spent.steps if spent is not None else asked.goal().length
    if asked.hours is not None:
        steps = int(3600 * asked.hours / seconds)
        spent = account(asked.goal(steps)) if private else None
    if steps is None:
        return {}
    hours = steps * seconds / 3600
    found: dict[str, Any] = {"steps": steps, "hours": hours}
    if private and spent is not None:
        found["privacy"] = asdict(spent)
    return found if asked.price_per_hour is None else {**found, "price": hours * cards * asked.price_per_hour}


def _effects(
    specs: list[RunSpec], rows: list[dict[str, Any]], card: Card, workers: int, say: Say
) -> list[dict[str, Any]]:
    """Return the effect of each change on the last method that fits, usually flash; on the last one if none fits."""
    planned = [(spec, row) for spec, row in zip(specs, rows, strict=True) if "refused" not in row]
    if not planned:
        return []
    spec, row = next((each for each in reversed(planned) if each[1]["batch_size"]), planned[-1])
    passes = row.get("accumulation", MOST_PASSES)
    spec = replace(spec, batch_size=row["batch_size"] or row["needs_batch"], accumulate=passes)
    before = StepForecast(**row["step"]) if "step" in row else forecast_step(spec, card, attributed=False)
    changes: dict[str, RunSpec] = {}
    if row["batch_size"]:
        changes["twice the batch"] = replace(spec, batch_size=2 * spec.batch_size, accumulate=math.ceil(passes / 2))
    if not spec.checkpoint_blocks and spec.method in ("standard", "flash"):
        changes["checkpointed blocks"] = replace(spec, checkpoint_blocks=True)
        if spec.method == "flash":
            changes["checkpointed blocks, lean"] = replace(spec, checkpoint_blocks=True, memory_budget="lean")
    if spec.dtype != "bf16" and card.has_bf16:
        changes["bf16"] = replace(spec, dtype="bf16")
    if spec.workload.lora is None and version_of("peft"):
        require_peft()
        adapted = replace(spec, workload=with_lora(spec.workload, ADAPTERS))
        changes[f"LoRA of rank {ADAPTERS.r} on all linear layers"] = adapted
    tasks = [partial(_effect, what, changed, spec, before, card) for what, changed in changes.items()]
    return [found for found in run_side_by_side(tasks, workers, say) if found]


def _effect(
    what: str, changed: RunSpec, spec: RunSpec, before: StepForecast, card: Card, say: Say
) -> dict[str, Any] | None:
    """Return the effect of a change on a step; None if it cannot be made."""
    say(f"{changed.method}: {what}")
    try:
        after = forecast_step(changed, card, attributed=False)
    except UserError:
        return None
    return {
        "method": spec.method,
        "what": what,
        "peak_bytes": after.peak_bytes,
        "peak_ratio": after.peak_bytes / before.peak_bytes,
        "time_ratio": (after.seconds / changed.logical_batch_size) / (before.seconds / spec.logical_batch_size),
    }
