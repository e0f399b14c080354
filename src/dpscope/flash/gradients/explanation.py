"""Explanation of the paths: each parameter's as a row of a table, perhaps timed, and modules run sample by sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.benchmark import Timer

from dpscope.flash.gradients.contributions import Outer, kept_products
from dpscope.flash.gradients.paths import DIRECT, GRAM, KEEP, RANK1, Product, choose_path, in_microseconds
from dpscope.flash.gradients.slots import Slot
from dpscope.flash.kernels.float32_products import reads_tf32, truncated_to_tf32
from dpscope.flash.kernels.gram_norms import gram_norms_squared
from dpscope.flash.kernels.gram_units import GramUnit
from dpscope.units import name_module

# Share of the trainable parameters from which opaque modules are costly: below, the per-sample gradients that they keep
# are a small part of a step's memory. Convolutions and recurrent layers cost time at any size: under vmap a convolution
# becomes a grouped one, and a recurrent layer does without cuDNN. Measured in docs/flash.md.
COSTLY_SHARE = 0.1
SLOW_UNDER_VMAP = (_ConvNd, nn.RNNBase)
SHORTEST_RUN = 0.05  # seconds that a path is repeated for, where it is timed


@dataclass(frozen=True)
class PathRow:
    """Row of `explain()`: how norms and clipped sum of one parameter are computed."""

    parameter: str
    module: str
    kind: str
    shapes: str
    path: str
    measured: str  # what each path took on this device, if that was asked for
    why: str


class PathTable(Sequence[PathRow]):
    """Table of the path that each parameter takes, as `FlashEngine.explain()` returns it.

    It is a sequence of rows; `print` shows them as a table.

    Args:
        rows: One row for each trainable parameter: its module, shapes, path and the reason.
        blocks: Checkpointed blocks under a memory budget, and whether each is held or runs again.
        padding: How much of the batches was padding, in words, if they were padded.

    Example:
        >>> engine = FlashEngine(model)
        >>> loss_fn(model(x), y).backward()
        >>> print([(row.parameter, row.path) for row in engine.explain()][0])
        ('0.weight', 'rank-1')
    """

    def __init__(self, rows: Iterable[PathRow], blocks: Iterable[Any] = (), padding: str = "") -> None:
        self.rows = list(rows)
        self.blocks = list(blocks)
        self.padding = padding

    def __getitem__(self, index: int) -> PathRow:  # type: ignore[override]
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        tables = [_aligned(PathRow, self.rows), *([_aligned(type(self.blocks[0]), self.blocks)] if self.blocks else [])]
        return "\n\n".join([*tables, *([self.padding] if self.padding else [])])


def _aligned(row_type: type[Any], rows: Sequence[Any]) -> str:
    lines = [tuple(field.name for field in fields(row_type)), *map(astuple, rows)]
    if not any(getattr(row, "measured", "-") for row in rows):
        lines = [tuple(cell for name, cell in zip(lines[0], line, strict=True) if name != "measured") for line in lines]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def explain_slots(
    slots: Iterable[Slot], blocks: Iterable[Any] = (), padding: str = "", *, measured: bool = False
) -> PathTable:
    """Return the table of these slots. `measured` also times the paths of each product's shape."""
    rows = []
    found: dict[object, str] = {}  # layers of one shape are measured once
    for slot in slots:
        path, why = "" if slot.decision is None else slot.decision.path, slot.why
        if len(slot.contributions) > 1:
            path, why = "", "used several times since the last step: decided when the micro-batch is closed"
        shapes = ", ".join(f"{name} {tuple(shape)}".lstrip() for name, shape in slot.shapes.items())
        took = ""
        if measured and path and slot.kind == Outer.kind:
            assert slot.decision is not None and slot.decision.dtype is not None
            product = slot.shapes["x"], slot.shapes["g"][-1], slot.decision.dtype, slot.parameter.device
            if product not in found:
                found[product] = ", ".join(f"{path} {_in_words(taken)}" for path, taken in time_paths(*product).items())
            took = found[product]
        rows.append(PathRow(slot.name, slot.module, slot.kind, shapes, path, took, why))
    return PathTable(rows, blocks, padding)


def _in_words(seconds: float) -> str:
    return "out of memory" if math.isinf(seconds) else in_microseconds(seconds)


def time_paths(x: Sequence[int], p: int, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Measure seconds of each path for x: (B, T, d) and g: (B, T, p); infinite if memory ran out."""
    generator = torch.Generator(device).manual_seed(0)
    taken: dict[str, float] = {}
    try:
        left, right = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in (x, (*x[:2], p)))
        calls = _calls(
            Outer(left, right, choose_path(Product(x[0], x[1], x[2], p))),
            torch.rand(x[0], generator=generator, device=device),
        )
    except torch.OutOfMemoryError:
        return dict.fromkeys((GRAM, DIRECT, KEEP), math.inf)
    for path, call in calls.items():
        try:
            call()  # compiled, if it is to be
            timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
            taken[path] = timer.blocked_autorange(min_run_time=SHORTEST_RUN).median
        except torch.OutOfMemoryError:
            taken[path] = math.inf
    return taken


def _calls(product: Outer, scale: Tensor) -> dict[str, Callable[[], object]]:
    """Return the paths that are exact for the product, each from its operands to the clipped sum."""
    x, g = product.x, product.g
    scale = scale.to(torch.promote_types(torch.float32, g.dtype))
    in_tf32 = g.dtype == torch.float32 and reads_tf32(g.device)

    def keep() -> None:
        kept = kept_products(x, g)
        kept.norms_squared()
        kept.clipped_sum(scale, None)

    def gram() -> None:
        taken = Outer(truncated_to_tf32(x), truncated_to_tf32(g), product.decision) if in_tf32 else product
        gram_norms_squared([GramUnit(gs=(taken.g,), xs=(taken.x,), in_tf32=in_tf32)])
        taken.clipped_sum(scale, None)

    def direct() -> None:
        product.norms_squared()
        product.clipped_sum(scale, None)

    def rank1() -> None:
        product.rank1_norms_squared()
        product.clipped_sum(scale, None)

    return {**({RANK1: rank1} if x.shape[1] == 1 else {}), GRAM: gram, DIRECT: direct, KEEP: keep}


@dataclass(frozen=True)
class PerSampleModule:
    """A module that runs sample by sample with all it contains, because it owns parameters and has no layer family."""

    name: str  # "" for the model itself
    module: nn.Module
    bytes_a_sample: int  # of the per-sample gradients that it keeps
    share: float  # of the model's trainable numbers
    slow: bool  # holds layers that vmap makes slow
    instead: str  # what to write


def why_opaque(name: str, module: nn.Module, how: str) -> str:
    """Explain why a parameter's gradients come from its module, for `explain()`."""
    called = name_module(name, module)
    if _is_torchs(module):
        return f"{called} has no layer family; its per-sample gradients come from {how}"
    own = ", ".join(own_parameters(module))
    because = f"owns {own} itself" if own else "has parametrized weights"
    return f"{called} {because}, so all of it takes its per-sample gradients from {how}"


def describe_per_sample(model: nn.Module, modules: Iterable[tuple[str, nn.Module]]) -> list[PerSampleModule]:
    """Describe the per-sample modules of a model, given by name, the largest first."""
    total = sum(p.numel() for p in model.parameters() if p.requires_grad)
    found = []
    for name, module in modules:
        live = [p for p in module.parameters() if p.requires_grad]
        if numbers := sum(p.numel() for p in live):
            kept = sum(p.numel() * p.element_size() for p in live)
            slow = any(isinstance(each, SLOW_UNDER_VMAP) for each in module.modules())
            found.append(PerSampleModule(name, module, kept, numbers / total, slow, _instead(module)))
    return sorted(found, key=lambda each: -each.share)


def costly_modules(modules: Sequence[PerSampleModule]) -> list[PerSampleModule]:
    """Return the modules worth reporting: all of them, or only the slow ones if the total is small."""
    if sum(each.share for each in modules) >= COSTLY_SHARE:
        return list(modules)
    return [each for each in modules if each.slow]


def _instead(module: nn.Module) -> str:
    if isinstance(module, nn.MultiheadAttention):
        return "write its projections as four nn.Linear around F.scaled_dot_product_attention"
    if _is_torchs(module):
        return ""
    own = own_parameters(module)
    tables = {key: [n for n in p.shape if n > 1] for key, p in own.items()}
    table = next(((key, shape) for key, shape in tables.items() if len(shape) == 2), None)
    if not own:
        return ""
    submodule = f"give {', '.join(own)} to a small submodule that takes and returns a tensor"
    if table is None:
        return submodule
    return f"{submodule}, or, for positions, write self.{table[0]} = nn.Embedding({table[1][0]}, {table[1][1]})"


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a module owns itself, by name."""
    return {key: parameter for key, parameter in module._parameters.items() if parameter is not None}


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")
