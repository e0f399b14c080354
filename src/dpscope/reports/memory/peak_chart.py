"""What each method's peak is made of, beside ordinary training's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpscope.reports.memory.chart_series import looks, unit_for, without
from dpscope.reports.memory.data import Composition, described_of, label_of, present, standard_of, undescribed
from dpscope.reports.memory.text import TRIFLE, signed
from dpscope.reports.page.chart import Table, View, chart_by_size
from dpscope.reports.tables import Row
from dpscope.units import format_bytes, format_ratio


def _view(rows: Sequence[Row]) -> View | None:
    described = described_of(rows)
    if not described:
        return None
    keys = present(composition.components for composition in described.values())
    standard = standard_of(described)
    bars: list[dict[str, Any]] = [
        {
            "method": row.method,
            "maker": composition.maker,
            "total": composition.total,
            "ratio": _ratio(composition, standard),
            "bytes": [composition.components.get(key, 0) for key in keys],
        }
        for row, composition in described.items()
    ]
    told = [f"{row.method} holds {_in_words(composition, standard)}" for row, composition in described.items()]
    return View(
        says=f"At the peak {', '.join(told)}.{without(undescribed(rows))}",
        data={
            "components": looks(keys),
            "bars": bars,
            "standard": next((place for place, each in enumerate(described.values()) if each is standard), None),
            "unit": unit_for(max(bar["total"] for bar in bars)),
        },
        table=Table(
            columns=("method", "total_bytes", "ratio_to_standard", *(f"{key}_bytes" for key in keys), "reached_in"),
            rows=[(bar["method"], bar["total"], bar["ratio"], *bar["bytes"], bar["maker"]) for bar in bars],
        ),
    )


def _ratio(composition: Composition, standard: Composition | None) -> float | None:
    return composition.total / standard.total if standard and standard.total > 0 else None


def _in_words(composition: Composition, standard: Composition | None) -> str:
    """`52.8 GiB (1.75×, above all per-sample gradients +18.9 GiB)`"""
    holds = format_bytes(composition.total)
    ratio = _ratio(composition, standard)
    if standard is None or composition is standard or ratio is None:
        return holds
    extra = composition.extra_over(standard)
    most = (max if sum(extra.values()) >= 0 else min)(extra, key=lambda key: extra[key])
    named = f", above all {label_of(most)} {signed(extra[most])}" if abs(extra[most]) >= TRIFLE * standard.total else ""
    return f"{holds} ({format_ratio(ratio)}{named})"


memory_peak = chart_by_size(
    _view,
    key="memory-peak",
    title="Memory at the peak, by component",
    nav_label="Memory",
    kind="memory-peak",
    how=(
        "Every storage was followed from birth to death through one step; shown is the moment at which most bytes "
        "were live, and unattributed is what the allocator counted beyond that. It does not see memory outside "
        "PyTorch's allocator, nor what the allocator keeps in reserve."
    ),
)
