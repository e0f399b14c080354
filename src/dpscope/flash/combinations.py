"""Combinations that are refused, each once: errors are made of these, and the table of docs/flash-limits.md is, too."""

from __future__ import annotations

from dataclasses import dataclass

from dpscope.errors import UserError

COMBINATIONS: list[Combination] = []
"""All that are made below, in their order."""


@dataclass(frozen=True)
class Combination:
    """Two things that do not go together, why, and what to do instead. {names} are filled in where it is refused."""

    one: str
    other: str
    why: str
    instead: str

    def __post_init__(self) -> None:
        COMBINATIONS.append(self)

    def error(self, **names: object) -> UserError:
        return UserError(f"{self.why.format(**names)}: {self.instead}")


MESHES = "flash clipping trains with DistributedDataParallel, fully_shard (FSDP2) on one mesh of all ranks, or HSDP"
_SPREADS = "{name} ({kind}) spreads the model in a way that is not supported"
_OPTION = "DistributedDataParallel({option}=…) changes how gradients are made, and flash clipping makes them itself"

# Ways to spread a model, by the names of classes: torch's, or of libraries that need not be installed.
WRAPPERS = {
    "DataParallel": Combination(
        "a private model",
        "`DataParallel`",
        _SPREADS,
        "it runs one process on several devices; use DistributedDataParallel under torchrun",
    ),
    "FullyShardedDataParallel": Combination(
        "a private model",
        "FSDP1 (`FullyShardedDataParallel`)",
        _SPREADS,
        "that is FSDP1; shard with torch.distributed.fsdp.fully_shard (FSDP2)",
    ),
    "DeepSpeedEngine": Combination(
        "a private model",
        "DeepSpeed",
        _SPREADS,
        "shard with torch.distributed.fsdp.fully_shard (FSDP2), or use DistributedDataParallel",
    ),
    "PipelineStage": Combination(
        "a private model",
        "pipeline stages",
        _SPREADS,
        "a stage of a pipeline has no whole sample; use fully_shard (FSDP2)",
    ),
}
COMPILED_FORWARD = Combination(
    "a private model",
    "a compiled `forward` (a function, not the module)",
    "the forward of {name} was compiled as a function, in which flash clipping cannot record its layers",
    "compile the module instead, by module.compile() or torch.compile(module)",
)
FOREIGN_SCALER = Combination(
    "a private optimizer",
    "torch's `GradScaler`",
    "torch's GradScaler scales the loss without flash clipping's knowledge, which then clips scaled gradients",
    "use dpscope.flash.GradScaler(optimizer=optimizer)",
)
DDP_OPTIONS = Combination("DDP", "`static_graph`, `mixed_precision`", _OPTION, "leave it out")
SHARDS_IN_DDP = Combination(
    "DDP", "`fully_shard` inside it", "{name} is sharded inside {kind}", f"{MESHES}, one of them"
)
MODEL_PARALLEL = Combination(
    "FSDP2, HSDP",
    "tensor, pipeline or context parallelism",
    "{name} is sharded over a mesh with the dimension {dimension!r}, over which a sample is spread (tensor, pipeline "
    "or context parallelism)",
    MESHES,
)
PART_OF_WORLD = Combination(
    "FSDP2, HSDP",
    "a mesh of some of the processes",
    "{name} is sharded over {size} of {world} processes (tensor, pipeline or context parallelism?)",
    MESHES,
)
OFFLOADED = Combination(
    "FSDP2, HSDP",
    "`CPUOffloadPolicy`",
    "{name} is on {device}, and its mesh on {mesh} (CPUOffloadPolicy)",
    "shard without offloading",
)
SAMPLED_SHARDS = Combination(
    "a module that runs sample by sample",
    "modules inside it that are sharded apart",
    "{name} ({kind}) runs sample by sample, and {inside} inside it is sharded apart",
    "give its own parameter to a small module, or call fully_shard on the outer one alone",
)
SECURE_RANKS = Combination(
    "several processes",
    "`secure_mode`",
    "secure_mode draws its noise on each rank apart, which adds it once for every rank",
    "leave it out; the keys of flash clipping's own noise come from the operating system",
)
MADE_UP_RANKS = Combination(
    "several processes",
    "`rand_on_empty=True`",
    "rand_on_empty=True makes up a sample on each rank whose share is empty, which one process would not",
    "leave it out",
)
GRAPHED_RANKS = Combination(
    "`make_graphed_step`",
    "several processes",
    "make_graphed_step captures one process",
    "train without DDP or FSDP2, or use the ordinary loop",
)
GRAPHED_BLOCKS = Combination(
    "`make_graphed_step`",
    "`memory_budget`",
    "make_graphed_step captures no blocks that run again",
    "leave out memory_budget",
)
GRAPHED_SCALER = Combination(
    "`make_graphed_step`",
    "`GradScaler`",
    "make_graphed_step captures no GradScaler",
    "use bfloat16, which needs none",
)
PADDED_ROWS = Combination(
    "`rows_per_sample`, `group_rows`",
    "`pad_batches`",
    "{option} and pad_batches do not go together, because padding would belong to a sample",
    "leave out one of them",
)
PADDED_OPACUS = Combination(
    "`pad_batches`",
    "other modes of Opacus (`grad_sample_mode`)",
    "pad_batches needs flash clipping",
    "leave out grad_sample_mode",
)
ADAM_BC = Combination(
    "`adam_bc`",
    "other optimizers than Adam and AdamW, `amsgrad`",
    "adam_bc corrects Adam and AdamW without amsgrad",
    "leave it out for other optimizers",
)
ADAM_BC_UNFUSED = Combination(
    "`adam_bc`",
    "`fused=False`, `secure_mode`, hooks of the optimizer, `pre_step()`",
    "adam_bc needs the fused update, which {cause} rules out",
    "call step() of an optimizer without hooks and without a learning rate as a tensor, and leave out fused=False",
)


def as_markdown() -> str:
    """Return all combinations as the table of docs/flash-limits.md."""
    rows = [f"| {each.one} | {each.other} | {each.instead} |" for each in COMBINATIONS]
    return "\n".join(["| this | does not go with | instead |", "| --- | --- | --- |", *rows])
