"""What changed between two sweeps, in sentences: for the terminal and for the page alike."""

from __future__ import annotations

from collections.abc import Sequence

from dpscope.reports.against.changes import RATIOS, TIME, UNDECIDED, Change, Figure
from dpscope.reports.against.data import Against, Pair
from dpscope.reports.doubt import ADVICE, EXPLAINED
from dpscope.reports.tables import STANDARD, Row, worth_a_column
from dpscope.reports.words import size_in_words
from dpscope.units import MISSING
from dpscope.vocabulary.settings import COMPARED, SETTINGS

AGAINST_TITLE = "Two sweeps side by side"
MOST = 8  # rows named one by one in a sentence; the table has all of them


def headline(against: Against) -> str:
    """What there is to know, in one sentence."""
    rows = _count(len(against.pairs), "row")
    tallies = [tally for figure in against.figures if (tally := _tally(against, figure))]
    if statuses := sum(pair.status_changed for pair in against.pairs):
        tallies.append(f"{statuses} with another status")
    undecided = sum(not pair.changed and pair.changes[TIME.key].verdict in UNDECIDED for pair in against.pairs)
    no_verdict = [f"{undecided} without a verdict on time"] if undecided else []
    if not tallies:
        return "; ".join([f"Nothing changed in {rows} compared", *no_verdict]) + "."
    same = sum(not pair.changed for pair in against.pairs) - undecided
    return "; ".join([f"Of {rows} compared: {', '.join(tallies)}", *no_verdict, f"{same} without a change"]) + "."


def sentences(against: Against) -> list[str]:
    """Everything that changed, the worst of it first; then what nobody can say."""
    found = [
        sentence
        for figure in against.figures
        for word in (figure.more, figure.less)
        if (sentence := _sentence(against, figure, word))
    ]
    return [*_status_sentences(against), *found, *_standard_sentences(against), *_undecided_sentences(against)]


def name_of(pair: Pair, against: Against) -> str:
    """`flash at batch 8, sequence 256`, and whatever else tells it from the others."""
    return row_name(pair.now, [pair.now for pair in against.pairs])


def row_name(row: Row, among: Sequence[Row]) -> str:
    spec = row.first.spec
    extra = [SETTINGS[name].told_of(spec) for name in worth_a_column(among, COMPARED)]
    models = {other.first.spec["workload"]["name"] for other in among}
    model = f" on {spec['workload']['name']}" if len(models) > 1 else ""
    return f"{row.method}{model} at {', '.join([size_in_words(spec), *extra])}"


def format_change(relative: float | None) -> str:
    """−3.1%; what would round to nothing has no sign."""
    if relative is None:
        return MISSING
    share = f"{abs(relative):.1%}"
    sign = "" if share == "0.0%" else "−" if relative < 0 else "+"
    return sign + share


def _tally(against: Against, figure: Figure) -> str:
    verdicts = [pair.changes[figure.key].verdict for pair in against.pairs]
    noun = {"memory": "in memory", "traffic": "bytes"}.get(figure.key, "")
    return ", ".join(
        f"{n} {word} {noun}".rstrip() for word in (figure.less, figure.more) if (n := verdicts.count(word))
    )


def _sentence(against: Against, figure: Figure, word: str) -> str:
    pairs = [pair for pair in against.pairs if pair.changes[figure.key].verdict == word]
    pairs.sort(key=lambda pair: -abs(pair.changes[figure.key].relative or 0.0))
    if not pairs:
        return ""
    named = [f"{name_of(pair, against)} ({_in_figures(pair, figure)})" for pair in pairs[:MOST]]
    more = [f"and {len(pairs) - MOST} more"] if len(pairs) > MOST else []
    noun = {"memory": " peak memory", "traffic": " DRAM bytes"}.get(figure.key, "")
    return f"{word.capitalize()}{noun}: {'; '.join([*named, *more])}."


def _in_figures(pair: Pair, figure: Figure) -> str:
    """174.4 ms → 111.9 ms, −35.9%; 1.73× → 1.11× of standard"""
    change, ratio = pair.changes[figure.key], pair.changes[RATIOS[figure.key].key]
    text = f"{arrow(change)}, {format_change(change.relative)}"
    known = pair.now.method != STANDARD and ratio.relative is not None and ratio.verdict not in UNDECIDED
    return f"{text}; {arrow(ratio)} of standard" if known else text


def arrow(change: Change) -> str:
    return f"{change.show(change.before)} → {change.show(change.now)}"


def _status_sentences(against: Against) -> list[str]:
    lines = []
    for pair in against.pairs:
        if pair.status_changed:
            before, now = pair.statuses
            reason = pair.now.result.reason or pair.before.result.reason
            lines.append(f"{name_of(pair, against)}: {before} before, {now} now" + (f" ({reason})" if reason else "."))
    return lines


def _standard_sentences(against: Against) -> list[str]:
    """Ordinary training that changed points at the machine or the libraries: then the ratios tell the rest."""
    moved = [pair for pair in against.pairs if pair.now.method == STANDARD and pair.changes[TIME.key].found]
    if not moved or len(moved) == len(against.pairs):
        return []
    ratio = RATIOS[TIME.key]
    others = [pair for pair in against.pairs if pair.now.method != STANDARD and pair.changes[ratio.key].found]
    named = "; ".join(f"{name_of(pair, against)} {arrow(pair.changes[ratio.key])}" for pair in others[:MOST])
    told = f"beyond the spread they changed for {named}" if others else "none of them changed beyond the spread"
    return [
        f"Ordinary training (standard) changed as well at {_count(len(moved), 'size')}, so some of it is the machine, "
        f"the libraries or the workload. The ratios to standard leave that out: {told}."
    ]


def _undecided_sentences(against: Against) -> list[str]:
    lines = []
    for verdict, why in EXPLAINED.items():
        pairs = [pair for pair in against.pairs if pair.changes[TIME.key].verdict == verdict]
        if pairs:
            everywhere = len(pairs) == len(against.pairs)
            names = "any row" if everywhere else "; ".join(name_of(pair, against) for pair in pairs[:MOST])
            lines.append(f"No verdict on the time of {names}: {why}. {ADVICE[verdict]}.")
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
