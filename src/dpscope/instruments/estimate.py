"""Estimate of the bytes a step has to move, and the ceilings of a roofline, both without ncu (docs/method.md).

An estimate reads inputs once and writes outputs once. Tables hold the operators for which that is wrong; all other
knowledge is in their schemas. Ceilings are measured, not taken from a data sheet: a large copy for DRAM bandwidth,
large square matrix products for arithmetic. Run them without a profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry

from dpscope.instruments.families import Sums, operator_family
from dpscope.results.payloads.ncu import Ceilings, Estimate
from dpscope.vocabulary import phases

NamedTensors = dict[str, list[Tensor]]  # tensors on the device, by the argument that holds them
TouchedBytes = Callable[[NamedTensors, dict[str, Any], list[Tensor]], int]  # (those, all arguments, outputs) -> bytes


class Moved(NamedTuple):
    read: int  # bytes
    written: int


# Nothing is moved: memory is only set aside, or only sizes are looked at.
_UNMOVED = (
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided is_same_size resize_ set_ record_stream "
    "_has_compatible_shallow_copy_type"
)
MOVES_NOTHING = frozenset(_UNMOVED.split())

# Arguments that are overwritten without being read, or asked for their sizes alone.
_OVERWRITTEN = (
    "fill_ zero_ normal_ uniform_ bernoulli_ random_ exponential_ copy_ _foreach_zero_ _foreach_copy_ scatter_ "
    "index_copy_ zeros_like ones_like full_like rand_like randn_like randint_like new_zeros new_ones new_full "
    "nll_loss_backward nll_loss2d_backward"
)
OVERWRITTEN = frozenset(_OVERWRITTEN.split())

# Fused optimizers may unscale gradients in place, and their schemas say so; without a loss scaler they only read them.
FUSED_OPTIMIZERS = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")


def _selected_bytes(named: NamedTensors, values: dict[str, Any], outs: list[Tensor]) -> int:
    """Return the bytes of self[indices]: the indices' common shape times the dimensions that are not indexed."""
    (target,) = named["self"]
    indices = values["indices"]
    if any(index is not None and index.dtype == torch.bool for index in indices):
        return tensor_bytes(target)  # how many are chosen is known to the device alone
    shapes = [index.shape for index in indices if index is not None]
    chosen = torch.broadcast_shapes(*shapes).numel()  # type: ignore[no-untyped-call]
    free = [n for n, index in zip(target.shape, [*indices, *[None] * target.dim()], strict=False) if index is None]
    return int(chosen * torch.Size(free).numel() * target.element_size())


def _output_bytes(named: NamedTensors, values: dict[str, Any], outs: list[Tensor]) -> int:
    return tensor_bytes(outs[0])


def _bytes_like(argument: str) -> TouchedBytes:
    """Count one element of self for each element of `argument`."""
    return lambda named, values, outs: values[argument].numel() * values["self"].element_size()


# Arguments of which only some places are touched: operator -> (argument, bytes touched).
PARTLY_READ: dict[str, tuple[str, TouchedBytes]] = {
    "embedding": ("weight", _output_bytes),
    **dict.fromkeys(("index", "index_select", "gather", "take"), ("self", _output_bytes)),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), ("self", _bytes_like("target"))),
    **dict.fromkeys(("index_put_", "_index_put_impl_"), ("self", _selected_bytes)),
    **dict.fromkeys(("index_add_", "index_copy_"), ("self", _bytes_like("source"))),
    **dict.fromkeys(("scatter_", "scatter_add_"), ("self", _bytes_like("index"))),
}


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes behind a tensor: expanded dimensions count once, and never more than its storage holds."""
    if tensor.layout != torch.strided:
        return sum(map(tensor_bytes, (tensor._indices(), tensor._values()))) if tensor.layout == torch.sparse_coo else 0
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= 1 if stride == 0 and size else size
    return min(elements * tensor.element_size(), tensor.untyped_storage().nbytes())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def distinct_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return one tensor of those over the same bytes: a matrix and its transpose are read once."""
    places = ((t, t.storage_offset() if t.layout == torch.strided else 0) for t in tensors)
    return list({(_storage(t), offset, tensor_bytes(t)): t for t, offset in places}.values())


def moved_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, device: str) -> Moved:
    """Return the bytes of `device`'s memory that one call of an operator reads and writes."""
    schema = func._schema
    name = operator_name(func)
    if name in MOVES_NOTHING or schema.name.startswith("prim::"):
        return Moved(0, 0)
    values = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    named = {argument: _tensors_on(device, value) for argument, value in values.items()}
    outs = _tensors_on(device, out)
    changed = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    sources = {_storage(tensor) for tensors in named.values() for tensor in tensors}
    fresh = distinct_tensors(tensor for tensor in outs if _storage(tensor) not in sources)
    if outs and not fresh and not changed:
        return Moved(0, 0)  # a view
    unread = {a.name for a in schema.arguments if a.is_out} | {"self" if name in OVERWRITTEN else None}
    if name == "index_put_" and not values.get("accumulate", False):
        unread |= {"self"}
    if name in FUSED_OPTIMIZERS and kwargs.get("grad_scale") is None:
        changed -= {"grads"}
    sparse, touched = PARTLY_READ.get(name, (None, None))

    def size_of(argument: str) -> int:
        whole = sum(map(tensor_bytes, distinct_tensors(named.get(argument, []))))
        return min(whole, touched(named, values, outs)) if argument == sparse and touched and whole else whole

    plain = distinct_tensors(t for argument, ts in named.items() if argument not in unread | {sparse} for t in ts)
    read = sum(map(tensor_bytes, plain)) + (size_of(sparse) if sparse and sparse not in unread else 0)
    return Moved(read, sum(map(size_of, changed)) + sum(map(tensor_bytes, fresh)))


def _tensors_on(device: str, value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.device.type == device]


def operator_name(func: Any) -> str:
    """Return `mm` of aten::mm.default."""
    return str(func._schema.name.partition("::")[2])


# -- arithmetic --------------------------------------------------------------------------------------------------------

# The CPU's attention takes its arguments in the same order as CUDA's, and has no formula of its own.
_FORMULA_OF = {
    f"_scaled_dot_product_flash_attention_for_cpu{end}": getattr(
        torch.ops.aten, f"_scaled_dot_product_flash_attention{end}"
    )
    for end in ("", "_backward")
}


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Count the operations of matrix products, convolutions and attention (a multiply-add is two); others 0."""
    name = operator_name(func)
    if name == "convolution_backward":
        # For each gradient as many as forward takes. torch's formula for the weight's ignores groups.
        g, x, weight, *options = args
        forward = conv_flop_count(list(x.shape), list(weight.shape), list(g.shape), transposed=options[4])
        return int(forward * sum(options[7][:2]))
    formula = flop_registry.get(_FORMULA_OF.get(name, func._overloadpacket))
    if formula is None and name == "addmm_":
        formula = flop_registry[torch.ops.aten.addmm]
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


BLIND_SPOTS = (
    "Caches are not seen: what one operator leaves in L2 for the next is counted as DRAM traffic (too high).",
    "Tiles are not seen: a matrix product that reads its operands several times is counted as reading them once, and "
    "so are sorts and other operators of several passes (too low).",
    "Workspaces inside an operator are not seen: split-K partial sums, attention's float32 gradients (too low).",
    "Floating-point operations are those of matrix products, convolutions and attention, causal attention in full.",
    "Compiled code is counted as the operators it was compiled from, without fusion.",
)

ON_A_CPU = (
    "The step ran on a CPU, whose operators are not a GPU's: the optimizer is not fused, and flash clipping runs "
    "without its kernels."
)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that adds up operators by (name, family, phase). Autograd applies the mode in its own threads, too."""

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.sums = Sums("calls", "dram_read_bytes", "dram_write_bytes", "flops")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        moved = moved_by(func, args, kwargs, out, self.device)
        if any(moved):
            shapes = [argument.shape for argument in args if isinstance(argument, Tensor)]
            family = operator_family(operator_name(func), shapes, phases.innermost())
            self._add(func._schema.name, family, moved, flops_of(func, args, kwargs, out))
        return out

    def hear(self, launch: phases.Launch) -> None:
        sizes = (sum(map(tensor_bytes, distinct_tensors(tensors))) for tensors in (launch.reads, launch.writes))
        self._add(launch.name, launch.family, Moved(*sizes), launch.flops)

    def _add(self, name: str, family: str, moved: Moved, flops: int) -> None:
        self.sums.add((name, family, phases.innermost()), 1, moved.read, moved.written, flops)


def estimate_traffic(step: Callable[[], object], *, device: str) -> Estimate:
    """Return the bytes that one `step` reads and writes on `device`, by operator and phase; most bytes first.

    The step is an ordinary training step and leaves nothing behind.
    """
    counter = _Counter(device)
    with phases.listening(nullcontext), phases.hearing(counter.hear), counter:
        step()
    rows = counter.sums.rows("calls", "name", "family", "phase")
    rows = [{**row, "l2_to_sm_bytes": None, "time_ns": None} for row in rows]
    rows.sort(key=lambda row: -(row["dram_read_bytes"] + row["dram_write_bytes"]))
    calls = sum(row["calls"] for row in rows)
    return {
        "dram_read_bytes": sum(row["dram_read_bytes"] for row in rows),
        "dram_write_bytes": sum(row["dram_write_bytes"] for row in rows),
        "flops": {"total": sum(row["flops"] for row in rows)},
        "kernels": {"rows": rows, "calls_seen": calls, "calls_total": calls, "note": "by operator, from tensor sizes"},
        "blind_spots": [*([ON_A_CPU] if device == "cpu" else []), *BLIND_SPOTS],
    }


COPY_BYTES = 2 * 2**30
GEMM_SIDE = 8192
CEILING_REPEATS = 10


def measure_ceilings(device: str) -> Ceilings:
    """Measure the best of several repeats. Empty without a GPU: a CPU's caches and clocks give no single roof."""
    if device != "cuda":
        return {}
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    best_copy = _best_seconds(torch.empty_like(source).copy_, source)
    del source
    # Ordinary numbers: a product of zeros draws less power and would raise the roof.
    tensor, single = (
        _best_seconds(torch.mm, *torch.randn(2, GEMM_SIDE, GEMM_SIDE, device="cuda", dtype=dtype))
        for dtype in (torch.bfloat16, torch.float32)
    )
    flops = 2 * GEMM_SIDE**3
    torch.cuda.empty_cache()
    return {
        "dram_bytes_per_second": 2 * COPY_BYTES / best_copy,  # read once, written once
        "tensor_flops_per_second": flops / tensor,
        "fp32_flops_per_second": flops / single,
        "how": (
            f"best of {CEILING_REPEATS}: a copy of {COPY_BYTES // 2**30} GiB, and {GEMM_SIDE}×{GEMM_SIDE} matrix "
            "products in bf16 (tensor cores) and fp32 (without TF32)"
        ),
    }


def _best_seconds(operation: Any, *operands: Tensor) -> float:
    times: list[float] = []
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for _ in range(CEILING_REPEATS + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            operation(*operands)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
    finally:
        torch.set_float32_matmul_precision(precision)
    return min(times[2:])  # the first two hold the choice of a kernel and the way up of the clocks
