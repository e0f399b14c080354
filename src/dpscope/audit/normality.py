"""Tests of noise: steps in units of σC should consist of independent standard normals.

All tests together raise a false alarm with a probability of at most `FALSE_ALARM`, shared evenly among them. Each is
exact for independent normals: Σz² is chi-square, their mean over their spread is Student's t, the squared cosine of two
vectors of n values is Beta(1/2, (n − 1)/2), and the largest |z| is below t with a probability of P(|z| < t)ⁿ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor

from dpscope.units import list_names

try:
    from scipy import stats  # type: ignore[import-untyped]
except ModuleNotFoundError:
    stats = None
SCIPY_INSTALLED = stats is not None  # Opacus brings scipy along, but not everybody has Opacus

FALSE_ALARM = 1e-6
VALUES_PER_PARAMETER = 128  # of each parameter, over all steps
KEPT_VALUES = 4096  # of a parameter, in each step, that are held against others
MIN_COSINE_VALUES = 32  # values below which a cosine is not looked at
POOLED_VALUES = 2**17  # values whose distribution is looked at
NO_VARIANCE = 1e-8  # a variance below it is zero
SAME_COSINE = 0.99  # the cosine of vectors that are the same but for rounding


@dataclass(frozen=True)
class NoisyStep:
    """Noise of one step, by parameter: number of values, their sum and squares' sum, largest |value|, first values."""

    label: str
    size: int  # of the batch
    counts: dict[str, int]
    sums: dict[str, float]
    squares: dict[str, float]
    largest: dict[str, float]
    kept: dict[str, Tensor]

    @classmethod
    def of(cls, label: str, size: int, noise: Iterable[tuple[str, Tensor]]) -> NoisyStep:
        """Summarise the noise of each parameter, one after the other."""
        step = cls(label, size, {}, {}, {}, {}, {})
        for name, values in noise:
            z = values.flatten()
            step.counts[name], step.sums[name] = z.numel(), float(z.sum())
            step.squares[name] = float(z.square().sum())
            step.largest[name] = float(z.abs().max()) if len(z) else 0.0
            step.kept[name] = z[:KEPT_VALUES].cpu().clone()
        return step

    @property
    def variance(self) -> float:
        return sum(self.squares.values()) / max(1, sum(self.counts.values()))


class Kind(Enum):
    """Quantity that a test measures."""

    SIZE = "standard deviation of a parameter's noise"
    STEP_SIZE = "standard deviation of a step's noise"
    MEAN = "mean of a parameter's noise"
    REPEATED = "cosine of two steps"
    SERIAL = "cosine of consecutive steps, in one parameter"
    SHARED = "cosine of two parameters"
    INSIDE = "cosine of two halves of a parameter"
    TAIL = "largest value of the noise, in its own standard deviations"
    SHAPE = "distance from the normal distribution"


@dataclass(frozen=True)
class TestResult:
    kind: Kind
    p: float  # the probability of so large a figure by chance
    about: tuple[str, ...]  # labels of steps, or names of parameters
    figure: float


def find_noise_faults(steps: Sequence[NoisyStep]) -> list[str]:
    """Return the faults of the noise, a sentence each."""
    if not all(math.isfinite(step.variance) for step in steps):
        return ["noisy steps leave inf or NaN in the parameters"]
    if all(step.variance < NO_VARIANCE for step in steps):
        return ["no noise is added: with and without it a step is the same"]
    names = [name for name in steps[0].counts if all(name in step.counts for step in steps)]
    missing = [name for name in names if sum(step.squares[name] for step in steps) < NO_VARIANCE]
    silent = [step for step in steps if step.variance < NO_VARIANCE]
    present = [name for name in names if name not in missing]
    noisy = [step for step in steps if step not in silent]
    faults = []
    if missing:
        faults.append(f"no noise is added to {list_names(missing)}, which every sample moves")
    if silent:
        sizes = sorted({step.size for step in silent})
        faults.append(
            f"{len(silent)} of {len(steps)} steps add no noise at all (batches of {', '.join(map(str, sizes))}): the "
            f"first is {silent[0].label}"
        )
    whole = torch.stack([torch.cat(list(step.kept.values())) for step in noisy])
    repetitions = list(_pairwise_cosines(Kind.REPEATED, [step.label for step in noisy], whole))
    repeats = {a.about[1] for a in repetitions if a.p < FALSE_ALARM / len(repetitions) and abs(a.figure) > SAME_COSINE}
    fresh = [step for step in noisy if step.label not in repeats]
    results = [*repetitions, *_run_tests(fresh, present)]
    alarms = [result for result in results if result.p < FALSE_ALARM / len(results)]
    return faults + list(_sentences(alarms, fresh, present))


def _run_tests(steps: Sequence[NoisyStep], names: Sequence[str]) -> Iterator[TestResult]:
    """Yield all tests except that of repeated steps."""
    yield from _sizes(steps, names)
    yield from _tails(steps, names)
    # (steps, values) each, of unit variance, so that the other tests do not depend on the size of the noise.
    rows = {name: torch.stack([step.kept[name] / math.sqrt(step.variance) for step in steps]) for name in names}
    yield from _sharing(rows)
    for name, row in rows.items():
        half = row.shape[1] // 2
        yield from _cosine(Kind.INSIDE, (name,), row[:, :half], row[:, half : 2 * half])
        yield from _cosine(Kind.INSIDE, (name,), row[:, : 2 * half : 2], row[:, 1 : 2 * half : 2])
        for start in (0, 1):  # pairs of steps that share none
            pairs = row[start : start + 2 * ((len(row) - start) // 2)]
            yield from _cosine(Kind.SERIAL, (name,), pairs[0::2], pairs[1::2])
    pooled = torch.cat([row.flatten() for row in rows.values()])
    pooled = pooled[torch.linspace(0, len(pooled) - 1, min(POOLED_VALUES, len(pooled))).long()]
    result = stats.kstest(pooled.numpy(), "norm")
    yield TestResult(Kind.SHAPE, float(result.pvalue), (), float(result.statistic))


def _sizes(steps: Sequence[NoisyStep], names: Sequence[str]) -> Iterator[TestResult]:
    for name in names:
        count = sum(step.counts[name] for step in steps)
        square, total = (sum(values) for values in zip(*((s.squares[name], s.sums[name]) for s in steps), strict=True))
        yield TestResult(Kind.SIZE, _chi_square(square, count), (name,), math.sqrt(square / count))
        mean = total / count
        spread = math.sqrt(max(NO_VARIANCE, square / count - mean**2))
        p = 2 * float(stats.t.sf(abs(mean) / spread * math.sqrt(count - 1), count - 1))
        yield TestResult(Kind.MEAN, p, (name,), mean)
    for step in steps:
        count, square = sum(step.counts[n] for n in names), sum(step.squares[n] for n in names)
        yield TestResult(Kind.STEP_SIZE, _chi_square(square, count), (step.label,), math.sqrt(square / count))


def _tails(steps: Sequence[NoisyStep], names: Sequence[str]) -> Iterator[TestResult]:
    """Yield the largest value of each parameter, and of all together: truncated noise has no large values."""
    for group in [*([name] for name in names), list(names)]:
        count = sum(step.counts[name] for step in steps for name in group)
        square = sum(step.squares[name] for step in steps for name in group)
        if count >= VALUES_PER_PARAMETER:
            largest = max(step.largest[name] for step in steps for name in group) / math.sqrt(square / count)
            beyond = math.log1p(-2 * float(stats.norm.sf(largest))) * count  # log P(no value is larger)
            p = 2 * min(math.exp(beyond), -math.expm1(beyond))
            yield TestResult(Kind.TAIL, p, tuple(group[:1]) if len(group) < len(names) else (), largest)


def _chi_square(square: float, count: float) -> float:
    return 2 * min(float(stats.chi2.cdf(square, count)), float(stats.chi2.sf(square, count)))


def _sharing(rows: dict[str, Tensor]) -> Iterator[TestResult]:
    """Yield all pairs of parameters, cut to the shorter one: different shapes may start with the same values."""
    lengths = {row.shape[1] for row in rows.values()}
    for length in sorted({n for n in lengths if n < 64} | {n for n in (64, KEPT_VALUES) if n <= max(lengths)}):
        names = [name for name, row in rows.items() if row.shape[1] >= length]
        vectors = torch.stack([rows[name][:, :length].flatten() for name in names])
        yield from _pairwise_cosines(Kind.SHARED, names, vectors)


def _pairwise_cosines(kind: Kind, names: Sequence[str], vectors: Tensor) -> Iterator[TestResult]:
    """Yield the cosines of all pairs; vectors: (names, values)."""
    unit = F.normalize(vectors, dim=1)
    cosines = (unit @ unit.T).tolist()
    for i, j in combinations(range(len(names)), 2):
        yield from _test_cosine(kind, (names[i], names[j]), cosines[i][j], vectors.shape[1])


def _cosine(kind: Kind, about: tuple[str, ...], a: Tensor, b: Tensor) -> Iterator[TestResult]:
    yield from _test_cosine(kind, about, float(torch.cosine_similarity(a.flatten(), b.flatten(), 0)), a.numel())


def _test_cosine(kind: Kind, about: tuple[str, ...], cosine: float, values: int) -> Iterator[TestResult]:
    if values >= MIN_COSINE_VALUES:
        # A normal bound on the cosine is quick to take; only what comes near the threshold is worth the Beta.
        likely = cosine**2 * values < 16
        p = 1.0 if likely else float(stats.beta.sf(min(1.0, cosine**2), 0.5, (values - 1) / 2))
        yield TestResult(kind, p, about, cosine)


# -- sentences -------------------------------------------------------------------------------------------------------


def _sentences(alarms: Sequence[TestResult], steps: Sequence[NoisyStep], names: Sequence[str]) -> Iterator[str]:
    by_kind = {kind: those for kind in Kind if (those := [alarm for alarm in alarms if alarm.kind is kind])}
    again = [a for kind in (Kind.REPEATED, Kind.SERIAL) for a in by_kind.get(kind, []) if abs(a.figure) > SAME_COSINE]
    yield from _describe_repetitions(again)
    if means := by_kind.get(Kind.MEAN):
        worst = max(means, key=lambda a: abs(a.figure))
        yield f"the noise on {_names(means)} is not centred: its mean is {worst.figure:.3g} σC"
        return  # from which the rest may follow
    if copied := [a for a in by_kind.get(Kind.INSIDE, []) if abs(a.figure) > SAME_COSINE]:
        yield f"the noise on {_names(copied)} repeats itself: one value is given to several entries"
        return
    if cut := [a for a in by_kind.get(Kind.TAIL, []) if a.figure < _expected_largest(steps, a, names)]:
        yield _describe_cut(cut, steps, names)
        return  # less noise than asked for, and another shape, follow from it
    found = [
        *_describe_sizes(by_kind, steps, names),
        *_describe_repetitions([] if again else [*by_kind.get(Kind.REPEATED, []), *by_kind.get(Kind.SERIAL, [])]),
    ]
    if shared := by_kind.get(Kind.SHARED):
        worst = max(shared, key=lambda a: round(abs(a.figure), 3))  # the first of equal ones
        pairs = {a.about for a in shared}
        more = f" ({len(pairs)} pairs of parameters in all)" if len(pairs) > 1 else ""
        found.append(
            f"noise is shared: {worst.about[1]} is given {_similarity(worst.figure)} of {worst.about[0]}{more}"
        )
    yield from found
    if again or found:
        return
    if inside := by_kind.get(Kind.INSIDE):
        yield f"the values of the noise on {_names(inside)} depend on each other"
    if shape := by_kind.get(Kind.SHAPE):
        yield f"the noise is not normal (Kolmogorov-Smirnov distance {shape[0].figure:.2g})"
    elif large := by_kind.get(Kind.TAIL):
        yield f"the noise is not normal: its largest value is {max(a.figure for a in large):.3g} of its deviations"


def _values(steps: Sequence[NoisyStep], alarm: TestResult, names: Sequence[str]) -> int:
    return sum(step.counts[name] for step in steps for name in (alarm.about or names))


def _expected_largest(steps: Sequence[NoisyStep], alarm: TestResult, names: Sequence[str]) -> float:
    """Return the approximate largest |z| of n normals: one value in n exceeds it."""
    return float(stats.norm.isf(0.5 / _values(steps, alarm, names)))


def _describe_cut(cut: Sequence[TestResult], steps: Sequence[NoisyStep], names: Sequence[str]) -> str:
    worst = min(cut, key=lambda alarm: alarm.p)
    whose = worst.about or tuple(names)
    edge = max(step.largest[name] for step in steps for name in whose)
    where = "the noise" if any(not alarm.about for alarm in cut) else f"the noise on {_names(cut)}"
    return (
        f"{where} is cut off: none of {_values(steps, worst, names)} values is beyond {edge:.3g} σC, where normal ones "
        f"reach about {_expected_largest(steps, worst, names):.2g}; a truncated normal does not give the ε of a normal"
    )


def _names(alarms: Sequence[TestResult]) -> str:
    return list_names(dict.fromkeys(alarm.about[0] for alarm in alarms))


def _describe_repetitions(alarms: Sequence[TestResult]) -> Iterator[str]:
    repeated, serial = ([a for a in alarms if a.kind == kind] for kind in (Kind.REPEATED, Kind.SERIAL))
    if repeated:
        first = repeated[0]
        more = f" ({len(repeated)} pairs of steps in all)" if len(repeated) > 1 else ""
        yield f"noise is not fresh: {first.about[1]} draws {_similarity(first.figure)} of {first.about[0]}{more}"
    elif serial:
        worst = max(serial, key=lambda a: abs(a.figure))
        yield (
            f"noise is not fresh: a step draws {_similarity(worst.figure)} of the step before it for {_names(serial)}"
        )


def _describe_sizes(
    by_kind: dict[Kind, list[TestResult]], steps: Sequence[NoisyStep], names: Sequence[str]
) -> Iterator[str]:
    if not by_kind.keys() & {Kind.SIZE, Kind.STEP_SIZE}:
        return
    parameters = by_kind.get(Kind.SIZE, [])
    deviations = {size: _deviation([s for s in steps if s.size == size]) for size in sorted({s.size for s in steps})}
    low, high = min(deviations.values()), max(deviations.values())
    if Kind.STEP_SIZE in by_kind and high > 1.2 * low:
        shown = ", ".join(f"{value:.3g} σC in batches of {size}" for size, value in deviations.items())
        yield f"the size of the noise depends on the batch: {shown}; is it divided by the batch's own size?"
    elif len(parameters) < len(names) and parameters:
        worst = max(parameters, key=lambda a: abs(math.log(a.figure)))
        yield (
            f"the noise on {_names(parameters)} has a standard deviation of {worst.figure:.3g} σC ({worst.about[0]}) "
            "where σC is asked for"
        )
    else:
        yield f"the noise has a standard deviation of {_deviation(steps):.3g} σC where σC is asked for"


def _deviation(steps: Sequence[NoisyStep]) -> float:
    return math.sqrt(sum(step.variance for step in steps) / len(steps))


def _similarity(cosine: float) -> str:
    if abs(cosine) <= SAME_COSINE:
        return f"noise that goes along with (cosine {cosine:.2f}) that"
    return "the noise" if cosine > 0 else "the noise, with its sign changed,"
