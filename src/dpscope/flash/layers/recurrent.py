"""Recurrent layers: units like any other, that may be given a PackedSequence.

A packed sequence is padded to (B, T, ·) with its lengths, which are rows of samples; each sample is packed again for
the layer itself, so that padding is never seen by it, and the answer is packed as the input was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from dpscope.flash.compiled.traced import break_graph
from dpscope.flash.layers.opaque import OpaqueTap
from dpscope.flash.taps import Engine


class RecurrentTap(OpaqueTap):
    def __init__(self, engine: Engine, name: str, module: nn.Module) -> None:
        self.padded = _PaddedTap(engine, name, module)
        super().__init__(engine, name, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return break_graph(self, args, kwargs)
        given = args[0] if args else kwargs.get("input")
        trained = torch.is_grad_enabled() or self.rehearsal is not None
        if not isinstance(given, PackedSequence) or not trained:
            return super().__call__(*args, **kwargs)
        kwargs.pop("input", None)
        first = self.padded.batch_first
        x, lengths = pad_packed_sequence(given, batch_first=first)
        y, *rest = self.padded(x, lengths, *args[1:], *kwargs.values())
        order = given.sorted_indices
        if order is not None:  # packed as the input was, sample by sample
            y, lengths = y.index_select(0 if first else 1, order), lengths[order.to(lengths.device)]
        data = pack_padded_sequence(y, lengths, batch_first=first).data
        return PackedSequence(data, given.batch_sizes, order, given.unsorted_indices), *rest


class _PaddedTap(OpaqueTap):
    """The layer as a function of padded sequences and their lengths, one sample after the other."""

    def __init__(self, engine: Engine, name: str, module: nn.Module) -> None:
        super().__init__(engine, name, module)
        self.batch_first = bool(module.batch_first)
        self.packed_forward, self.original = self.original, self._forward
        self.call._run = self._forward
        self.input_dims = {**self.input_dims, "lengths": 0}
        self.by_loop = True
        self.describe("a loop over samples where sequences are packed")

    def _forward(self, input: Tensor, lengths: Tensor, hx: Any = None) -> Any:
        packed = pack_padded_sequence(input, lengths.cpu(), batch_first=self.batch_first, enforce_sorted=False)
        y, state = self.packed_forward(packed, hx)
        length = input.shape[1 if self.batch_first else 0]
        return pad_packed_sequence(y, batch_first=self.batch_first, total_length=length)[0], state
