"""A file that reports write, declared beside the function that writes it: its name, and what it holds.

Writing, naming, removing and documenting files all go through these declarations (`reports/outputs.py` lists them).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dpscope.reports.drawing import FORMATS, save
from dpscope.reports.report import Report
from dpscope.reports.tables import SIZES, Row, group_by_size, worth_a_column
from dpscope.results.store import write_atomically
from dpscope.vocabulary.settings import FLAGS, SETTINGS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIRST = 2000  # characters of a file that its mark stands in
Content = TypeVar("Content")  # a Report, or two sweeps side by side
LETTERS = {"batch_size": "bs", "seq_len": "seq"}
SUFFIX = r"(_.*bs\d+.*)?"  # matches every suffix, and none


def suffixed(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the groups of compared rows by file suffix: `_bs8_seq1024`; empty if there is only one size."""
    groups = group_by_size(rows)
    if len(groups) == 1:
        return {"": groups[0]}
    named: dict[str, list[Row]] = {}
    settings = [name for name in FLAGS if SETTINGS[name].speaks_for_itself or SETTINGS[name].is_later]
    shown = worth_a_column(rows, ("model", *SIZES, *settings))
    for group in groups:
        known = {name: f"{LETTERS.get(name, '')}{v}" for name in shown if (v := group[0].field(name)) is not None}
        told = known.keys() & SETTINGS.keys() - LETTERS.keys()
        parts = [SETTINGS[name].in_words(group[0].spec) if name in told else part for name, part in known.items()]
        suffix = re.sub(r"[^\w.-]+", "-", "".join(f"_{part}" for part in parts))
        number = 2
        while suffix in named:  # they differ in something that has no place in a file's name
            suffix = f"{suffix.rpartition('-')[0] or suffix}-{number}"
            number += 1
        named[suffix] = group
    return named


@dataclass(frozen=True, kw_only=True)
class Output(Generic[Content]):
    """Kind of output file. `write` returns the files that it wrote: none if there is nothing to say."""

    name: str  # of a figure: without size and format
    holds: str  # what it holds, for people
    write: Callable[[Content, Path, Sequence[str]], list[Path]]  # the last: formats of figures
    figure: bool = False
    asked_for: str = ""  # written only on this wish: "csv", "latex"
    mark: str = ""  # what its first characters hold, for names that others use too

    def has_name(self, name: str) -> bool:
        pattern = rf"{re.escape(self.name)}{SUFFIX}\.({'|'.join(FORMATS)})" if self.figure else re.escape(self.name)
        return re.fullmatch(pattern, name) is not None

    def is_marked(self, path: Path) -> bool:
        if not self.mark:
            return True
        with path.open(encoding="utf-8", errors="replace") as file:
            head = file.read(FIRST)
        return head.startswith(self.mark) if path.suffix == ".txt" else self.mark in head


def text_output(
    name: str, holds: str, render: Callable[[Content], str], *, asked_for: str = "", mark: str = ""
) -> Output[Content]:
    """Return a file of text; none if `render` gives an empty one."""

    def write(subject: Content, folder: Path, formats: Sequence[str]) -> list[Path]:
        if not (text := render(subject)):
            return []
        write_atomically(folder / name, text)
        return [folder / name]

    return Output(name=name, holds=holds, write=write, asked_for=asked_for, mark=mark)


def figure_output(
    name: str,
    holds: str,
    draw: Callable[[Sequence[Row]], Figure | None],
    *,
    instrument: str = "",
    sizes_apart: bool = True,
) -> Output[Report]:
    """Return a picture in each format; with several sizes one for each of them, named by its size, or all in one."""

    def write(report: Report, folder: Path, formats: Sequence[str]) -> list[Path]:
        rows = report.rows_of(instrument)
        groups = suffixed(rows) if sizes_apart else {"": rows}
        drawn = {suffix: figure for suffix, group in groups.items() if (figure := draw(group)) is not None}
        return [path for suffix, figure in drawn.items() for path in save(figure, folder, name + suffix, formats)]

    return Output(name=name, holds=holds, write=write, figure=True)


def csv_output(
    name: str, holds: str, lines: Callable[[Sequence[Row]], Sequence[Mapping[str, Any]]], *, instrument: str
) -> Output[Report]:
    """Return a table for spreadsheets, its columns those of the first line."""
    return text_output(name, holds, lambda report: to_csv(lines(report.rows_of(instrument))))


def to_csv(lines: Sequence[Mapping[str, Any]]) -> str:
    if not lines:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()
