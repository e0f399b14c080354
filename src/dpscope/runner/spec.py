"""The run spec: one frozen, validated, hashable description of one measurement."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dpscope import numbers
from dpscope.errors import UserError
from dpscope.vocabulary.methods import resolve_method
from dpscope.vocabulary.settings import SETTINGS, OneOf, TrainerSettings
from dpscope.workloads.configs import WorkloadConfig, config_from_dict, config_to_dict

# Each instrument, and how it can be asked to look: option -> default.
INSTRUMENTS: dict[str, dict[str, Any]] = {
    "time": {},
    # memory_viz: also write the file that PyTorch's memory_viz page opens; rule: a component rule of the user's own
    "memory": {"memory_viz": False, "rule": None},
    "ncu": {
        "per_kernel": False,  # also kernel by kernel
        "kernel": "",  # only kernels whose demangled name matches
        "top": 30,  # kernels shown one by one; the rest is added up
        "budget": 120.0,  # seconds in which kernels are counted one by one
        "metrics": "",  # more metrics, of ncu or of nvprof, separated by commas
        "require_measured": False,  # no estimate instead
    },
    "nsys": {
        "captured_steps": 3,  # what is on the timeline; the first begins with an idle GPU, the others follow each other
        "trace": "cuda,nvtx,osrt,cudnn,cublas",  # what nsys records
        "cpu_sampling": False,  # where the host's threads are, by interrupts
        "gpu_metrics": False,  # utilisation of the GPU's units over time
        "autograd": False,  # an NVTX range for every operator
    },
    "trace": {
        "schedule": "short",
        "trace_steps": None,  # None: as many as the schedule records
        **dict.fromkeys(("shapes", "memory", "stacks", "modules", "flops"), False),
    },
}

# Each number among the options of instruments, with its check.
_OPTION_NUMBERS: dict[str, Callable[[object], int | float]] = {
    "top": numbers.WholeNumber("--top", 1, 10**6),
    "budget": numbers.RealNumber("--budget, in seconds,", 1e-3, 1e7),
    "captured_steps": numbers.WholeNumber("captured steps", 1, 1000),
    "trace_steps": numbers.WholeNumber("--trace-steps", 1, 1000),
}


@dataclass(frozen=True, kw_only=True)
class RunSpec(TrainerSettings):
    """Everything that decides what a measurement measures, and nothing else: beside the settings, these."""

    workload: WorkloadConfig
    method: str
    seq_len: int | None = None
    instrument: str = "time"
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)  # of the instrument; defaults are left out

    def __post_init__(self) -> None:
        length = None if self.seq_len is None else numbers.SEQUENCE_LENGTH(self.seq_len)
        checked = {
            "method": resolve_method(self.method).name,
            **self.checked(),
            "seq_len": self.workload.resolve_seq_len(length),
            "instrument": OneOf("instrument", tuple(INSTRUMENTS))(self.instrument),
            "options": _changed_options(self.instrument, self.options),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.dtype == "tf32" and self.device == "cpu":
            raise UserError("dtype tf32 is a CUDA number format: use fp32 or bf16 on the CPU")

    @property
    def settings(self) -> TrainerSettings:
        """What a trainer is told."""
        return TrainerSettings(**{name: getattr(self, name) for name in SETTINGS})

    def to_dict(self) -> dict[str, Any]:
        return {
            "workload": config_to_dict(self.workload),
            "method": self.method,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            **self.written(),
            "instrument": self.instrument,
            "options": dict(self.options),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RunSpec:
        known = {field.name for field in fields(cls)}
        values = {name: value for name, value in data.items() if name in known}
        return cls(**{**values, "workload": config_from_dict(data["workload"])})

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that are the same for equal specs on every machine."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def option(self, name: str) -> Any:
        """What the instrument was asked for, or its default."""
        return self.options.get(name, INSTRUMENTS[self.instrument][name])

    @property
    def label(self) -> str:
        """What a person calls this run: `ghost tiny bs4 seq128 fp32`."""
        length = "" if self.seq_len is None else f" seq{self.seq_len}"
        later = (
            SETTINGS[name].flag[2:] + ("" if value is True else f"={value}") for name, value in self.changed().items()
        )
        return " ".join([f"{self.method} {self.workload.name} bs{self.batch_size}{length} {self.dtype}", *later])

    @property
    def file_name(self) -> str:
        """What a person would ask, in characters that every file system takes; the digest tells equal names apart."""
        readable = re.sub(r"[^A-Za-z0-9._+-]+", "-", self.label.replace(" ", "_"))[:120]
        return f"{readable}-{self.instrument}-{self.digest[:8]}.json"


def _changed_options(instrument: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What differs from the instrument's defaults, in its order: equal requests are equal specs."""
    known = INSTRUMENTS[instrument]
    if foreign := sorted(set(options) - set(known)):
        allowed = f"it knows {', '.join(known)}" if known else "it has none"
        raise UserError(f"instrument {instrument!r} has no option {', '.join(foreign)}: {allowed}")
    checked = {name: _option(name, options[name], default) for name, default in known.items() if name in options}
    return {name: value for name, value in checked.items() if value != known[name]}


def _option(name: str, value: Any, default: Any) -> Any:
    """The value as its check returns it, or as it is if it is the default or of the default's type."""
    if value is default:
        return value
    if name in _OPTION_NUMBERS:
        return _OPTION_NUMBERS[name](value)
    wanted = str if default is None else type(default)
    if not isinstance(value, wanted):
        raise UserError(f"option {name!r} must be a {wanted.__name__}, not {value!r}")
    return value
