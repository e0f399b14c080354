"""Missing parts of the page: rows that failed, files that were left out, instruments that were not used.

The page gives commands that measure exactly what is missing, derived from the specs in the results.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpscope.reports.report import Report, Size
from dpscope.reports.tables import SIZES, Row, grouped
from dpscope.results.identity import hashable, identity_of
from dpscope.vocabulary.instruments import INSTRUMENTS
from dpscope.vocabulary.settings import FLAGS, flags_of
from dpscope.workloads.configs.described import import_root, workload_flags

RowSpec = Mapping[str, Any]
SizeOf = tuple[int, int | None]  # batch, sequence


def command_lines(specs: Sequence[RowSpec]) -> list[str]:
    """Return the fewest commands that measure each spec exactly once, to run in the results' folder.

    A command measures all combinations of its methods, batch sizes and sequence lengths, so only sizes that form a
    whole product share one. Specs that no command can express (see `can_be_typed`) have none.
    """
    beside = dict.fromkeys(("method", *SIZES))  # what the specs of one command may differ in
    groups = grouped(filter(can_be_typed, specs), lambda spec: json.dumps({**spec, **beside}, sort_keys=True))
    return [
        _line(group[0], methods, batches, lengths)
        for group in groups.values()
        for methods, sizes in _sizes_by_methods(group).items()
        for batches, lengths in products(sizes)
    ]


def can_be_typed(spec: RowSpec) -> bool:
    """Return whether a command exists for this spec: not for a model made in Python, nor for a name with a comma."""
    return workload_flags(spec["workload"]) is not None and "," not in spec["method"]


def products(sizes: Iterable[SizeOf]) -> list[tuple[tuple[int, ...], list[int | None]]]:
    """Return the sizes as products of batch sizes and sequence lengths that hold each size once, and no other."""
    at_length = {
        length: tuple(batch for batch, _ in own) for length, own in grouped(sizes, lambda size: size[1]).items()
    }
    alike = grouped(at_length, lambda length: (length is None, at_length[length]))
    return [(batches, lengths) for (_, batches), lengths in alike.items()]


def _sizes_by_methods(specs: Sequence[RowSpec]) -> dict[tuple[str, ...], list[SizeOf]]:
    at_size = grouped(specs, lambda spec: (spec["batch_size"], spec.get("seq_len")))
    methods = {size: tuple(dict.fromkeys(spec["method"] for spec in own)) for size, own in at_size.items()}
    return grouped(sorted(methods, key=lambda size: (size[0], size[1] or 0)), methods.__getitem__)


def _line(spec: RowSpec, methods: Sequence[str], batches: Sequence[int], lengths: Sequence[int | None]) -> str:
    lists = {"methods": methods, "batch_size": batches, "seq_len": [length for length in lengths if length]}
    told = {name: ",".join(map(str, values)) for name, values in lists.items() if values}
    told |= {name: spec[name] for name in FLAGS if name in spec}
    words = [*_subcommand(spec), *(workload_flags(spec["workload"]) or ()), *flags_of(told), "--out", ".", "--resume"]
    root = import_root(spec["workload"])
    return " ".join([*([f"PYTHONPATH={_quote(root)}:$PYTHONPATH"] if root else []), "dpscope", *map(_quote, words)])


def _subcommand(spec: RowSpec) -> list[str]:
    """Return the subcommand: `compare` for one instrument alone, or the instrument's own for its options."""
    instrument, options = spec["instrument"], spec.get("options") or {}
    log = ["--no-log"] if instrument == "trace" else []  # which is no part of the results
    return [instrument, *flags_of(options), *log] if options else ["compare", "--instruments", instrument]


def _quote(word: str) -> str:
    """Quote a word for a shell, except a leading ~, which the shell replaces by the home folder."""
    home, slash, rest = word.partition("/")
    if home != "~":
        return shlex.quote(word)
    return home + slash + (shlex.quote(rest) if rest else "")


# Instruments in the order in which they are missed: those that need tools of their own come last.
IN_ORDER = sorted(INSTRUMENTS, key=lambda name: not INSTRUMENTS[name].works_everywhere)


@dataclass(frozen=True)
class InstrumentGap:
    """Instrument without figures for some rows, and the commands that measure exactly those."""

    what: str
    where: str  # "" for nowhere on the page
    commands: list[str]
    untyped: str  # rows of models that were made in Python: no command can name them


@dataclass(frozen=True)
class Missing:
    failed: list[tuple[str, str, str, str]]  # method, size, status, reason
    skipped: list[tuple[str, str]]  # file, reason
    gaps: list[InstrumentGap]


Lacking = tuple[str, Size, dict[str, Any]]  # a method, where it was not looked at, the spec that would


def find_missing(report: Report) -> Missing:
    sizes = report.sizes
    failed = [
        (row.method, size.label, result.status, result.reason or "no reason given")
        for size in sizes
        for row in size.rows
        for result in row.measured.values()
        if not result.ok
    ]
    skipped = [(item.path.name, item.reason) for item in report.skipped]
    gaps = [gap for instrument in IN_ORDER if (gap := _gap(instrument, sizes))]
    return Missing(list(dict.fromkeys(failed)), skipped, gaps)


def _gap(instrument: str, sizes: Sequence[Size]) -> InstrumentGap | None:
    lacking = list(_lacking(instrument, sizes))
    if not lacking:
        return None
    everywhere = not any(instrument in row.measured for size in sizes for row in size.rows)
    about = INSTRUMENTS[instrument]
    specs = [spec for *_, spec in lacking]
    noted = about.cpu_note and all(spec.get("device") == "cpu" for spec in specs)
    return InstrumentGap(
        what=about.shows + (f" ({about.cpu_note})" if noted else ""),
        where="" if everywhere else _where(lacking),
        commands=command_lines(specs),
        untyped=_where([each for each in lacking if not can_be_typed(each[-1])]),
    )


def _lacking(instrument: str, sizes: Sequence[Size]) -> Iterator[Lacking]:
    """Yield the rows that the instrument could have measured but did not, each once."""
    seen: set[Hashable] = set()
    for size in sizes:
        for row in size.rows:
            spec = {**row.looked_at, "instrument": instrument, "options": _options(instrument, size, sizes)}
            row_of_any_steps = (row.method, hashable(identity_of(row.spec)))
            if instrument in row.measured or row_of_any_steps in seen or not _works(row, instrument):
                continue
            seen.add(row_of_any_steps)
            yield row.method, size, spec


def _works(row: Row, instrument: str) -> bool:
    """Return whether the instrument could measure this row: not if it failed, nor on a CPU if it needs a GPU."""
    plain = row.measured.get("time")
    trains = plain.ok if plain is not None else all(result.ok for result in row.measured.values())
    return trains and not (INSTRUMENTS[instrument].gpu_only and row.looked_at.get("device") == "cpu")


def _options(instrument: str, size: Size, sizes: Sequence[Size]) -> dict[str, Any]:
    """Return the instrument's options for rows of this size or setting, so that compared rows are measured alike."""
    nearest = [size, *(other for other in sizes if other.setting == size.setting)]
    found = (row.measured[instrument].spec for near in nearest for row in near.rows if instrument in row.measured)
    return dict(next(found, {}).get("options") or {})


def _where(lacking: Sequence[Lacking], most: int = 4) -> str:
    """Return the sizes, and the missing methods if only some of a size were measured."""
    words = []
    for size, found in grouped(lacking, lambda each: each[1]).items():
        whole = len(found) == len({row.method for row in size.rows})
        words.append(size.label if whole else f"{size.label} ({', '.join(method for method, *_ in found)})")
    rest = f"; and {len(words) - most} more" if len(words) > most else ""
    return "; ".join(words[:most]) + rest
