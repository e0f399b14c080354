"""Colours of components, phases, kernel families and methods, the same in every figure and page.

Paul Tol's "muted" scheme: told apart with any kind of colour vision. Components that only private training has are in
its three reds and purples, and hatched, so that they stand out in grey print too.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from dpscope.reports.tables import Row
from dpscope.vocabulary import families

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
    families.GEMM: INDIGO,
    families.ATTENTION: "#88CCEE",
    families.ELEMENTWISE: "#44AA99",
    families.REDUCTION: "#117733",
    families.NORMALISATION: "#999933",
    families.OPTIMIZER_FAMILY: "#DDCC77",
    families.CLIPPING: "#CC6677",
    families.NOISE_FAMILY: "#882255",
    families.COPY: "#AA4499",
    families.EMBEDDING: "#6699CC",
    families.COLLECTIVE: "#EE8866",
    families.OTHER: "#DDDDDD",
}
PRIVATE_FAMILIES = {families.CLIPPING, families.NOISE_FAMILY}
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
