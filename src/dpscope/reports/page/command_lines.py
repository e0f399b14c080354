"""Command lines that measure given specs and nothing else, made from what results say of their specs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dpscope.reports.tables import SIZES, grouped
from dpscope.vocabulary.flags import flags_of
from dpscope.vocabulary.settings import FLAGS
from dpscope.workloads.configs.described import import_root, workload_flags

RowSpec = Mapping[str, Any]
SizeOf = tuple[int, int | None]  # batch, sequence


def command_lines(specs: Sequence[RowSpec]) -> list[str]:
    """Return as few commands as measure each of the specs once and nothing else, to run in the results' folder.

    Commands measure every method at every batch size and every sequence length that they name, so only sizes that are
    a whole product share one. Specs that no command can express (see `can_be_typed`) have none.
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
    """Tell if a command exists for this spec: not for a model made in Python, nor for a name with a comma."""
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
