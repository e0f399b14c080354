"""CUDA graphs that are captured by hand: a private step in one is refused."""

from __future__ import annotations

import torch

from dpscope.errors import UserError


def refuse_capture() -> None:
    """Raise UserError while the current stream is captured (torch.cuda.graph, make_graphed_callables).

    The step's key, Adam's corrections and the learning rate are host values. A replayed graph would use them again:
    above all, the same noise. The code that counts samples and accounts for privacy would not run at all.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        raise UserError(
            "private training is being captured in a CUDA graph by hand, and each replay would add the same noise: use "
            'torch.compile(model, mode="reduce-overhead") instead'
        )
