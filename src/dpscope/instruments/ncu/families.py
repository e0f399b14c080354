"""From a kernel's name to a family that a person recognises."""

from __future__ import annotations

import re

from dpscope.vocabulary.families import (
    ATTENTION,
    CLIPPING,
    COPY,
    ELEMENTWISE,
    EMBEDDING,
    GEMM,
    NOISE,
    NORMALISATION,
    OPTIMIZER,
    OTHER,
    REDUCTION,
)

# The first pattern that is found decides. Attention is looked for before GEMM (its kernels are built of GEMM pieces),
# and what a generic kernel was made for (`vectorized_elementwise_kernel<…copy_kernel…>`) before the generic name.
_PATTERNS: tuple[tuple[str, str], ...] = (
    (CLIPPING, r"_gram_kernel|_gram_ids_kernel|_gram_finish_kernel|_kept_norms_kernel|_sums_kernel"),
    (NOISE, r"_add_noise_kernel|distribution_elementwise|normal_and_transform|philox|curand|random_from_to"),
    (OPTIMIZER, r"FusedAdam|FusedSgd|fused_adam|fused_sgd|_adam_kernel|_sgd_kernel|adagrad|lamb_kernel"),
    (
        ATTENTION,
        r"flash_fwd|flash_bwd|pytorch_flash|fmha|sdpa|flash_attn|attention|compute_dot_do_o|convert_dq|mem_eff",
    ),
    # Convolutions are matrix products as well; so is flash clipping's sum, in place of ordinary training's own.
    (GEMM, r"nvjet|gemm|gemv|cutlass|splitKreduce|xmma|cublas|_mma_|bmm|matmul|dot_kernel|wgrad|dgrad|convolve|conv2d"),
    (GEMM, r"_scaled_sum_kernel"),
    (NORMALISATION, r"layer_?norm|GammaBeta|batch_?norm|group_?norm|rms_?norm|RowwiseMoments|bn_(fw|bw)"),
    # Softmax and the loss are reductions over the vocabulary.
    (REDUCTION, r"[Ss]oft_?[Mm]ax|nll_loss|cross_entropy"),
    (EMBEDDING, r"embedding|gather|index_?[Ss]elect|scatter|index_elementwise|index_put|indexing_backward|index_add"),
    (COPY, r"copy|CatArray|memcpy|memset|Memcpy|Memset|fillFunctor|FillFunctor|transpose|_to_copy"),
    (REDUCTION, r"multi_tensor_apply.*(LpNorm|[Nn]orm)|reduce_kernel|reduce_1Block|DeviceReduce|[Rr]educ|cumsum|Scan"),
    (OPTIMIZER, r"multi_tensor_apply"),
    (ELEMENTWISE, r"elementwise|pointwise|unrolled|triton_poi|arange|where|masked_fill|gelu|relu|silu"),
    (REDUCTION, r"triton_red|triton_per"),
)
_FAMILIES = tuple((family, re.compile(pattern)) for family, pattern in _PATTERNS)

# In these phases generic kernels do the phase's own work: an addition in `noise` is the noise being added.
_GENERIC = {ELEMENTWISE, REDUCTION, COPY}
_WORK_OF_PHASE = {"clip": CLIPPING, "noise": NOISE, "optimizer": OPTIMIZER}


def family_of(name: str, phase: str | None = None) -> str:
    """The family of a kernel by its demangled name and, for generic kernels, the phase it ran in."""
    family = next((family for family, pattern in _FAMILIES if pattern.search(name)), OTHER)
    return _WORK_OF_PHASE.get(phase or "", family) if family in _GENERIC else family


def short_name(name: str, length: int = 80) -> str:
    """A demangled name without return type, namespaces and arguments, but with what it was instantiated for."""
    name = name.removeprefix("void ").replace("<unnamed>::", "").replace("(anonymous namespace)::", "")
    head, _, arguments = name.partition("<")
    head = head.partition("(")[0].rpartition("::")[2]
    inner = re.findall(r"(\w+(?:Functor\w*|_kernel_cuda|KernelImpl|Functor))\b", arguments)
    worth = [part for part in dict.fromkeys(inner) if "Metadata" not in part]
    short = f"{head}<{worth[0]}>" if worth else head
    return short if len(short) <= length else short[: length - 1] + "…"
