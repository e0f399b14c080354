"""The bytes a step moves, in tables and in plain words. An estimate is called one wherever it stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dpscope.reports.doubt import marked
from dpscope.reports.tables import SIZES, STANDARD, Row, worth_a_column
from dpscope.reports.traffic.data import (
    APPROXIMATELY,
    ESTIMATE,
    READ,
    SMALLEST,
    WRITE,
    Explanation,
    Traffic,
    by_size,
    compare_traffic,
)
from dpscope.reports.traffic.kernels_text import kernels_part
from dpscope.reports.words import size_in_words
from dpscope.units import MISSING, format_ms, format_rate, format_ratio, format_traffic
from dpscope.vocabulary.families import FAMILY_LABELS
from dpscope.vocabulary.settings import COMPARED

MOST = 0.8  # a verdict names families until they make up this share of the extra

Cell = Callable[[Traffic], str]

# Where a terminal is too narrow, columns go in this order; what tells rows apart, bytes and ratio always stay.
EXPENDABLE = ("SM to L2", "of peak", "FLOP/B", "per item", "est. read", "est. written", "bandwidth", "L2 to SM")


def traffic_section(rows: Sequence[Row], width: int) -> list[RenderableType]:
    """Nothing unless some row has traffic."""
    traffics = compare_traffic(rows)
    if not traffics:
        return []
    parts: list[RenderableType] = [Text(_heading(traffics), style="bold"), *_warnings(traffics)]
    parts += [_table(traffics, _dram_columns(traffics), width)]
    if caches := _cache_columns(traffics):
        parts += ["", _table(traffics, caches, width)]
    if sentences := traffic_verdict(traffics):
        parts += ["", *(Text(sentence) for sentence in sentences)]
    parts += kernels_part(traffics, width)
    return [*parts, "", *(Text(note, style="dim") for note in _notes(traffics))]


def _heading(traffics: Sequence[Traffic]) -> str:
    versions = dict.fromkeys(
        str(t.data["ncu_version"]) for t in traffics if not t.estimated and t.data.get("ncu_version")
    )
    by = f", counted by Nsight Compute {', '.join(versions)}" if versions else ""
    return f"DRAM traffic of one step{by}"


def _warnings(traffics: Sequence[Traffic]) -> list[RenderableType]:
    """What has to be read before any number."""
    estimates = [traffic for traffic in traffics if traffic.estimated]
    if not estimates:
        return []
    who = "All figures" if len(estimates) == len(traffics) else f"Figures marked {APPROXIMATELY}"
    lines = [f"ESTIMATE: {who} are computed from tensor sizes, not measured."]
    lines += dict.fromkeys(str(traffic.data["reason"]) for traffic in estimates if traffic.data.get("reason"))
    return [Text(line, style="yellow") for line in lines]


# -- tables ------------------------------------------------------------------------------------------------------------


def _table(traffics: Sequence[Traffic], columns: dict[str, Cell], width: int) -> Table:
    names = _name_columns(traffics)
    columns = _fitting(columns, traffics, width - _width_of(names, traffics))
    items = "/".join(dict.fromkeys(traffic.items[1] for traffic in traffics))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in names:
        numeric = heading in ("batch", "seq")
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=True)
    for heading in columns:
        table.add_column(heading.replace("item", items), justify="right", no_wrap=True)
    for group in by_size(traffics):
        for traffic in group:
            cells = [cell(traffic) for cell in (*names.values(), *columns.values())]
            table.add_row(*cells, end_section=traffic is group[-1])
    return table


def _fitting(columns: dict[str, Cell], traffics: Sequence[Traffic], width: int) -> dict[str, Cell]:
    """As many of the columns as there is room for."""
    kept = dict(columns)
    for heading in EXPENDABLE:
        if _width_of(kept, traffics) <= width:
            break
        kept.pop(heading, None)
    return kept


def _width_of(columns: dict[str, Cell], traffics: Sequence[Traffic]) -> int:
    """Characters of a table's columns, with the two between them."""
    return sum(2 + max(len(heading), *(len(cell(t)) for t in traffics)) for heading, cell in columns.items())


def _name_columns(traffics: Sequence[Traffic]) -> dict[str, Cell]:
    """What tells rows apart; only what differs is worth a column."""
    shown = worth_a_column([traffic.row for traffic in traffics], ("model", "method", *SIZES, *COMPARED))
    titles = {"batch_size": "batch", "seq_len": "seq"}
    return {titles.get(name, name.replace("_", " ")): _field(name) for name in shown}


def _field(name: str) -> Cell:
    return lambda t: t.row.cell(name)


def _dram_columns(traffics: Sequence[Traffic]) -> dict[str, Cell]:
    columns: dict[str, Cell] = {
        "DRAM read": _bytes_cell(READ),
        "written": _bytes_cell(WRITE),
        "×": lambda t: _marked(t, format_ratio(t.ratio)),
        "per item": lambda t: _marked(t, format_traffic(t.bytes_per_item)),
        "FLOP/B": lambda t: MISSING if t.intensity is None else f"{_mark(t.flops_estimated)}{t.intensity:.0f}",
        "bandwidth": lambda t: marked(_marked(t, format_rate(t.bandwidth)), t.row.time_doubt),
    }
    if any(traffic.bandwidth_fraction for traffic in traffics):
        columns["of peak"] = lambda t: marked(_marked(t, _percent(t.bandwidth_fraction)), t.row.time_doubt)
    if len({traffic.source for traffic in traffics}) > 1:
        columns["bytes are"] = lambda t: t.source
    return columns


def _cache_columns(traffics: Sequence[Traffic]) -> dict[str, Cell]:
    """What passes above DRAM, and how far the estimate is off; empty if nothing of that is known."""
    figures = {
        "L2 read": "l2_read_bytes",
        "L2 written": "l2_write_bytes",
        "L2 to SM": "l2_to_sm_bytes",
        "SM to L2": "sm_to_l2_bytes",
    }
    known = {
        heading: _bytes_cell(name)
        for heading, name in figures.items()
        if any(traffic.figure(name) is not None for traffic in traffics)
    }
    if any(traffic.estimate_error(READ) is not None for traffic in traffics):
        known["est. read"] = lambda t: _error(t, READ)
        known["est. written"] = lambda t: _error(t, WRITE)
    return known


def _bytes_cell(name: str) -> Cell:
    return lambda t: _marked(t, format_traffic(t.figure(name)))


def _marked(traffic: Traffic, text: str) -> str:
    return text if text == MISSING else _mark(traffic.estimated) + text


def _mark(estimated: bool) -> str:
    return APPROXIMATELY if estimated else ""


def _percent(fraction: float | None) -> str:
    return MISSING if fraction is None else f"{100 * fraction:.0f}%"


def _error(traffic: Traffic, name: str) -> str:
    error = traffic.estimate_error(name)
    if error is None:
        return MISSING
    return f"{100 * error:+.0f}%".replace("-", "−") if round(100 * error) else "0%"


# -- words -------------------------------------------------------------------------------------------------------------


def traffic_verdict(traffics: Sequence[Traffic]) -> list[str]:
    """What the figures say: a paragraph for each size, a sentence for each private method."""
    paragraphs = []
    for group in by_size(traffics):
        compared = [t for t in group if t.row.method != STANDARD and t.ratio is not None]
        if compared:
            paragraphs.append(
                f"{size_in_words(group[0].row.first.spec).capitalize()}: {' '.join(map(_sentence, compared))}"
            )
    return paragraphs


def _sentence(traffic: Traffic) -> str:
    told, source = ("has to move", " (estimate)") if traffic.estimated else ("moves", "")
    ratio = format_ratio(traffic.ratio)
    why = f"{_explain(traffic)}{_explain_time(traffic)}"
    return f"{traffic.row.method} {told} {ratio} the DRAM bytes of {STANDARD}{source}{why}."


def _explain_time(traffic: Traffic) -> str:
    """How much of the extra time the extra bytes alone account for; nothing where either is too small to say."""
    moving, slower, whole = traffic.extra_seconds_at_peak, traffic.extra_seconds, traffic.seconds
    if moving is None or slower is None or whole is None or not traffic.row.steady:
        return ""
    if not SMALLEST * whole <= moving <= slower:
        return ""
    share = f"{format_ms(1e3 * moving)} of the {format_ms(1e3 * slower)} it is slower"
    return f"; moving the extra at the machine's peak bandwidth takes {share}"


def _explain(traffic: Traffic) -> str:
    """Which families make up most of the extra, where kernels were looked at."""
    explanation = traffic.explanation
    if explanation is None or explanation.total <= 0 or (traffic.ratio or 0) <= 1:
        return ""
    kernels = explanation.kernels
    caveat = ""
    if kernels.source == ESTIMATE and not traffic.estimated:
        caveat = " (by the estimate)"
    elif not kernels.complete:
        caveat = f" (of the {kernels.calls_seen} of {kernels.calls_total} kernel launches that were looked at)"
    return f"; {_families_in_words(explanation)}{caveat}"


def _families_in_words(explanation: Explanation) -> str:
    """`61% of the extra is clipping, 20% noise`; where one family's extra is beyond the whole, what the others save."""
    extra, total = explanation.extra, explanation.total
    (most, added), (least, saved) = extra[0], extra[-1]
    if added > total:
        more = f"{FAMILY_LABELS[most]}: {format_traffic(added)} more"
        return f"{more}; {FAMILY_LABELS[least]}: {format_traffic(-saved)} less"
    named: list[str] = []
    explained = 0
    for family, count in extra:
        if explained >= MOST * total or count < SMALLEST * total or len(named) == 3:
            break
        explained += count
        named.append(f"{_percent(count / total)} {'of the extra is ' if not named else ''}{FAMILY_LABELS[family]}")
    return ", ".join(named)


def _notes(traffics: Sequence[Traffic]) -> list[str]:
    notes = [
        "Bytes of one step; 1 GB = 10⁹ bytes. × is the ratio of DRAM bytes to standard. Bandwidth combines the bytes "
        "with the median time of an unprofiled step: a profiler's own times are not step times."
    ]
    if any(traffic.bandwidth is None for traffic in traffics):
        notes.append(f"Bandwidth is {MISSING} where no unprofiled time was measured: add the instrument time.")
    if any(traffic.ratio is None for traffic in traffics):
        notes.append(
            f"× is {MISSING} where standard has no bytes of the same kind: measure it with --methods standard,…"
        )
    if any(traffic.estimate_error(READ) is not None for traffic in traffics):
        notes.append("est.: how far the bytes computed from tensor sizes are from the measured DRAM bytes.")
    if any(t.flops_estimated and not t.estimated for t in traffics):
        notes.append(f"FLOP/B with {APPROXIMATELY}: bytes were counted, operations are those of torch's formulas.")
    for how in dict.fromkeys(str(t.ceilings["how"]) for t in traffics if t.ceilings.get("how")):
        notes.append(f"Peak: {how}.")
    seen = dict.fromkeys(t.kernels.note for t in traffics if t.kernels and t.kernels.source != ESTIMATE)
    notes += [f"Kernels: {note}." for note in seen if note]
    spots = dict.fromkeys(spot for t in traffics if t.estimated for spot in t.estimate.get("blind_spots", ()))
    notes += ["What the estimate does not see:", *(f"- {spot}" for spot in spots)] if spots else []
    return [*notes, *_why_missing(traffics)]


def _why_missing(traffics: Sequence[Traffic]) -> list[str]:
    """A line for each reason: the figures that are not there because of it."""
    names: dict[str, dict[str, None]] = {}
    for traffic in traffics:
        for name, why in (traffic.data.get("missing") or {}).items():
            names.setdefault(str(why), {})[name] = None
    return [f"Not there: {', '.join(found)} ({why})." for why, found in names.items()]
