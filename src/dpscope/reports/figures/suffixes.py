"""What the names of files end in where a folder holds several sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dpscope.reports.tables import Row, group_by_size, varying_settings
from dpscope.vocabulary.settings import FLAGS

SUFFIX = r"(_.*bs\d+.*)?"  # matches every suffix, and none


def suffixed(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """What is compared with each other, under what tells it apart: `_bs8_seq1024`, or nothing for the only size."""
    groups = group_by_size(rows)
    if len(groups) == 1:
        return {"": groups[0]}
    named: dict[str, list[Row]] = {}
    settings = [each for each in varying_settings(rows, FLAGS) if each.speaks_for_itself or each.is_later]
    several_models = len({row.first.spec["workload"]["name"] for row in rows}) > 1
    for group in groups:
        spec = group[0].first.spec
        parts = [spec["workload"]["name"]] if several_models else []
        parts += [f"bs{spec['batch_size']}"] + ([f"seq{spec['seq_len']}"] if spec.get("seq_len") else [])
        parts += [setting.told_of(spec) for setting in settings]
        suffix = re.sub(r"[^\w.-]+", "-", "".join(f"_{part}" for part in parts))
        number = 2
        while suffix in named:  # they differ in something that has no place in a file's name
            suffix = f"{suffix.rpartition('-')[0] or suffix}-{number}"
            number += 1
        named[suffix] = group
    return named
