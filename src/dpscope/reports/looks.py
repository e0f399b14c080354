"""Names as people read them, in text and figures alike; and the colours that stand for them.

Paul Tol's "muted" scheme: told apart with any kind of colour vision. Components that only private training has are in
its three reds and purples, and hatched, so that they stand out in grey print too.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence

from rich.text import Text

from dpscope.plain_text import Column, Item
from dpscope.reports.tables import Row, heading_of, worth_a_column
from dpscope.units import MISSING
from dpscope.vocabulary import phases
from dpscope.vocabulary.components import PEAK_SOURCES
from dpscope.vocabulary.settings import COMPARED

LONGEST_IN_PROSE = 96  # characters
ARGUMENTS = re.compile(r"<[^<>]*>|\([^()]*\)")  # of templates and calls, innermost
LAST_WORD = re.compile(r"[\w:.~-]*$")
AUTOGRAD_NODE = ("autograd::engine::evaluate_function: ", "autograd: ")  # as torch names it, and as reports do


def peak_notes(sources: Iterable[str]) -> list[str]:
    """Return what the peaks of a table are, a sentence for each way in which they were measured."""
    return [f"Peak memory: {PEAK_SOURCES[source]}." for source in dict.fromkeys(sources) if source in PEAK_SOURCES]


def spread_in_words(spread: tuple[float, float] | None) -> str:
    """Return `12.1–12.6`: 10th and 90th percentile in milliseconds."""
    return MISSING if spread is None else f"{spread[0]:.1f}–{spread[1]:.1f}"


def shorten(text: str, length: int) -> str:
    """Keep both ends of a long name: they are what tells modules apart."""
    if len(text) <= length:
        return text
    tail = (length - 1) // 2
    return f"{text[: length - 1 - tail]}…{text[len(text) - tail :]}"


def in_longest_order(lists: Iterable[Collection[str]]) -> list[str]:
    """Return every name of some lists once, in the order of the longest."""
    return list(dict.fromkeys(name for names in sorted(lists, key=len, reverse=True) for name in names))


def distinct(names: Sequence[str]) -> list[str]:
    """Add numbers to repeated names: `flat`, `flat (2)`."""
    return [name if name not in names[:n] else f"{name} ({names[:n].count(name) + 1})" for n, name in enumerate(names)]


def in_prose(name: str) -> str:
    """Return the name, shortened if it is too long: first its template arguments, then whole words at its end."""
    plain = name.replace(*AUTOGRAD_NODE)
    if len(plain) <= LONGEST_IN_PROSE:
        return plain
    while (shorter := ARGUMENTS.sub("", plain)) != plain:
        plain = shorter
    if len(plain) <= LONGEST_IN_PROSE:
        return plain
    kept = LAST_WORD.sub("", plain[:LONGEST_IN_PROSE])
    return f"{kept.rstrip()} …" if kept.strip() else plain


def operator_label(name: str, length: int) -> str:
    """Return a short label that still tells operators apart: autograd's nodes without the engine's prefix."""
    return shorten(name.replace(*AUTOGRAD_NODE), length)


LONGEST_METHOD = 24  # characters
NUMBERS = {"batch": 5, "seq": 3, "warmup": 6, "steps": 5}  # fields that are, and the least that their columns take


def identity_columns(
    rows: Sequence[Row], row_of: Callable[[Item], Row], more: Sequence[str] = ()
) -> list[Column[Item]]:
    """Return the fields that distinguish the rows of some items, long names shortened; `more`: further fields."""

    def column(name: str) -> Column[Item]:
        longest = LONGEST_METHOD if name == "method" else 10**6
        return heading_of(name), lambda item: Text(shorten(row_of(item).cell(name), longest))

    names = worth_a_column(rows, ("model", "method", "batch_size", "seq_len", *COMPARED, *more))
    return [column(name) for name in names]


INDIGO = "#332288"
INK, BLANK = "#000000", "#FFFFFF"  # drawn in a page's own ink, and with an outline only
ON_DARK = {INDIGO: "#6f63d2"}  # what would not be seen on a dark page -> what is drawn there instead

COMPONENT_COLOURS = {
    "model_parameters": INDIGO,
    "optimizer_states": "#88CCEE",
    "gradients": "#44AA99",
    "activations": "#117733",
    "activation_hooks": "#CC6677",
    "per_sample_gradients": "#882255",
    "norm_samples": "#AA4499",
    "temp_matrices": "#DDCC77",
    "inputs": "#999933",
    "unattributed": "#DDDDDD",
}

# Phases of a step, with what lies between them; what only private training does in the same reds.
PHASE_COLOURS = {
    "forward": "#88CCEE",
    "backward": INDIGO,
    "clip": "#CC6677",
    "noise": "#882255",
    "optimizer": "#44AA99",
    "between phases": "#DDDDDD",
    "wait for the GPU": "#BBBBBB",
    "GPU idle": BLANK,
}

# Families of kernels; what privacy adds is hatched besides.
FAMILY_COLOURS = {
    phases.GEMM: INDIGO,
    phases.ATTENTION: "#88CCEE",
    phases.ELEMENTWISE: "#44AA99",
    phases.REDUCTION: "#117733",
    phases.NORMALISATION: "#999933",
    phases.OPTIMIZER_FAMILY: "#DDCC77",
    phases.CLIPPING: "#CC6677",
    phases.NOISE_FAMILY: "#882255",
    phases.COPY: "#AA4499",
    phases.EMBEDDING: "#6699CC",
    phases.COLLECTIVE: "#EE8866",
    phases.OTHER: "#DDDDDD",
}
PRIVATE_FAMILIES = {phases.CLIPPING, phases.NOISE_FAMILY}
DIRECTION_COLOURS = {"read": "#4477AA", "written": "#DDAA33"}

# What takes more than in ordinary training, and what takes less; the same between two sweeps.
GREW, SHRANK = "#CC6677", "#44AA99"
MORE, LESS = "#D55E00", "#009E73"

# For components that a user's own rule names: chosen by name, so that it is the same colour in every report.
OWN_COLOURS = ("#BBBBBB", "#EE8866", "#77AADD", "#FFAABB", "#AAAA00")

# Okabe and Ito's colours and unlike markers, for methods as points.
METHOD_COLOURS = (INK, "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
METHOD_MARKERS = "osD^vP*X<>ph"
BUILT_IN_METHODS = ("standard", "flat", "ghost", "flash")


def colour_of(component: str) -> str:
    own = OWN_COLOURS[zlib.crc32(component.encode()) % len(OWN_COLOURS)]
    return COMPONENT_COLOURS.get(component, own)


def method_looks(methods: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return colour and marker of each method, which tell methods apart in grey print too.

    Built-in methods have fixed looks. Another package's method gets one by its name, the same in every report. If two
    methods of a report would look alike, the later one in the alphabet takes the next free look.
    """
    names = list(dict.fromkeys(methods))
    colours, markers = (_by_name(names, looks) for looks in (METHOD_COLOURS, METHOD_MARKERS))
    return {name: {"colour": colours[name], "marker": markers[name]} for name in names}


def _by_name(names: Sequence[str], looks: Sequence[str]) -> dict[str, str]:
    chosen = {name: looks[BUILT_IN_METHODS.index(name)] for name in names if name in BUILT_IN_METHODS}
    others = looks[len(BUILT_IN_METHODS) :]
    for name in sorted(set(names) - set(chosen)):
        start = zlib.crc32(name.encode()) % len(others)
        order = [*others[start:], *others[:start], *looks]
        chosen[name] = next((look for look in order if look not in chosen.values()), order[0])
    return chosen


def phase_colour(phase: str) -> str:
    return PHASE_COLOURS.get(phase, "#999933")


def is_dark(colour: str) -> bool:
    """Return whether white text is readable on a colour: its relative luminance is below middle grey."""
    shares = (0.2126, 0.7152, 0.0722)  # of red, green and blue light
    levels = (int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
    return sum(share * float(level**2.2) for share, level in zip(shares, levels, strict=True)) < 0.18


def looks_of(rows: Sequence[Row]) -> dict[str, dict[str, str]]:
    """Return the look of each method that was compared with these rows' results."""
    return method_looks(method for row in rows for method in (*row.methods, row.method))
