"""What results that nobody measured are made of: the smallest transformer, and a machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dpscope.results.schema import Result

# So small that a child process is all import and no arithmetic.
TINY_SIZES = {"num_layers": 1, "hidden_dim": 16, "num_heads": 2, "vocab_size": 50, "max_seq_len": 32}

ENVIRONMENT: dict[str, Any] = {
    "dpscope": "0.1.0",
    "torch": "2.13.0",
    "opacus": "1.6.0",
    "cuda": None,
    "driver": None,
    "gpu": None,
    "cpu": "a processor",
    "threads": 2,
}


def renamed(result: Result, method: str) -> Result:
    """The same figures, of another method."""
    return replace(result, experiment=method, spec={**result.spec, "method": method})
