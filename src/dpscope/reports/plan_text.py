"""A plan in words and as a page: a verdict first, then the table, then what would change most."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from dpscope.plain_text import bare_table, render_plain
from dpscope.reports.page.render import render_template
from dpscope.units import MISSING, format_bytes, format_duration, format_ms, format_ratio, format_throughput
from dpscope.vocabulary.components import UNATTRIBUTED

PlanPart = Mapping[str, Any]

ROOMY = 500  # characters of a line: no cell is cut
HEADINGS = (
    "method",
    "batch × passes",
    "peak",
    "step",
    "samples/s",
    "steps",
    "σ",
    "ε (PRV)",
    "ε (RDP)",
    "time",
    "price",
)


def describe_plan(plan: Mapping[str, Any]) -> str:
    """Return everything a person reads of a plan, as plain text."""
    table = bare_table(*HEADINGS)
    for row in plan["methods"]:
        table.add_row(*_cells(row))
    parts = ["\n".join(verdict(plan)), render_plain(table, ROOMY).rstrip()]
    parts += [_components(row) for row in plan["methods"] if row["batch_size"]][-1:]
    if plan["effects"]:
        parts.append("\n".join(["What would change most:", *_effects(plan)]))
    parts.append("\n".join(notes(plan)))
    return "\n\n".join(part for part in parts if part)


def verdict(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield a few sentences: what fits, what limits it, how long it takes."""
    card = plan["card"]
    length = "" if plan["seq_len"] is None else f", sequence {plan['seq_len']}"
    how = "predicted, nothing was run" if plan["how"] == "predicted" else "probed on this GPU and extrapolated"
    yield f"{plan['workload']}, {plan['dtype']}{length}, on {card['title']} ({how})."
    for row in plan["methods"]:
        yield f"  {row['method']}: {_sentence(row, card)}"


def _sentence(row: PlanPart, card: PlanPart) -> str:
    if "refused" in row:
        return f"cannot be planned: {row['refused']}."
    if not row["batch_size"]:
        smaller = f" The largest batch that fits is {row['largest_batch']}." if row["largest_batch"] else ""
        return (
            f"does not fit. A batch of {row['needs_batch']} takes {format_bytes(row['needs_bytes'])}, and "
            f"{format_bytes(card['limit_bytes'])} are there.{smaller}"
        )
    peak = format_bytes(row["step"]["peak_bytes"])
    sentence = f"batches of {row['batch_size']} fit ({peak}, most of it {_called(row['limited_by'])}"
    if row["peaks_verifying"]:
        sentence += f", while the model is verified; other steps take {format_bytes(row['step']['step_bytes'])}"
    sentence += ")"
    if "privacy" in row:
        privacy = row["privacy"]
        epsilon = privacy["epsilon"][privacy["accountant"]]
        sentence += (
            f"; ε = {_rounded_up(epsilon, 3)} at δ = {privacy['delta']:.3g} after {privacy['epochs']:.4g} epochs with "
            f"σ = {_rounded_up(privacy['noise_multiplier'], 4)}"
        )
    if "hours" in row:
        sentence += f"; {_length(row)}" + (f", price {row['price']:.2f}" if "price" in row else "")
    return sentence + "."


def _rounded_up(value: float, digits: int) -> str:
    """Format a figure, never below its value: training with the noise shown spends no more than the epsilon shown."""
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - digits) if value > 0 else 1.0
    return f"{math.ceil(value / unit - 1e-6) * unit:.{digits}g}"


def _length(row: PlanPart) -> str:
    hours: float = row["hours"]
    return format_duration(3600 * hours) if hours < 1 else f"{hours:.3g} hours"


def _called(component: str) -> str:
    """Return the words for a component. What has no owner in a plan are workspaces of cuBLAS, and rounded blocks."""
    return "library workspaces" if component == UNATTRIBUTED else component.replace("_", " ")


def _cells(row: PlanPart) -> tuple[str, ...]:
    if not row["batch_size"]:
        why = "refused" if "refused" in row else f"needs {format_bytes(row['needs_bytes'])}"
        return (row["method"], why, *[MISSING] * (len(HEADINGS) - 2))
    privacy = row.get("privacy")
    figures = [MISSING] * 3
    if privacy:
        figures = [
            MISSING if each is None else _rounded_up(each, 4)
            for each in (privacy["noise_multiplier"], *map(privacy["epsilon"].get, ("prv", "rdp")))
        ]
    return (
        row["method"],
        f"{row['batch_size']} × {row['accumulation']}",
        format_bytes(row["step"]["peak_bytes"]),
        format_ms(1e3 * row["logical_seconds"]),
        format_throughput(row["samples_per_second"]),
        str(row.get("steps", MISSING)),
        *figures,
        _length(row) if "hours" in row else MISSING,
        f"{row['price']:.2f}" if "price" in row else MISSING,
    )


def _components(row: PlanPart) -> str:
    parts = {name: size for name, size in row["step"]["components"].items() if size}
    lines = [f"The peak of {row['method']} at {row['batch_size']} samples, by component:"]
    lines += [
        f"  {_called(name):22}{format_bytes(size):>10}"
        for name, size in sorted(parts.items(), key=lambda item: -item[1])
    ]
    peaks = ", ".join(f"{batch}: {format_bytes(peak)}" for batch, peak in row["peaks"].items())
    return "\n".join([*lines, f"Peaks by batch: {peaks}."])


def _effects(plan: PlanPart) -> Iterator[str]:
    """Yield a line for each change that does something else than those before it."""
    said = set()
    for effect in plan["effects"]:
        peak, beyond = effect["peak_bytes"], effect["peak_bytes"] > plan["card"]["limit_bytes"]
        figures = (
            f"{format_ratio(effect['peak_ratio'])} the peak ({format_bytes(peak)}"
            f"{', which does not fit' if beyond else ''}), {format_ratio(effect['time_ratio'])} the time per sample"
        )
        if figures not in said:
            said.add(figures)
            yield f"  {effect['what']} ({effect['method']}): {figures}"


def notes(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a reader should know beside the figures."""
    card = plan["card"]
    yield (
        f"{card['title']}: {format_bytes(card['usable_bytes'])} for torch, of which {card['margin']:.0%} are left free "
        f"({card['source']})."
    )
    if any(row["step"]["is_estimate"] for row in plan["methods"] if row["batch_size"]):
        yield (
            "Estimates: rows go to experts by their values, which a plan does not know. As many are taken to go to "
            "each, and flash clipping runs such blocks sample by sample."
        )
    private = [row for row in plan["methods"] if "privacy" in row]
    if private:
        privacy = private[0]["privacy"]
        rate, expected = privacy["sample_rate"], privacy["expected_batch"]
        yield (
            f"Poisson sampling at rate {rate:.4g}: {expected} samples a step are expected, and a draw may hold more. "
            "Train with BatchMemoryManager(max_physical_batch_size=…): then none is cut short."
            if rate < 1
            else f"The sampling rate is 1: each step takes all {expected} samples."
        )
        yield from privacy["notes"]
    yield from plan["remarks"]


def plan_page(plan: Mapping[str, Any]) -> str:
    """Return the same as one HTML file that needs no network."""
    return render_template(
        "plan.html.jinja",
        title=f"Plan: {plan['workload']} on {plan['card']['title']}",
        verdict=verdict(plan),
        headings=HEADINGS,
        rows=map(_cells, plan["methods"]),
        details=[_components(each) for each in plan["methods"] if each["batch_size"]],
        effects=list(_effects(plan)),
        notes=notes(plan),
    )
