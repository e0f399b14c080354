"""Families of kernels and operators, by their names; and figures added up by family, phase or name."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

from dpscope.vocabulary import phases
from dpscope.vocabulary.phases import (
    ATTENTION,
    CLIPPING,
    COLLECTIVE,
    COPY,
    ELEMENTWISE,
    EMBEDDING,
    GEMM,
    NOISE_FAMILY,
    NORMALISATION,
    OPTIMIZER_FAMILY,
    OTHER,
    REDUCTION,
)

# In these phases generic work is the phase's own: an addition in `noise` is the noise being added.
_GENERIC = {ELEMENTWISE, REDUCTION, COPY}
_WORK_OF_PHASE = {phases.CLIP: CLIPPING, phases.NOISE: NOISE_FAMILY, phases.OPTIMIZER: OPTIMIZER_FAMILY}

# -- kernels -----------------------------------------------------------------------------------------------------------

# Operators in the names of Inductor's kernels that only copy.
_COPIES = "_to_copy|clone|copy|cat|stack|view|_unsafe_view|transpose|permute|expand|t|zeros|full|fill|constant_pad_nd"

# The first pattern that is found decides. Attention is looked for before GEMM (its kernels are built of GEMM pieces),
# and what a generic kernel was made for (`vectorized_elementwise_kernel<…copy_kernel…>`) before the generic name.
_KERNEL_PATTERNS: tuple[tuple[str, str], ...] = (
    # Inductor names a kernel by its kind and all operators fused into it: a cast among others is no copy.
    (ATTENTION, r"^triton_tem_\w*attention"),
    (GEMM, r"^triton_tem_"),
    (NORMALISATION, r"^triton_\w*(layer|batch|group|rms)_?norm"),
    (REDUCTION, r"^triton_\w*(softmax|nll_loss|cross_entropy)"),
    (EMBEDDING, r"^triton_\w*(embedding|gather|scatter|index)"),
    (REDUCTION, r"^triton_(red|per)_"),
    (COPY, rf"^triton_poi_fused_(?:(?:{_COPIES})_)+\d+$"),
    (ELEMENTWISE, r"^triton_(poi|for|mix)_"),
    (COLLECTIVE, r"nccl(Dev)?Kernel|ncclSymk"),
    (CLIPPING, r"_gram_(ids_|finish_)?kernel|_kept_norms_kernel|_projections_kernel|_sums_kernel"),
    (NOISE_FAMILY, r"_add_noise_kernel|distribution_elementwise|normal_and_transform|philox|curand|random_from_to"),
    (OPTIMIZER_FAMILY, r"FusedAdam|FusedSgd|fused_adam|fused_sgd|_adam_kernel|_sgd_kernel|adagrad|lamb_kernel"),
    (
        ATTENTION,
        r"flash_fwd|flash_bwd|pytorch_flash|fmha|sdpa|flash_attn|attention|compute_dot_do_o|convert_dq|mem_eff",
    ),
    # Convolutions are matrix products as well; so are those of flash clipping, in place of ordinary training's own.
    (GEMM, r"nvjet|gemm|gemv|cutlass|splitKreduce|xmma|cublas|_mma_|bmm|matmul|dot_kernel|wgrad|dgrad|convolve|conv2d"),
    (GEMM, r"_scaled_sum_kernel|_sample_products_kernel|_conv_(norms|products|sum)_kernel"),
    (NORMALISATION, r"layer_?norm|GammaBeta|batch_?norm|group_?norm|rms_?norm|RowwiseMoments|bn_(fw|bw)"),
    # Softmax and the loss are reductions over the vocabulary.
    (REDUCTION, r"[Ss]oft_?[Mm]ax|nll_loss|cross_entropy"),
    (EMBEDDING, r"embedding|gather|index_?[Ss]elect|scatter|index_elementwise|index_put|indexing_backward|index_add"),
    (COPY, r"copy|CatArray|memcpy|memset|Memcpy|Memset|fillFunctor|FillFunctor|transpose|_to_copy"),
    (REDUCTION, r"multi_tensor_apply.*(LpNorm|[Nn]orm)|reduce_kernel|reduce_1Block|DeviceReduce|[Rr]educ|cumsum|Scan"),
    (OPTIMIZER_FAMILY, r"multi_tensor_apply"),
    (ELEMENTWISE, r"elementwise|pointwise|unrolled|arange|where|masked_fill|gelu|relu|silu"),
)
_KERNEL_FAMILIES = tuple((family, re.compile(pattern)) for family, pattern in _KERNEL_PATTERNS)


def kernel_family(name: str, phase: str | None = None) -> str:
    """Return the family of a kernel by its demangled name and, for generic kernels, the phase it ran in."""
    return _in_phase(next((family for family, pattern in _KERNEL_FAMILIES if pattern.search(name)), OTHER), phase)


def _in_phase(family: str, phase: str | None) -> str:
    return _WORK_OF_PHASE.get(phase or "", family) if family in _GENERIC else family


def short_kernel_name(name: str, length: int = 80) -> str:
    """Return a demangled name without return type, namespaces and arguments, but with its template arguments."""
    name = name.removeprefix("void ").replace("<unnamed>::", "").replace("(anonymous namespace)::", "")
    head, _, arguments = name.partition("<")
    head = head.partition("(")[0].rpartition("::")[2]
    inner = re.findall(r"(\w+(?:Functor\w*|_kernel_cuda|KernelImpl|Functor))\b", arguments)
    worth = [part for part in dict.fromkeys(inner) if "Metadata" not in part]
    short = f"{head}<{worth[0]}>" if worth else head
    return short if len(short) <= length else short[: length - 1] + "…"


# -- operators ---------------------------------------------------------------------------------------------------------

_OPERATOR_NAMES = {
    GEMM: "mm addmm addmm_ bmm baddbmm baddbmm_ _scaled_mm linear convolution _convolution "
    "convolution_backward cudnn_convolution mkldnn_convolution",
    NORMALISATION: "native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward "
    "native_batch_norm native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward _fused_rms_norm "
    "_fused_rms_norm_backward _native_batch_norm_legit _batch_norm_with_update batch_norm_backward",
    EMBEDDING: "embedding embedding_dense_backward embedding_renorm_ _embedding_bag index index_select gather "
    "index_put_ _index_put_impl_ index_add index_add_ index_copy_ scatter scatter_ scatter_add scatter_add_",
    REDUCTION: "sum mean norm linalg_vector_norm _foreach_norm amax amin max min prod var var_mean std any "
    "all argmax argmin logsumexp cumsum sort topk dot mv addmv count_nonzero _softmax _log_softmax "
    "_softmax_backward_data _log_softmax_backward_data nll_loss_forward nll_loss_backward nll_loss2d_forward "
    "nll_loss2d_backward",
    COPY: "copy_ clone _to_copy cat stack fill_ zero_ zeros ones full zeros_like ones_like full_like "
    "new_zeros new_ones new_full arange constant_pad_nd repeat roll "
    "im2col col2im _foreach_copy_ _foreach_zero_ _local_scalar_dense",
    NOISE_FAMILY: "normal normal_ randn randn_like",
    OPTIMIZER_FAMILY: "_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_",
}
_OPERATOR_FAMILIES = {name: family for family, names in _OPERATOR_NAMES.items() for name in names.split()}


def operator_family(name: str, shapes: Sequence[Sequence[int]], phase: str | None) -> str:
    """Return the family of an operator (`mm`), by its tensors' shapes and, if generic, its phase."""
    if "attention" in name:
        return ATTENTION
    family = _OPERATOR_FAMILIES.get(name, ELEMENTWISE)
    if family == GEMM and len(shapes) >= 2 and {len(shape) for shape in shapes[-2:]} in ({2}, {3}):
        (rows, inner), columns = shapes[-2][-2:], shapes[-1][-1]
        # A product with a single row or column is a weighted sum.
        family = ELEMENTWISE if inner == 1 else REDUCTION if 1 in (rows, columns) else GEMM
    return _in_phase(family, phase)


FigureRow = dict[str, Any]


class Sums:
    """Sums of named figures by key. With `steps`, rows hold averages over that many steps."""

    def __init__(self, *names: str, steps: int | None = None) -> None:
        self._names = names
        self._steps = steps
        self._sums: dict[Hashable, list[float]] = defaultdict(lambda: [0] * len(names))

    def add(self, key: Hashable, *values: float) -> None:
        sums = self._sums[key]
        for place, value in enumerate(values):
            sums[place] += value

    def rows(self, by: str, *keys: str) -> list[Any]:
        """Return a row for each key, with the parts of the key under the names of `keys`."""
        found = []
        for key, sums in self._sums.items():
            parts = key if isinstance(key, tuple) else (key,)
            values = sums if self._steps is None else [value / self._steps for value in sums]
            found.append({**dict(zip(keys, parts, strict=True)), **dict(zip(self._names, values, strict=True))})
        return sorted(found, key=lambda row: -row[by])


def shorten_rows(rows: list[Any], keys: Sequence[str], most: int) -> list[Any]:
    """Return the first `most` rows, and the rest added up as one."""
    if len(rows) <= most + 1:
        return rows
    rest = rows[most:]
    merged: FigureRow = dict.fromkeys(keys, "") | {keys[0]: f"({len(rest)} others)"}
    figures = [name for name, value in rest[0].items() if isinstance(value, int | float)]
    return [*rows[:most], merged | {name: sum(row[name] for row in rest) for name in figures}]
