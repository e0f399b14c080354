"""The bytes a step moves, in tables and in plain words. An estimate is marked everywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dpscope.plain_text import Column, FirstThatFits, bare_table, table_of
from dpscope.reports.looks import NUMBERS, identity_columns
from dpscope.reports.tables import Row, marked
from dpscope.reports.traffic import data
from dpscope.results.payloads.ncu import BYTES, READ, WRITE, Direction, moved
from dpscope.units import MISSING, format_ms, format_rate, format_ratio, format_traffic
from dpscope.vocabulary.methods import STANDARD
from dpscope.vocabulary.phases import FAMILIES, FAMILY_LABELS

MOST_OF_EXTRA = 0.8  # a verdict names families until they make up this share of the extra
NARROW_TRAFFIC = 90  # columns of a terminal
LISTED_KERNELS = 5  # of each method
OTHERS = "others"  # kernels that the measurement added up

CellOf = Callable[[data.Traffic], str]


def traffic_section(rows: Sequence[Row], width: int) -> list[RenderableType]:
    """Return the section on traffic; nothing unless some row has it."""
    groups = data.by_size(rows)
    traffics = [traffic for group in groups for traffic in group]
    if not traffics:
        return []
    mixed = len({traffic.source for traffic in traffics}) > 1
    versions = dict.fromkeys(v for t in traffics if not t.estimated and (v := t.data.get("ncu_version")))
    by = f", counted by Nsight Compute {', '.join(versions)}" if versions else ""
    parts: list[RenderableType] = [Text(f"DRAM traffic of one step{by}", style="bold"), *_warnings(traffics)]
    parts += [_table(traffics, {**DRAM, **_known(OF_PEAK, traffics), **(SOURCE if mixed else {})})]
    if caches := _known(CACHES, traffics):
        parts += ["", _table(traffics, caches)]
    if sentences := traffic_verdict(groups):
        parts += ["", *map(Text, sentences)]
    # Kernels, or operators, of the size that moves most: traffic_kernels.csv has all sizes.
    seen = [[traffic for traffic in group if traffic.kernels] for group in groups]
    largest = max(seen, key=lambda group: max((traffic.dram_bytes or 0 for traffic in group), default=-1))
    parts += _family_table(largest)
    parts += [part for traffic in largest for part in _kernel_table(traffic, narrow=width < NARROW_TRAFFIC)]
    return [*parts, "", *(Text(note, style="dim") for note in _notes(traffics))]


def _warnings(traffics: Sequence[data.Traffic]) -> list[RenderableType]:
    """Return the warnings that come before the figures."""
    estimates = [traffic for traffic in traffics if traffic.estimated]
    if not estimates:
        return []
    who = "All figures" if len(estimates) == len(traffics) else f"Figures marked {data.APPROXIMATELY}"
    reasons = dict.fromkeys(reason for traffic in estimates if (reason := traffic.data.get("reason")))
    lines = [f"ESTIMATE: {who} are computed from tensor sizes, not measured.", *reasons]
    return [Text(line, style="yellow") for line in lines]


# -- tables ------------------------------------------------------------------------------------------------------------


def _bytes_cell(name: str) -> CellOf:
    return lambda t: t.show(format_traffic(t.figure(name)))


def _error_cell(name: Direction) -> CellOf:
    return lambda t: "0%" if (text := _percent(t.estimate_error(name), "+")) in ("+0%", "−0%") else text


def _percent(fraction: float | None, sign: str = "") -> str:
    return MISSING if fraction is None else f"{100 * fraction:{sign}.0f}%".replace("-", "−")


DRAM: dict[str, CellOf] = {
    BYTES[READ]: _bytes_cell(READ),
    BYTES[WRITE]: _bytes_cell(WRITE),
    "×": lambda t: t.show(format_ratio(t.ratio)),
    "per item": lambda t: t.show(format_traffic(t.bytes_per_item)),
    "FLOP/B": lambda t: (
        MISSING if t.intensity is None else data.marked_estimate(f"{t.intensity:.0f}", t.flops_estimated)
    ),
    "bandwidth": lambda t: marked(t.show(format_rate(t.bandwidth)), t.row.time_doubt),
}
OF_PEAK: dict[str, CellOf] = {"of peak": lambda t: marked(t.show(_percent(t.bandwidth_fraction)), t.row.time_doubt)}
SOURCE: dict[str, CellOf] = {"bytes are": lambda t: t.source}
# What passes above DRAM, and how far the estimate is off.
CACHES: dict[str, CellOf] = {
    **{heading: _bytes_cell(name) for name, heading in BYTES.items() if heading and heading not in DRAM},
    "est. read": _error_cell(READ),
    "est. written": _error_cell(WRITE),
}
# Where a terminal is too narrow, columns go in this order; what tells rows apart, bytes and ratio always stay.
EXPENDABLE = ("SM to L2", "of peak", "FLOP/B", "per item", "est. read", "est. written", "bandwidth", "L2 to SM")


def _known(columns: Mapping[str, CellOf], traffics: Sequence[data.Traffic]) -> dict[str, CellOf]:
    return {heading: cell for heading, cell in columns.items() if any(cell(t) != MISSING for t in traffics)}


def _table(traffics: Sequence[data.Traffic], columns: Mapping[str, CellOf]) -> RenderableType:
    """Return a table of the distinguishing fields, and as many columns as fit."""
    identity: list[Column[data.Traffic]] = identity_columns([each.row for each in traffics], lambda each: each.row)
    left = [heading for heading, _ in identity if heading not in NUMBERS]
    items = "/".join(dict.fromkeys(traffic.items[1] for traffic in traffics))

    def without(dropped: Sequence[str]) -> Table:
        kept = [(name.replace("item", items), cell) for name, cell in columns.items() if name not in dropped]
        return table_of(traffics, [*identity, *kept], left=left)

    return FirstThatFits(lambda bars: (without(EXPENDABLE[:number]) for number in range(len(EXPENDABLE) + 1)))


def _family_table(group: Sequence[data.Traffic]) -> list[RenderableType]:
    """Return where the bytes of rows of one size go, all of them seen in the same way."""
    alike = data.kernels_alike(group)
    if not alike:
        return []
    shares = [kernels.bytes_by_family() for kernels in alike]
    estimated = alike[0].estimated
    table = bare_table("", *(traffic.method for traffic in group))
    table.columns[0].no_wrap = False
    for family in FAMILIES:
        if any(share.get(family, 0) >= data.SMALLEST * sum(share.values()) for share in shares):
            counts = [format_traffic(share.get(family)) for share in shares]
            table.add_row(FAMILY_LABELS[family], *(data.marked_estimate(count, estimated) for count in counts))
    told = "estimate, by operator" if estimated else "by kernel"
    return ["", Text(f"Where the DRAM bytes go: {group[0].row.where} ({told})", style="bold"), table]


def _kernel_table(traffic: data.Traffic, *, narrow: bool) -> list[RenderableType]:
    """Return the measured kernels that move most."""
    kernels = traffic.kernels
    if kernels is None or kernels.estimated:
        return []
    total = sum(map(moved, kernels.rows)) or 1
    texts = ("family",) if narrow else ("family", "phase")
    table = bare_table(f"{traffic.method}: kernel", *texts, "calls", "DRAM", "share", left=texts)
    table.columns[0].max_width = 30 if narrow else 52
    named = [row for row in kernels.rows if row["name"] != OTHERS]
    for row in sorted(named, key=moved, reverse=True)[:LISTED_KERNELS]:
        phase = () if narrow else (row.get("phase") or MISSING,)
        figures = (str(row.get("calls", 1)), format_traffic(moved(row)), _percent(moved(row) / total))
        table.add_row(row["name"], row["family"], *phase, *figures)
    return ["", table]


# -- words -------------------------------------------------------------------------------------------------------------


def traffic_verdict(groups: data.TrafficGroups) -> list[str]:
    """Return the conclusions: a paragraph for each size, a sentence for each private method."""
    compared = [[t for t in group if t.method != STANDARD and t.ratio is not None] for group in groups]
    return [f"{group[0].row.where.capitalize()}: {' '.join(map(_sentence, group))}" for group in compared if group]


def _sentence(traffic: data.Traffic) -> str:
    told, source = ("has to move", " (estimate)") if traffic.estimated else ("moves", "")
    moves = f"{traffic.method} {told} {format_ratio(traffic.ratio)} the DRAM bytes of {STANDARD}{source}"
    return "; ".join(filter(None, (moves, _explain(traffic), _explain_time(traffic)))) + "."


def _explain(traffic: data.Traffic) -> str:
    """Explain which families make up most of the extra, if kernels were counted."""
    extra = traffic.extra_bytes
    if extra is None or extra.total <= 0 or (traffic.ratio or 0) <= 1:
        return ""
    kernels, told = extra.kernels, _families_in_words(extra)
    if kernels.estimated and not traffic.estimated:
        return f"{told} (by the estimate)"
    looked_at = f"{kernels.calls_seen} of {kernels.calls_total} kernel launches that were looked at"
    return told if kernels.complete else f"{told} (of the {looked_at})"


def _families_in_words(extra: data.ExtraBytes) -> str:
    """Return `61% of the extra is clipping, 20% noise`; if one family exceeds the whole, what the others save."""
    (most, added), (least, saved) = extra.by_family[0], extra.by_family[-1]
    if added > extra.total:
        more = f"{FAMILY_LABELS[most]}: {format_traffic(added)} more"
        return f"{more}; {FAMILY_LABELS[least]}: {format_traffic(-saved)} less"
    named: list[str] = []
    explained = 0.0
    for family, share in ((family, count / extra.total) for family, count in extra.by_family[:3]):
        if explained < MOST_OF_EXTRA and share >= data.SMALLEST:
            named.append(f"{_percent(share)} {'' if named else 'of the extra is '}{FAMILY_LABELS[family]}")
            explained += share
    return ", ".join(named)


def _explain_time(traffic: data.Traffic) -> str:
    """Return how much of the extra time the extra bytes alone account for; nothing if either is too small to say."""
    moving, slower, whole = traffic.extra_seconds_at_peak, traffic.extra_seconds, traffic.seconds
    if moving is None or slower is None or whole is None or traffic.row.ratio_doubt:
        return ""
    share = f"{format_ms(1e3 * moving)} of the {format_ms(1e3 * slower)} it is slower"
    told = f"moving the extra at the machine's peak bandwidth takes {share}"
    return told if data.SMALLEST * whole <= moving <= slower else ""


def _notes(traffics: Sequence[data.Traffic]) -> list[str]:
    notes = [
        "Bytes of one step; 1 GB = 10⁹ bytes. × is the ratio of DRAM bytes to standard. Bandwidth combines the bytes "
        "with the median time of an unprofiled step: a profiler's own times are not step times."
    ]
    if any(t.bandwidth is None for t in traffics):
        notes.append(f"Bandwidth is {MISSING} where no unprofiled time was measured: add the instrument time.")
    if any(t.ratio is None for t in traffics):
        notes.append(
            f"× is {MISSING} where standard has no bytes of the same kind: measure it with --methods standard,…"
        )
    if any(t.estimate_error(READ) is not None for t in traffics):
        notes.append("est.: how far the bytes computed from tensor sizes are from the measured DRAM bytes.")
    if any(t.flops_estimated and not t.estimated for t in traffics):
        notes.append(f"FLOP/B with {data.APPROXIMATELY}: bytes were counted, operations are those of torch's formulas.")
    peaks = dict.fromkeys(how for t in traffics if (how := t.ceilings.get("how")))
    seen = dict.fromkeys(k.note for t in traffics if (k := t.kernels) and not k.estimated and k.note)
    spots = dict.fromkeys(spot for t in traffics if t.estimated for spot in t.estimate.get("blind_spots", []))
    notes += [*(f"Peak: {how}." for how in peaks), *(f"Kernels: {note}." for note in seen)]
    notes += ["What the estimate does not see:", *(f"- {spot}" for spot in spots)] if spots else []
    missing: dict[str, dict[str, None]] = {}  # why -> figures that are not there because of it
    for traffic in traffics:
        for name, why in traffic.data.get("missing", {}).items():
            missing.setdefault(why, {})[name] = None
    return [*notes, *(f"Not there: {', '.join(names)} ({why})." for why, names in missing.items())]
