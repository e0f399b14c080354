"""Sizes of the built-in workloads, validated on construction, without importing torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

from dpscope.errors import UserError

ATTENTIONS = ("sdpa", "opacus")
NORMS = ("none", "group", "batch")


def _require_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{name.replace('_', ' ')} must be a whole number of at least 1, not {value!r}")


def _require_one_of(config: object, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in allowed:
        raise UserError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A decoder transformer: token and position embeddings, pre-norm blocks, an untied output head."""

    kind: ClassVar[str] = "transformer"
    builder: ClassVar[str] = "dpscope.workloads.transformer:build"

    name: str
    vocab_size: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    max_seq_len: int
    attention: str = "sdpa"

    def __post_init__(self) -> None:
        _require_positive(self, "vocab_size", "hidden_dim", "num_layers", "num_heads", "max_seq_len")
        _require_one_of(self, "attention", ATTENTIONS)
        if self.hidden_dim % self.num_heads:
            raise UserError(
                f"hidden size {self.hidden_dim} is not divisible by {self.num_heads} attention heads: "
                "change --hidden-dim or --num-heads"
            )

    def resolve_seq_len(self, seq_len: int | None) -> int:
        """The sequence length of a run: as asked for, checked against the model's positions."""
        if seq_len is None:
            return min(256, self.max_seq_len)
        if seq_len > self.max_seq_len:
            raise UserError(
                f"sequence length {seq_len} is longer than the {self.max_seq_len} positions of model "
                f"{self.name!r}: pass --max-seq-len {seq_len} or a shorter --seq-len"
            )
        return seq_len


@dataclass(frozen=True, kw_only=True)
class CNNConfig:
    """Two convolutions with pooling and a Linear classifier."""

    kind: ClassVar[str] = "cnn"
    builder: ClassVar[str] = "dpscope.workloads.cnn:build"

    name: str
    image_size: int = 32
    num_classes: int = 10
    norm: str = "none"

    def __post_init__(self) -> None:
        _require_positive(self, "image_size", "num_classes")
        _require_one_of(self, "norm", NORMS)
        if self.image_size < 4:
            raise UserError(f"image size must be at least 4 for two poolings, not {self.image_size}")

    def resolve_seq_len(self, seq_len: int | None) -> None:
        if seq_len is not None:
            raise UserError(f"model {self.name!r} takes images and has no sequence length: leave out --seq-len")


WorkloadConfig = TransformerConfig | CNNConfig

PRESETS: dict[str, WorkloadConfig] = {
    preset.name: preset
    for preset in (
        # about 1.1M parameters: a step takes milliseconds on a CPU
        TransformerConfig(name="tiny", vocab_size=1000, hidden_dim=128, num_layers=4, num_heads=4, max_seq_len=512),
        # about 35M parameters
        TransformerConfig(name="small", vocab_size=8192, hidden_dim=512, num_layers=8, num_heads=8, max_seq_len=2048),
        # about 1.17B parameters, 33.5M of them positions
        TransformerConfig(name="1b", vocab_size=32000, hidden_dim=2048, num_layers=20, num_heads=16, max_seq_len=16384),
        CNNConfig(name="cnn"),
    )
}

_KINDS = {config.kind: config for config in (TransformerConfig, CNNConfig)}


def make_config(model: str, **overrides: Any) -> WorkloadConfig:
    """A preset with some of its sizes changed; `None` leaves a size as it is."""
    try:
        preset = PRESETS[model]
    except KeyError:
        raise UserError(f"unknown model {model!r}: choose one of {', '.join(PRESETS)}") from None
    given = {name: value for name, value in overrides.items() if value is not None}
    known = {field.name for field in fields(preset)} - {"name"}
    if foreign := sorted(set(given) - known):
        flags = ", ".join("--" + name.replace("_", "-") for name in foreign)
        raise UserError(f"model {model!r} has no {flags}")
    return replace(preset, **given)


def config_to_dict(config: WorkloadConfig) -> dict[str, Any]:
    return {"kind": config.kind, **asdict(config)}


def config_from_dict(data: dict[str, Any]) -> WorkloadConfig:
    values = dict(data)
    return _KINDS[values.pop("kind")](**values)
