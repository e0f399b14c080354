"""The base class of workload configs, the checks they share, adapters to train, and the built-in models."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

from dpscope.errors import UserError
from dpscope.numbers import LARGEST_SIZE, WholeNumber
from dpscope.vocabulary.settings import flag_of

EXAMPLE = "r=8,alpha=16,target=q_proj,v_proj"


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters: W + (alpha / r) B A, with A: (r, d) and B: (p, r) trained and W frozen."""

    r: int
    alpha: int
    target: tuple[str, ...]  # names of modules, or the ends of their names

    def __post_init__(self) -> None:
        for name in ("r", "alpha"):
            object.__setattr__(self, name, WholeNumber(f"--lora {name}")(getattr(self, name)))
        object.__setattr__(self, "target", tuple(self.target))  # lists come back from JSON
        if not self.target or not all(self.target):
            raise UserError(f"--lora needs the modules to adapt: as in --lora {EXAMPLE}")


def parse_lora(text: str) -> LoraSettings:
    """Parse `r=8,alpha=16,target=q_proj,v_proj`; alpha defaults to 2r. Names after `target=` are more targets."""
    values: dict[str, list[str]] = {}
    key = None
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if equals:
            key = name.strip()
            if key not in ("r", "alpha", "target") or key in values:
                raise UserError(f"--lora {text}: {key!r} is not one of r, alpha, target, each once: as in {EXAMPLE}")
            values[key] = [value.strip()]
        elif key == "target":
            values[key].append(name)
        else:
            raise UserError(f"--lora {text}: {part!r} has no name: write {EXAMPLE}")
    if "r" not in values or "target" not in values:
        raise UserError(f"--lora {text}: needs r and target: as in {EXAMPLE}")
    rank = _whole("r", values["r"][0])
    alpha = _whole("alpha", values["alpha"][0]) if "alpha" in values else 2 * rank
    return LoraSettings(r=rank, alpha=alpha, target=tuple(values["target"]))


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"--lora {name} must be a whole number of at least 1, not {text!r}") from None


C = TypeVar("C", bound="WorkloadConfig")

MAX_MODULES = 4096  # of a kind: torch builds them one by one, a few milliseconds each even without memory
# Sizes that Python counts through, where a tensor of any size is made at once.
LARGEST_BY_NAME = {"num_layers": MAX_MODULES, "num_classes": 10**6}


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """Description of what is trained: validated on construction, and sent to child processes as data."""

    kind: ClassVar[str]
    builder: ClassVar[str]  # "package.module:function" that makes a `Workload` of this config, a batch size, a length

    name: str
    lora: LoraSettings | None = None  # train adapters on the model instead of the model itself

    @property
    def is_known_trainable(self) -> bool:
        """True if every method is known to train the model, so that it need not be built to find out."""
        return False

    def resolve_seq_len(self, seq_len: int | None) -> int | None:
        """Return the sequence length of a run: as asked for and checked, or the default; None if there is none."""
        raise NotImplementedError

    def resized(self: C, **sizes: Any) -> C:
        """Return the same with some `sizes` changed, given by name."""
        known = {field.name for field in fields(self)} - {"name", "lora"}
        refuse_foreign_sizes(self.name, set(sizes) - known)
        return replace(self, **sizes)


def refuse_foreign_sizes(model: str, foreign: set[str]) -> None:
    if foreign:
        flags = ", ".join(map(flag_of, sorted(foreign)))
        raise UserError(f"model {model!r} has no {flags}")


def set_sizes(config: object, *names: str) -> None:
    """Check that sizes of a frozen config are whole numbers of at least 1, and store them as Python's own."""
    for name in names:
        object.__setattr__(config, name, whole_size(name, getattr(config, name)))


def whole_size(name: str, value: object) -> int:
    return WholeNumber(name.replace("_", " "), most=LARGEST_BY_NAME.get(name, LARGEST_SIZE))(value)


def require_one_of(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{what} must be one of {', '.join(allowed)}, not {value!r}")


def require_divisible(hidden_dim: int, num_heads: int) -> None:
    if hidden_dim % num_heads:
        raise UserError(
            f"hidden size {hidden_dim} is not divisible by {num_heads} attention heads: "
            "change --hidden-dim or --num-heads"
        )


def resolve_length(seq_len: int | None, positions: int | None, model: str) -> int:
    """Return a sequence length that the model has positions for. Default: 256, or the model's maximum."""
    if seq_len is None:
        return min(256, positions or 256)
    if positions is not None and seq_len > positions:
        raise UserError(
            f"sequence length {seq_len} is longer than the {positions} positions of model {model!r}: "
            f"pass --max-seq-len {seq_len} or a shorter --seq-len"
        )
    return seq_len


def refuse_length(seq_len: int | None, model: str) -> None:
    if seq_len is not None:
        raise UserError(f"model {model!r} takes images and has no sequence length: leave out --seq-len")


ATTENTIONS = ("sdpa", "opacus")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(WorkloadConfig):
    """A decoder transformer: token and position embeddings, pre-norm blocks, an untied output head."""

    kind: ClassVar[str] = "transformer"
    builder: ClassVar[str] = "dpscope.workloads.built_in:build_transformer"

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


NORMS = ("none", "group", "batch")

# Depth -> residual blocks in each of the four stages; a bottleneck block has three convolutions, a basic one two.
RESNET_STAGES = {10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
BOTTLENECK_DEPTHS = (50, 101)


@dataclass(frozen=True, kw_only=True)
class ImageConfig(WorkloadConfig):
    """Square RGB images and a number of classes."""

    norms: ClassVar[tuple[str, ...]] = NORMS
    least_size: ClassVar[int] = 1

    image_size: int
    num_classes: int
    norm: str

    def __post_init__(self) -> None:
        set_sizes(self, "image_size", "num_classes")
        require_one_of("norm", self.norm, self.norms)
        if self.image_size < self.least_size:
            raise UserError(
                f"image size must be at least {self.least_size} for what model {self.name!r} pools away, "
                f"not {self.image_size}"
            )

    def resolve_seq_len(self, seq_len: int | None) -> None:
        refuse_length(seq_len, self.name)


@dataclass(frozen=True, kw_only=True)
class CNNConfig(ImageConfig):
    """Two convolutions with pooling and a Linear classifier."""

    kind: ClassVar[str] = "cnn"
    builder: ClassVar[str] = "dpscope.workloads.built_in:build_cnn"
    least_size: ClassVar[int] = 4

    image_size: int = 32
    num_classes: int = 10
    norm: str = "none"


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(ImageConfig):
    """A residual network; `width` channels leave the stem, and each of the four stages doubles them."""

    kind: ClassVar[str] = "resnet"
    builder: ClassVar[str] = "dpscope.workloads.built_in:build_resnet"
    norms: ClassVar[tuple[str, ...]] = ("group", "batch")
    least_size: ClassVar[int] = 32

    depth: int
    width: int = 64
    image_size: int = 224
    num_classes: int = 1000
    norm: str = "group"

    def __post_init__(self) -> None:
        super().__post_init__()
        set_sizes(self, "width")
        if self.depth not in RESNET_STAGES:
            raise UserError(f"a ResNet's depth must be one of {', '.join(map(str, RESNET_STAGES))}, not {self.depth}")


PRESETS = (
    # about 1.1M parameters: a step takes milliseconds on a CPU
    TransformerConfig(name="tiny", vocab_size=1000, hidden_dim=128, num_layers=4, num_heads=4, max_seq_len=512),
    # about 35M parameters
    TransformerConfig(name="small", vocab_size=8192, hidden_dim=512, num_layers=8, num_heads=8, max_seq_len=2048),
    # about 1.17B parameters, 33.5M of them positions
    TransformerConfig(name="1b", vocab_size=32000, hidden_dim=2048, num_layers=20, num_heads=16, max_seq_len=16384),
    CNNConfig(name="cnn"),
    ResNetConfig(name="resnet18", depth=18),  # 11.7M parameters
    ResNetConfig(name="resnet50", depth=50),  # 25.6M parameters
    # 0.3M parameters: a step takes milliseconds on a CPU
    ResNetConfig(name="resnet-tiny", depth=10, width=16, image_size=64, num_classes=10),
)
