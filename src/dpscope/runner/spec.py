"""The run spec: one frozen, validated, hashable description of one measurement."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dpscope import numbers
from dpscope.errors import UserError
from dpscope.vocabulary.instruments import INSTRUMENTS, changed_options
from dpscope.vocabulary.methods import resolve_method
from dpscope.vocabulary.settings import CUDA_GRAPHS, EAGER, SETTINGS, OneOf, TrainerSettings
from dpscope.workloads.configs import WorkloadConfig, config_from_dict, config_to_dict


@dataclass(frozen=True, kw_only=True)
class RunSpec(TrainerSettings):
    """Description of one measurement: workload, method, instrument, and the settings of the row.

    It is frozen and hashable. Two equal specs have the same `digest` on every machine.

    Args:
        workload: What is trained, as `make_config` returns it.
        method: `standard`, `flat`, `ghost`, `flash`, or another method's name or alias.
        seq_len: The sequence length; by default the workload's. None for images.
        instrument: How the step is observed: `time`, `memory`, `trace`, `ncu` or `nsys`.
        options: Options of the instrument; defaults are left out.
        batch_size: Samples in a batch.
        dtype: Number format of the step: `fp32`, `tf32` or `bf16` (autocast).
        param_dtype: Number format of the weights: `fp32` or `bf16`.
        checkpoint_blocks: Recompute activations inside blocks in the backward pass.
        compile: Mode of torch.compile; `none` runs eagerly.
        cuda_graph: Replay each step as one CUDA graph.
        accumulate: Batches that make one step.
        gpus: Processes that train the model together.
        parallel: How they hold it: `ddp`, `fsdp` or `hsdp`.
        simulate_world: Number of processes of which this one is measured alone.
        link_gbps: Bandwidth of a rank's link, for a simulated world.
        memory_budget: Memory that `flash` may hold to be faster: `auto`, `lean` or GiB.
        optimizer: `adamw`, `adam` or `sgd`.
        learning_rate: Learning rate of the optimizer.
        noise_multiplier: Noise of a step divided by the clip norm.
        max_grad_norm: The clip norm C.
        clipping: Clipping rule of `flash`, one of `CLIPPING_RULES`.
        warmup: Steps that are not timed.
        steps: Steps that are timed.
        seed: Seed of weights and data.
        device: `cpu` or `cuda`.

    Raises:
        UserError: A setting is wrong, or two do not go together.

    Example:
        >>> spec = dpscope.RunSpec(workload=dpscope.make_config("tiny"), method="flash", batch_size=4, seq_len=64)
    """

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
            "options": changed_options(self.instrument, self.options),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.dtype == "tf32" and self.device == "cpu":
            raise UserError("dtype tf32 is a CUDA number format: use fp32 or bf16 on the CPU")
        if self.compile == CUDA_GRAPHS and self.device == "cpu":
            raise UserError(f"--compile {CUDA_GRAPHS} is CUDA graphs: use --compile default on the CPU")
        if self.cuda_graph:
            self._require_graphs()
        if self.gpus > 1 and self.simulate_world > 1:
            raise UserError("--simulate-world takes the place of other processes: leave out --gpus")
        if self.parallel == "hsdp" and self.world_size > 1 and self.world_size % 2:
            raise UserError("hsdp has two replicas: give --gpus or --simulate-world an even number")
        if self.param_dtype not in ("fp32", self.dtype):
            raise UserError(
                f"weights in {self.param_dtype} are multiplied in {self.param_dtype}, not in {self.dtype}: add "
                f"--dtype {self.param_dtype}, or leave out --param-dtype"
            )

    def _require_graphs(self) -> None:
        """Refuse what a CUDA graph cannot be taken of."""
        if self.device == "cpu":
            raise UserError("--cuda-graph needs a GPU, and this row runs on the CPU: leave it out")
        if self.world_size > 1:
            raise UserError("--cuda-graph is of one process: leave out --gpus and --simulate-world")
        if self.compile not in (EAGER, "default"):
            raise UserError(
                f"--compile {self.compile} makes CUDA graphs itself: with --cuda-graph, use --compile default"
            )
        if self.instrument in ("ncu", "nsys"):
            raise UserError(f"{self.instrument} looks at single launches: measure them without --cuda-graph")

    @property
    def settings(self) -> TrainerSettings:
        """The part of the spec that trainers read."""
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
        """Return the given value of an instrument's option, or its default."""
        return self.options.get(name, INSTRUMENTS[self.instrument].options[name].default)

    @property
    def label(self) -> str:
        """Name of this run for people, such as `ghost tiny bs4 seq128 fp32`."""
        length = "" if self.seq_len is None else f" seq{self.seq_len}"
        later = (
            SETTINGS[name].flag[2:] + ("" if value is True else f"={value}") for name, value in self.changed().items()
        )
        return " ".join([f"{self.method} {self.workload.name} bs{self.batch_size}{length} {self.dtype}", *later])

    @property
    def file_name(self) -> str:
        """The label in characters that every file system takes, and the digest, which is unique."""
        readable = re.sub(r"[^A-Za-z0-9._+-]+", "-", self.label.replace(" ", "_"))[:120]
        return f"{readable}-{self.instrument}-{self.digest[:8]}.json"
