"""Settings of a row. Each is a field with its texts for commands, result files and reports.

docs/architecture.md says how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any

from dpscope import numbers
from dpscope.errors import UserError

DTYPES = ("fp32", "tf32", "bf16")
PARAM_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}  # name -> torch's
OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}  # name -> class in torch.optim
DEVICES = ("cpu", "cuda")
DEVICE_CHOICES = ("auto", *DEVICES)  # auto: the one that is there

PARALLEL = ("ddp", "fsdp", "hsdp")  # DistributedDataParallel, fully_shard, fully_shard over replicas
MEMORY_BUDGETS = ("auto", "lean")  # or a number of GiB
CLIPPING_RULES = ("flat", "automatic", "normalised", "psac", "per_layer", "adaptive")  # those that need no names
SWITCHED = {"off": False, "on": True}  # what the flag of a switch that a sweep may vary is given
EAGER = "none"
CUDA_GRAPHS = "reduce-overhead"
# mode of torch.compile -> what reports call a row that ran so
COMPILE_MODES = {
    EAGER: "eager",
    "default": "compiled",
    CUDA_GRAPHS: f"compiled ({CUDA_GRAPHS})",
    "max-autotune": "compiled (max-autotune)",
}

# What every result file holds. A later setting is written, and counts in a row's digest, only where it differs from its
# default: rows measured before it existed keep their digest, and `--resume` keeps them.
FIRST_SETTINGS = (
    *("batch_size", "dtype", "optimizer", "learning_rate", "noise_multiplier", "max_grad_norm"),
    *("warmup", "steps", "seed", "device"),
)

# How the same step may run: eager with these, which is what compiled and captured rows are also compared with.
EAGERLY = {"compile": EAGER, "cuda_graph": False}

# Where another value makes another row: always, only within one sweep (`report --against` pairs such rows), or never.
EVERYWHERE, WITHIN_A_SWEEP, NOWHERE = "everywhere", "within a sweep", "nowhere"


@dataclass(frozen=True)
class OneOf:
    """A check for words. `aliases`: other spellings that people use."""

    what: str
    allowed: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, value: object) -> str:
        word = self.aliases.get(value, value) if isinstance(value, str) else ""
        if word not in self.allowed:
            raise UserError(f"unknown {self.what} {value!r}: choose one of {', '.join(self.allowed)}")
        return word


@dataclass(frozen=True)
class Switch:
    """Check of a switch, on or off. A switch is off by default: its flag turns it on."""

    what: str

    def __call__(self, value: object) -> bool:
        named = SWITCHED.get(value, value) if isinstance(value, str) else value
        if not isinstance(named, bool):
            raise UserError(f"{self.what} must be True or False, not {value!r}")
        return named


def memory_budget(value: object) -> str:
    """Return a check for the memory budget of flash clipping: a word, or a number of GiB."""
    if value in MEMORY_BUDGETS:
        return str(value)
    try:
        gib = float(str(value))
    except ValueError:
        allowed = ", ".join(MEMORY_BUDGETS)
        raise UserError(f"unknown memory budget {value!r}: choose one of {allowed}, or a number of GiB") from None
    return f"{numbers.MEMORY_BUDGET(gib):g}"


@dataclass(frozen=True)
class SettingField:
    """Description of a setting beside its value. `name` and `default` are those of its field."""

    check: Callable[[Any], Any]  # returns the value in its plain type, or raises `UserError`
    help: str = ""  # of its flag; a setting without has none
    identity: str = EVERYWHERE
    flag_default: Any = None  # where it is not the field's
    label: str = ""  # what people call it [default: its name]
    words: str = ""  # how a sentence tells its value [default: label and value]
    heading: str = ""  # in the page's table of settings; a setting without is not in it
    values: Mapping[str, str] = field(default_factory=dict)  # what people call its values [default: as they are]
    several: str = ""  # an example of several values; a sweep has rows for each of them. Without, there is but one
    name: str = ""
    default: Any = None

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def column(self) -> str:
        return self.name.replace("_", " ")

    @property
    def is_later(self) -> bool:
        return self.name not in FIRST_SETTINGS

    @property
    def speaks_for_itself(self) -> bool:
        """`bf16`, not `dtype bf16`."""
        return self.words == "{}"

    def of(self, spec: Mapping[str, Any]) -> Any:
        """Return its value in a result's spec."""
        return spec.get(self.name, self.default)

    def cell(self, spec: Mapping[str, Any]) -> str:
        """Return the setting's value for a table."""
        return self._shown(self.of(spec), on="yes", off="no")

    def in_words(self, spec: Mapping[str, Any]) -> str:
        """Return that value for a sentence: `noise multiplier 0.5`, `bf16`, `3 warm-up`."""
        value = self.of(spec)
        shown = self._shown(value, on=self.label, off=f"no {self.label}")
        return shown if isinstance(value, bool) else self.words.format(shown)

    def _shown(self, value: Any, *, on: str, off: str) -> str:
        if isinstance(value, bool):
            return on if value else off
        return f"{value:g}" if isinstance(value, float) else self.values.get(value, str(value))


def setting(default: Any, *about: Any, **more: Any) -> Any:
    """Return a field of `TrainerSettings`. Arguments after the default are fields of `SettingField`."""
    return field(default=default, metadata={"setting": SettingField(*about, **more)})


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """Settings of a step that all methods share: how it is built and how often it runs."""

    # expected samples in a (physical) batch; the noisy sum of a step is divided by `logical_batch_size`
    batch_size: int = field(metadata={"setting": SettingField(numbers.BATCH_SIZE)})
    dtype: str = setting(
        "fp32", OneOf("dtype", DTYPES), f"{'|'.join(DTYPES)} (bf16: autocast).", words="{}", heading="Number format"
    )
    param_dtype: str = setting(
        "fp32",
        OneOf("param dtype", tuple(PARAM_DTYPES), {name: short for short, name in PARAM_DTYPES.items()}),
        f"{'|'.join(PARAM_DTYPES)}: what weights are stored in; adapters of --lora stay in fp32.",
        label="parameters",
        words="parameters in {}",
        heading="Parameters in",
    )
    checkpoint_blocks: bool = setting(
        False,
        Switch("checkpoint blocks"),
        "Keep no activations inside blocks; backward runs each block's forward again.",
        label="checkpointed blocks",
        heading="Blocks checkpointed",
    )
    compile: str = setting(
        EAGER,
        OneOf("compile mode", tuple(COMPILE_MODES)),
        f"{'|'.join(COMPILE_MODES)}: the mode of torch.compile.",
        words="{}",
        heading="Model runs",
        values=COMPILE_MODES,
        several="none,default",
    )
    cuda_graph: bool = setting(
        False,
        Switch("cuda graph"),
        "Replay steps as one CUDA graph (standard, flash).",
        label="CUDA graph",
        heading="Steps as a CUDA graph",
        several="off,on",
    )
    accumulate: int = setting(
        1,
        numbers.ACCUMULATE,
        "Batches of --batch-size that make one step.",
        label="batches a step",
        words="{} × the batch a step",
        heading="Batches a step",
    )
    gpus: int = setting(
        1,
        numbers.RANKS,
        "Processes that train one model together, each on its own GPU; --batch-size is of each.",
        label="GPUs",
        words="{} GPUs",
        heading="GPUs",
        several="1,4",
    )
    parallel: str = setting(
        "ddp",
        OneOf("way to spread a model", PARALLEL),
        f"{'|'.join(PARALLEL)}: how several processes hold the model.",
        words="spread by {}",
        heading="Spread by",
    )
    simulate_world: int = setting(
        1,
        numbers.RANKS,
        "Be one of N processes without the others: collectives return at once (a simulation).",
        label="simulated ranks",
        words="one of {} simulated ranks",
        heading="Simulated ranks",
    )
    link_gbps: float = setting(
        400.0,  # one network card for each GPU, as in machines of eight
        numbers.LINK_GBPS,
        "Gbit/s of a rank's link, by which a simulated world's sending time is computed.",
        words="links of {} Gbit/s",
    )
    memory_budget: str = setting(
        "auto",
        memory_budget,
        "What flash may hold to be faster: auto (the peak of standard), lean, or GiB.",
        heading="Memory budget of flash",
    )
    optimizer: str = setting(
        "adamw", OneOf("optimizer", tuple(OPTIMIZERS)), f"{'|'.join(OPTIMIZERS)}.", words="{}", heading="Optimizer"
    )
    learning_rate: float = setting(1e-4, numbers.LEARNING_RATE, "Step size.", WITHIN_A_SWEEP)
    noise_multiplier: float = setting(1.0, numbers.NOISE_MULTIPLIER, "Noise per clip norm.", heading="Noise multiplier")
    max_grad_norm: float = setting(1.0, numbers.MAX_GRAD_NORM, "Clip norm.", heading="Clipping norm")
    clipping: str = setting(
        "flat",
        OneOf("clipping rule", CLIPPING_RULES),
        f"{'|'.join(CLIPPING_RULES)}: how flash clips.",
        words="{} clipping",
        heading="Clipping rule of flash",
        several="flat,per_layer",
    )
    warmup: int = setting(
        3, numbers.WARMUP_STEPS, "Steps before the timed ones.", NOWHERE, label="warm-up steps", words="{} warm-up"
    )
    steps: int = setting(10, numbers.STEPS, "Timed steps.", NOWHERE, label="timed steps", words="{} timed steps")
    seed: int = setting(0, numbers.SEED, "Of weights, data and noise.", WITHIN_A_SWEEP)
    device: str = setting(
        "cpu", OneOf("device", DEVICES), f"{'|'.join(DEVICE_CHOICES)}.", WITHIN_A_SWEEP, flag_default="auto", words="{}"
    )

    @property
    def logical_batch_size(self) -> int:
        """Expected samples in a step, by which the noisy sum is divided."""
        return self.batch_size * self.accumulate * self.world_size

    @property
    def world_size(self) -> int:
        """Processes over which the model is spread, real or simulated."""
        return max(self.gpus, self.simulate_world)

    def checked(self) -> dict[str, Any]:
        """Return every setting, checked and converted, so that 1, 1.0 and NumPy's 1 have the same digest."""
        return {name: each.check(getattr(self, name)) for name, each in SETTINGS.items()}

    def written(self) -> dict[str, Any]:
        """Return the settings as result files hold them; digests are made of this."""
        return {name: getattr(self, name) for name in FIRST_SETTINGS} | self.changed()

    def changed(self) -> dict[str, Any]:
        """Return the later settings that differ from their defaults."""
        later = {name: getattr(self, name) for name in LATER_DEFAULTS}
        return {name: value for name, value in later.items() if value != LATER_DEFAULTS[name]}


def _described(each: Field[Any]) -> SettingField:
    about: SettingField = each.metadata["setting"]
    label = about.label or each.name.replace("_", " ")
    words = about.words or f"{label} {{}}"
    return replace(about, name=each.name, default=each.default, label=label, words=words)


SETTINGS = {each.name: _described(each) for each in fields(TrainerSettings)}
FLAGS = tuple(name for name, each in SETTINGS.items() if each.help)
LATER_DEFAULTS = {name: each.default for name, each in SETTINGS.items() if each.is_later}
COMPARED = tuple(name for name in FLAGS if SETTINGS[name].identity == EVERYWHERE)  # what tables show where it varies
SWEPT = tuple(name for name in FLAGS if SETTINGS[name].several)
REPEATS = tuple(name for name in FLAGS if SETTINGS[name].identity == NOWHERE)


def flag_of(name: str) -> str:
    """Return `--batch-size`."""
    return f"--{name.replace('_', '-')}"


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """Return `--batch-size 8`; a switch that is on has no value. Numbers are written in full."""
    return [
        word for name, value in values.items() for word in (flag_of(name), *([] if value is True else [str(value)]))
    ]
