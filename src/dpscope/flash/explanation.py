"""What the engine does with each parameter, as rows to read or print."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields

from dpscope.flash.taps import Slot


@dataclass(frozen=True)
class ExplanationRow:
    parameter: str
    module: str
    kind: str
    shapes: str
    path: str
    why: str


class Explanation(Sequence[ExplanationRow]):
    """Rows, and a table of them through str()."""

    def __init__(self, rows: Iterable[ExplanationRow]) -> None:
        self.rows = list(rows)

    def __getitem__(self, index: int) -> ExplanationRow:  # type: ignore[override]
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[ExplanationRow]:
        return iter(self.rows)

    def __str__(self) -> str:
        lines = [tuple(field.name for field in fields(ExplanationRow)), *map(astuple, self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def explain_slots(slots: Iterable[Slot]) -> Explanation:
    rows = []
    for slot in slots:
        path, why = ("", slot.why) if slot.decision is None else (slot.decision.path, slot.decision.reason)
        rows.append(ExplanationRow(slot.name, slot.module, slot.kind, slot.shapes, path, why))
    return Explanation(rows)
