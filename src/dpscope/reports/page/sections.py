"""The ten-second answer at each size: a card for each method, below the sentences of its story."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from dpscope.reports.doubt import EXPLAINED, marked
from dpscope.reports.palette import looks_of
from dpscope.reports.report import Report, Size
from dpscope.reports.story import Story
from dpscope.reports.tables import Row
from dpscope.reports.traffic.data import traffic_of
from dpscope.units import MISSING, format_bytes, format_ms, format_ratio, format_throughput, format_traffic
from dpscope.vocabulary.statuses import status_named


@dataclass(frozen=True)
class CardFigure:
    """A ratio to ordinary training with the absolute figure below it."""

    name: str
    ratio: str
    absolute: str
    doubt: str = ""  # what makes it doubtful, for whoever asks what the mark means


@dataclass(frozen=True)
class Card:
    row: Row
    colour: str
    badge: str  # of the winner
    outcome: str  # what became of a method that has no figures
    figures: list[CardFigure]


def make_cards(size: Size, story: Story) -> list[Card]:
    looks = looks_of(size.rows)
    return [
        Card(
            row=row,
            colour=looks[row.method]["colour"],
            badge=story.badge if row.method == story.winner else "",
            outcome="" if row.result.ok else status_named(row.result.status).outcome,
            figures=[figure for figure in _figures(row) if figure.absolute != MISSING],
        )
        for row in size.rows
    ]


def first_size(sizes: Sequence[Size]) -> int:
    """Where the reader begins: the size most is known of, and of those the largest."""
    return max(range(len(sizes)), key=lambda place: (*_known(sizes[place].rows), -place), default=0)


def _known(rows: Sequence[Row]) -> tuple[int, int, int]:
    instruments = {result.instrument for row in rows for result in row.ended_well}
    figures = sum((row.median_ms is not None) + (row.peak_bytes is not None) for row in rows)
    return len(instruments), figures, rows[0].samples * (rows[0].spec.get("seq_len") or 1)


def _figures(row: Row) -> list[CardFigure]:
    # `12.3 ms, 650 samples/s`; tokens where there is a sequence
    rates = [f"{format_throughput(speed)} {name}" for name, speed in row.speeds.items()]
    time = ", ".join(marked(text, row.time_doubt) for text in (format_ms(row.median_ms), *rates[-1:]))
    figures = [
        CardFigure("time", format_ratio(row.time_ratio), time, EXPLAINED.get(row.ratio_doubt, "")),
        CardFigure("memory", format_ratio(row.memory_ratio), format_bytes(row.peak_bytes)),
    ]
    if traffic := traffic_of(row):
        ratio, count = format_ratio(traffic.ratio), format_traffic(traffic.dram_bytes)
        figures.append(CardFigure("DRAM bytes", traffic.show(ratio), traffic.show(count)))
    return figures


@dataclass(frozen=True)
class FileBeside:
    row: str  # method and size
    instrument: str
    name: str
    link: str  # relative to the page


def files_beside(report: Report) -> list[FileBeside]:
    """Those that are there now. A page that is sent alone has none, nor has one whose folder is not known."""
    found = [
        FileBeside(f"{row.method}, {size.label}", instrument, PurePosixPath(path).name, quote(path))
        for size in report.sizes
        for row in size.rows
        for instrument, result in row.measured.items()
        for path in result.files.values()
        if _is_below(path, report.folder)
    ]
    return list(dict.fromkeys(found))


def _is_below(path: object, folder: Path | None) -> bool:
    """Paths come from results, which may be anybody's: only what is a file in the folder itself is linked."""
    if folder is None or not isinstance(path, str) or "\0" in path:
        return False
    pure = PurePosixPath(path)
    return not pure.is_absolute() and ".." not in pure.parts and (folder / pure).is_file()


WHAT = {
    "standard": "Ordinary training, not private: what the others are divided by.",
    "flat": "Opacus as it comes: keeps every sample's gradient of every parameter, clips each and sums them.",
    "ghost": (
        "Opacus's ghost clipping: a first backward pass for the norms of the samples' gradients, a second one for "
        "their clipped sum; no sample's gradient is kept."
    ),
    "flash": (
        "dpscope's flash clipping: one ordinary backward pass, the norms from what it leaves behind, then the clipped "
        "sum with one product a layer; exact, and with Opacus's accountants, loaders and noise."
    ),
}
FOREIGN = "A method of another package than dpscope: its own documentation says what it is."

# Method -> where its engine is imported from, what make_private returns, and what it is asked for beyond the rest.
SWITCHES = {
    "flat": ("opacus", "model, optimizer, loader", ""),
    "ghost": ("opacus", "model, optimizer, criterion, loader", '\n    criterion=criterion, grad_sample_mode="ghost",'),
    "flash": ("dpscope.flash", "model, optimizer, loader", ""),
}
CODE = """\
from {package} import PrivacyEngine

engine = PrivacyEngine()
{returned} = engine.make_private(
    module=model, optimizer=optimizer, data_loader=loader,
    noise_multiplier={noise_multiplier}, max_grad_norm={max_grad_norm},{more}
)"""


@dataclass(frozen=True)
class MethodNote:
    method: str
    colour: str
    what: str
    code: str  # "" where there is nothing to write


def describe_methods(rows: Sequence[Row]) -> list[MethodNote]:
    """Of the methods of all rows, in their order; with the noise and the clipping norm of the first."""
    looks = looks_of(rows)
    return [
        MethodNote(method, looks[method]["colour"], WHAT.get(method, FOREIGN), switch(method, rows[0]))
        for method in dict.fromkeys(row.method for row in rows)
    ]


def switch(method: str, row: Row) -> str:
    """The lines before the training loop, which stays as it is."""
    if method not in SWITCHES:
        return ""
    package, returned, more = SWITCHES[method]
    spec = row.first.spec
    settings = {name: float(spec.get(name, 1.0)) for name in ("noise_multiplier", "max_grad_norm")}
    return CODE.format(package=package, returned=returned, more=more, **settings)
