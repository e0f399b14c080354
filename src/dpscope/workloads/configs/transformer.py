"""Sizes of the built-in decoder transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dpscope.workloads.configs.base import (
    WorkloadConfig,
    require_divisible,
    require_one_of,
    resolve_length,
    set_sizes,
)

ATTENTIONS = ("sdpa", "opacus")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(WorkloadConfig):
    """A decoder transformer: token and position embeddings, pre-norm blocks, an untied output head."""

    kind: ClassVar[str] = "transformer"
    builder: ClassVar[str] = "dpscope.workloads.transformer:build"

    vocab_size: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    max_seq_len: int
    attention: str = "sdpa"

    def __post_init__(self) -> None:
        set_sizes(self, "vocab_size", "hidden_dim", "num_layers", "num_heads", "max_seq_len")
        require_one_of("attention", self.attention, ATTENTIONS)
        require_divisible(self.hidden_dim, self.num_heads)

    @property
    def is_known_trainable(self) -> bool:
        largest = self.hidden_dim * max(self.vocab_size, self.max_seq_len, 4 * self.hidden_dim)  # weight, in elements
        return self.attention == "sdpa" and self.lora is None and 8 * largest < 2**63

    def resolve_seq_len(self, seq_len: int | None) -> int:
        return resolve_length(seq_len, self.max_seq_len, self.name)


PRESETS = (
    # about 1.1M parameters: a step takes milliseconds on a CPU
    TransformerConfig(name="tiny", vocab_size=1000, hidden_dim=128, num_layers=4, num_heads=4, max_seq_len=512),
    # about 35M parameters
    TransformerConfig(name="small", vocab_size=8192, hidden_dim=512, num_layers=8, num_heads=8, max_seq_len=2048),
    # about 1.17B parameters, 33.5M of them positions
    TransformerConfig(name="1b", vocab_size=32000, hidden_dim=2048, num_layers=20, num_heads=16, max_seq_len=16384),
)
