"""Triton, if it is there, and the choice of the backend that serves a call.

Every kernel file keeps a plain-torch fallback beside its Triton kernel; the choice between the two is made here, by one
rule. Importing this module looks for Triton and nothing else: no CUDA context is made before a kernel is launched.
"""

# Kernels are typed by Triton, not by Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import functools
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from itertools import accumulate
from operator import or_
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from dpscope.flash.torch_side import dry_run
from dpscope.flash.torch_side.captures import own_capture
from dpscope.packages import release_of

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPU or macOS comes without Triton: the fallbacks serve every call
    triton = None
    tl = None

__all__ = ["tl", "triton"]  # re-exported: kernel files take them from here

Backend = Literal["auto", "torch", "triton"]

CHUNK_BYTES = 64 * 2**20
"""Most that a fallback converts, masks or holds at a time."""
SCRATCH_BYTES = 2**29
"""Scratch for products of samples that are dropped after use. With an eighth of it the host is slower than the GPU."""


def most_at_once(bytes_each: int, *, scratch: bool = False) -> int:
    """Return how many elements fit `CHUNK_BYTES`, or `SCRATCH_BYTES` if `scratch`; one at least."""
    return max(1, (SCRATCH_BYTES if scratch else CHUNK_BYTES) // max(1, bytes_each))


def slices(count: int, bytes_each: int, *, scratch: bool = False) -> Iterator[slice]:
    """Yield slices over samples, positions or features, each with `most_at_once`."""
    step = most_at_once(bytes_each, scratch=scratch)
    for start in range(0, count, step):
        yield slice(start, min(count, start + step))


# Triton decides once, where a kernel is defined, whether it is compiled or interpreted on the CPU.
INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "on", "yes"}


@functools.cache
def has_triton(*release: int) -> bool:
    """Return True if there is a Triton that compiles kernels, of this release or a newer one."""
    return triton is not None and not INTERPRETED and release_of(triton.__version__) >= release


# dtypes kernels read and write, by their names in Triton.
TRITON_DTYPES: dict[torch.dtype, Any] = (
    {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    if tl is None
    else {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
)


def jit(kernel: Callable[..., Any], *, do_not_specialize: Sequence[str] = ()) -> Any:
    """Compile a kernel with `triton.jit`. Without Triton, return a launcher for dry runs, which launches nothing.

    do_not_specialize: integers that vary from call to call, so that their divisibility compiles no kernel anew.
    """
    compiled = None if triton is None else triton.jit(kernel, do_not_specialize=list(do_not_specialize))
    return Launcher(kernel) if compiled is None else compiled


class Launcher:
    """Kernel that is not compiled; its launches, which only dry runs make, do nothing."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self.__name__ = kernel.__name__

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **kwargs: Any) -> None:
        assert dry_run.current() is not None


def constant(value: Any) -> Any:
    """Make a constant of a module readable by kernels."""
    return value if tl is None else tl.constexpr(value)


_UPCAST = constant(INTERPRETED)


@jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """Return acc + a·b, float32. The interpreter keeps bfloat16 as bare bits, so operands are widened there first."""
    if _UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


def capability(index: int) -> tuple[int, int]:
    """Return the compute capability of CUDA device `index`."""
    planned = dry_run.current()
    return _capability(index) if planned is None else planned.capability


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def is_hopper(device: torch.device) -> bool:
    """Return True if the bulk tensor copy engine and wgmma exist, and in the interpreter, which imitates both."""
    if not hasattr(tl, "make_tensor_descriptor") and dry_run.current() is None:
        return False
    return capability(device_index(device)) >= (9, 0) if device.type == "cuda" else INTERPRETED


def multiplies_halves(device: torch.device) -> bool:
    """Return True if tensor cores multiply both half precisions; the interpreter does."""
    return capability(device_index(device)) >= (8, 0) if device.type == "cuda" else INTERPRETED


def stages_that_fit(stages: int, bytes_each: int, device: torch.device) -> int:
    """Return how many of the wanted steps of a loop can be in flight, if the operands of one take so many bytes.

    They lie in shared memory, of which GeForce and most cards for inference have less than half of a data centre's.
    """
    if device.type != "cuda":
        return stages
    version = capability(device_index(device))
    waits_in_memory = 9 <= version[0] <= 11  # elsewhere the step that is multiplied is in registers
    kib = 227 if waits_in_memory else 163 if version in ((8, 0), (8, 7)) else 99
    return min(stages, (kib - 1) * 1024 // bytes_each + (not waits_in_memory))


def device_index(device: torch.device) -> int:
    """Return the device's number, or the current device's if it has none."""
    if dry_run.current() is not None:
        return device.index or 0
    return torch.cuda.current_device() if device.index is None else device.index


def use_triton(backend: Backend, device: torch.device, *, served: bool, why_not: str = "") -> bool:
    """Return True if the Triton kernel takes this call. `served`: the kernel covers these dtypes and shapes.

    `auto` takes the kernel on CUDA devices of compute capability 8.0 and above. `triton` also takes the interpreter,
    and raises ValueError if the kernel cannot run.
    """
    if backend == "torch":
        return False
    if backend == "triton":
        if triton is None:
            raise ValueError("backend='triton' needs Triton: pip install triton, or use backend='auto'")
        if not (device.type == "cuda" or INTERPRETED):
            raise ValueError("backend='triton' on a CPU needs TRITON_INTERPRET=1 in the environment")
        if not served:
            raise ValueError(f"backend='triton' does not serve this call ({why_not}); use backend='auto'")
        return True
    if backend != "auto":
        raise ValueError(f"unknown backend {backend!r}: choose auto, torch or triton")
    return (
        served
        and (triton is not None or dry_run.current() is not None)
        and device.type == "cuda"
        and not INTERPRETED
        and capability(device_index(device)) >= (8, 0)
    )


def rows_are_aligned(*tensors: torch.Tensor) -> bool:
    """Return whether all rows of tensors (B, T, features) begin on 16-byte words, as tensor descriptors need."""
    for tensor in tensors:
        size = tensor.element_size()
        stride_b, stride_t, stride_f = tensor.stride()
        if stride_f != 1 or stride_t < tensor.shape[2] or stride_b == 0:
            return False
        if tensor.data_ptr() % 16 or (stride_b | stride_t) * size % 16:
            return False
    return True


def with_aligned_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor (B, T, features) contiguous, its features padded with zeros to whole 16-byte words.

    It is copied if needed. A vocabulary of 50,257 is the common case: one copy instead of reads of 2 bytes.
    """
    missing = -tensor.shape[2] % (16 // tensor.element_size())
    if missing:
        return torch.nn.functional.pad(tensor, (0, missing))
    rows = tensor.contiguous()
    return rows.clone() if rows.data_ptr() % 16 else rows


def launch_on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current CUDA device inside the block, because Triton launches there."""
    if (
        device.type != "cuda"
        or device.index is None
        or dry_run.current() is not None
        or device.index == torch.cuda.current_device()
    ):
        return _HERE
    return torch.cuda.device(device)


_HERE = nullcontext()

DIRECT_CALLS = (3, 6)
"""The Triton whose compiled kernels take the arguments of their launchers, as it was tried."""

_NUMBERS = (int, float)
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: int | tuple[int, int, int],
    arguments: Sequence[Any],
    constants: Mapping[str, Any],
    *,
    specialised: bool = False,
) -> None:
    """Launch a kernel; one that is compiled is called directly. `constants` ends with num_warps and num_stages.

    arguments: tensors, numbers, or None in a tensor's place

    Triton's launcher inspects every argument again, and a network has a hundred launches a step. Dtypes, constants and
    the alignment of the operands decide which kernel it is; if it is `specialised` for integers, those, too.
    """
    operands = [each for each in arguments if type(each) not in _NUMBERS]
    there = [each for each in operands if each is not None]
    device, grid = there[0].device, (grid, 1, 1) if isinstance(grid, int) else grid
    values = tuple(constants.values())
    key: tuple[Any, ...] | None = None
    direct = has_triton(*DIRECT_CALLS) and device.type == "cuda" and dry_run.current() is None
    if direct and reduce(or_, map(torch.Tensor.data_ptr, there)) % 16 == 0:
        integers = [each for each in arguments if type(each) is int] if specialised else []
        kinds = [(n % 16 == 0, n == 1, n.bit_length() > 31, n >= 2**63) for n in integers]
        dtypes = [None if each is None else each.dtype for each in operands]
        key = (kernel.__name__, device_index(device), *dtypes, *values, *kinds)
    with launch_on(device):
        compiled = _compiled.get(key) if key is not None else None
        if compiled is not None:
            compiled[grid](*arguments, *values[:-2])
            return
        compiled = kernel[grid](*arguments, **constants)
        if key is not None:
            _compiled[key] = compiled


def provide_scratch(device: torch.device) -> None:
    """Give kernels that build tensor descriptors on the device their scratch memory, from torch's allocator.

    Triton keeps the allocator in a context variable, one a thread, and backward hooks run in autograd's own threads:
    so it is set before each launch that needs it.
    """
    if device.type == "cuda" and dry_run.current() is None:
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))


def table_on(
    device: torch.device, *rows: Sequence[int] | npt.NDArray[np.int64], wait: bool = False
) -> list[torch.Tensor]:
    """Copy host integers to int64 tensors on `device`, in one asynchronous copy from pinned memory.

    Each tensor starts on a 16-byte boundary, so that Triton compiles a kernel once and not once for each alignment.
    `wait` copies synchronously, for tables that are kept and may be read on any stream.
    """
    flat, sizes = array("q"), list(map(len, rows))
    for row, size in zip(rows, sizes, strict=True):
        if isinstance(row, np.ndarray):
            flat.frombytes(row.tobytes())
        else:
            flat.fromlist([*row])
        if size % 2:
            flat.append(0)
    starts = accumulate([size + size % 2 for size in sizes], initial=0)
    host = torch.frombuffer(flat, dtype=torch.int64) if flat else torch.empty(0, dtype=torch.int64)
    if dry_run.current() is not None:
        host = torch.empty(len(flat), dtype=torch.int64, device=device)
    elif device.type == "cuda":
        capture = own_capture()
        if capture is not None:
            host = capture.keep(host, device)
        else:
            host = host.to(device) if wait else host.pin_memory().to(device, non_blocking=True)
    return [host[start : start + size] for start, size in zip(starts, sizes, strict=False)]
