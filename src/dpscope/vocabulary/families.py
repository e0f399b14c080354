"""Families of kernels and operators: work a person recognises, not symbol names.

Instruments sort names into families; reports show them in this order. Nothing here needs torch.
"""

from __future__ import annotations

GEMM = "gemm"
ATTENTION = "attention"
ELEMENTWISE = "elementwise"
REDUCTION = "reduction"
NORMALISATION = "normalisation"
OPTIMIZER_FAMILY = "optimizer"
CLIPPING = "clipping"
NOISE_FAMILY = "noise"
COPY = "copy"
EMBEDDING = "embedding"
COLLECTIVE = "collective"
OTHER = "other"

FAMILY_LABELS = {
    GEMM: "matrix products",
    ATTENTION: "attention",
    ELEMENTWISE: "elementwise",
    REDUCTION: "reductions",
    NORMALISATION: "normalisation",
    OPTIMIZER_FAMILY: "optimizer",
    CLIPPING: "clipping",
    NOISE_FAMILY: "noise",
    COPY: "copies, casts and fills",
    EMBEDDING: "embedding and indexing",
    COLLECTIVE: "collectives between ranks",
    OTHER: "other",
}

FAMILIES = tuple(FAMILY_LABELS)
