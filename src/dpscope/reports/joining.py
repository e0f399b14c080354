"""From results to rows: what was measured of one method at one size, together, and next to ordinary training."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from dpscope.reports.tables import Row
from dpscope.results.identity import StepNumbers, hashable, identity_of, step_counts_of
from dpscope.results.schema import Result
from dpscope.vocabulary.methods import STANDARD
from dpscope.vocabulary.settings import EAGER, LATER_DEFAULTS


def compare_results(results: Iterable[Result]) -> list[Row]:
    """Return a row for each method at each size, in order of first appearance."""
    joined = join_instruments(list(results))
    # Peaks of two definitions are not compared: the instrument that gives most rows one, of equals the memory one.
    counts = Counter(name for row in joined for name in row.peaks)
    instrument = max(counts, key=lambda name: (counts[name], name == "memory"), default=None)
    methods = tuple(dict.fromkeys(row.method for row in joined))
    rows = [replace(row, peak_instrument=instrument, methods=methods) for row in joined]
    eager = {row.comparison: row for row in rows if row.method == STANDARD and row.field("compile") == EAGER}
    for place, row in enumerate(rows):
        if row.field("compile") != EAGER:
            found = eager.get(hashable({**row.identity, "compile": EAGER}))
            rows[place] = replace(row, eager_standard=found)
        elif row.field("gpus") > 1:
            rows[place] = replace(row, alone=_in_one_process(row, rows))
    standards = {row.comparison: row for row in rows if row.method == STANDARD}
    return [row if row is (found := standards.get(row.comparison)) else replace(row, reference=found) for row in rows]


def _in_one_process(row: Row, rows: Sequence[Row]) -> Row | None:
    """Return the single-process row of the same method with the batch of a rank or, failing that, of a step."""
    one = {**row.identity, **{name: LATER_DEFAULTS[name] for name in ("gpus", "parallel")}}
    batches = (row.field("batch_size"), row.field("batch_size") * row.field("gpus"))
    wanted = [hashable({**one, "batch_size": batch}) for batch in batches]
    found = {other.comparison: other for other in reversed(rows) if other.method == row.method}
    return next((found[each] for each in wanted if each in found), None)


def join_instruments(results: Sequence[Result]) -> list[Row]:
    """Join what was measured of the same method at the same size, in order of first appearance.

    Numbers of steps keep rows apart only where one instrument looked with several of them; what another saw, with
    one number of steps, belongs to each of those rows.
    """
    counted: dict[tuple[Hashable, str, str], dict[StepNumbers, None]] = defaultdict(dict)  # of one method's results
    for result in results:
        key = (hashable(identity_of(result.spec)), result.instrument, result.experiment)
        counted[key][step_counts_of(result.spec)] = None
    several: dict[Hashable, dict[str, dict[StepNumbers, None]]] = defaultdict(lambda: defaultdict(dict))
    for (comparison, instrument, _), counts in counted.items():
        if len(counts) > 1:
            several[comparison][instrument] |= counts
    joined: dict[Hashable, list[Row]] = {}
    for result in results:
        comparison = hashable(identity_of(result.spec))
        repeated = several[comparison]
        every = dict.fromkeys(each for of_one in repeated.values() for each in of_one) or [()]
        for steps in [step_counts_of(result.spec)] if result.instrument in repeated else every:
            places = joined.setdefault((result.experiment, comparison, steps), [])
            row = next((row for row in places if result.instrument not in row.measured), None)
            if row is None:
                places.append(row := Row({}, step_counts=steps))
            row.measured[result.instrument] = result
    return [row for places in joined.values() for row in places]
