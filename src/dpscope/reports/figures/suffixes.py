"""What the names of files end in where a folder holds several sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dpscope.reports.tables import SIZES, Row, group_by_size, worth_a_column
from dpscope.vocabulary.settings import FLAGS, SETTINGS

LETTERS = {"batch_size": "bs", "seq_len": "seq"}
SUFFIX = r"(_.*bs\d+.*)?"  # matches every suffix, and none


def suffixed(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """What is compared with each other, under what tells it apart: `_bs8_seq1024`, or nothing for the only size."""
    groups = group_by_size(rows)
    if len(groups) == 1:
        return {"": groups[0]}
    named: dict[str, list[Row]] = {}
    settings = [name for name in FLAGS if SETTINGS[name].speaks_for_itself or SETTINGS[name].is_later]
    shown = worth_a_column(rows, ("model", *SIZES, *settings))
    for group in groups:
        parts = [_part(group[0], name) for name in shown if group[0].field(name) is not None]
        suffix = re.sub(r"[^\w.-]+", "-", "".join(f"_{part}" for part in parts))
        number = 2
        while suffix in named:  # they differ in something that has no place in a file's name
            suffix = f"{suffix.rpartition('-')[0] or suffix}-{number}"
            number += 1
        named[suffix] = group
    return named


def _part(row: Row, name: str) -> str:
    if name in SETTINGS and name not in LETTERS:
        return SETTINGS[name].in_words(row.spec)
    return f"{LETTERS.get(name, '')}{row.field(name)}"
