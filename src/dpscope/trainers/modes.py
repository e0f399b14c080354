"""Modes of a step: blocks checkpointed or sharded, the model compiled, steps captured as CUDA graphs.

A model of Hugging Face knows its blocks. In any other model they are modules of one class that repeat in an
`nn.ModuleList` or `nn.Sequential` and have modules of their own: transformer layers, residual blocks. A checkpointed
block keeps nothing of what its forward computes, and backward runs that forward again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dpscope.errors import MeasurementFailed, UserError
from dpscope.flash.torch_side.arguments import replace_leaves, sizes_of, tensors_in
from dpscope.flash.torch_side.captures import as_captured, record
from dpscope.flash.torch_side.torch_version import require_for_shards
from dpscope.packages import install_command
from dpscope.vocabulary.settings import TrainerSettings
from dpscope.workloads.workload import Batch

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from dpscope.flash.graphed.step import GraphedStep


class Checkpoints:
    """Count of blocks that ran under a checkpoint; torch calls it, as `context_fn`, for each of them."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        self.runs += 1
        return nullcontext(), nullcontext()

    def require_runs(self) -> None:
        """Raise `UserError` if blocks were found, but a forward pass bypassed their checkpoints."""
        if not self.runs:
            raise UserError(
                "the model's blocks ran without checkpoints: call model.train() for a Hugging Face model, call blocks "
                "as modules (block(x)) in any other, or leave out --checkpoint-blocks"
            )


class Checkpointed(nn.Module):
    """A block whose calls, its hooks among them, run under `torch.utils.checkpoint`."""

    checkpoints: Checkpoints | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        return checkpoint(super().__call__, *args, **_options(self.checkpoints), **kwargs)


def _options(checkpoints: Checkpoints | None) -> dict[str, Any]:
    """Return options of torch's checkpoint. torch.compile takes no `context_fn` but a function of its own."""
    return {"use_reentrant": False, **({} if checkpoints is None else {"context_fn": checkpoints})}


def checkpoint_blocks(model: nn.Module, *, compiled: bool = False) -> Checkpoints | None:
    """Checkpoint every block of the model; raise `UserError` if there is none.

    Runs of a model that will be `compiled` are not counted.
    """
    checkpoints = None if compiled else Checkpoints()
    if not _checkpoint_in(model, checkpoints):
        raise UserError(
            "the model has no blocks to checkpoint: no nn.ModuleList or nn.Sequential repeats a module with layers. "
            "Put repeated layers into such modules, or leave out --checkpoint-blocks"
        )
    return checkpoints


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the outermost blocks in a module."""
    found = _blocks_of(module)
    return [*found, *(block for child in module.children() if child not in found for block in find_blocks(child))]


def _checkpoint_in(module: nn.Module, checkpoints: Checkpoints | None) -> int:
    """Checkpoint the outermost blocks in a module; return how many there are."""
    if _enable_in_transformers(module, checkpoints):
        return 1
    blocks = _blocks_of(module)
    for block in blocks:
        kind: Any = type(block)
        block.__class__ = _checkpointed(kind)
        vars(block)["checkpoints"] = checkpoints
    rest = (child for child in module.children() if child not in blocks)
    return len(blocks) + sum(_checkpoint_in(child, checkpoints) for child in rest)


def _enable_in_transformers(module: nn.Module, checkpoints: Checkpoints | None) -> bool:
    """Make a model of Hugging Face, which may be wrapped, checkpoint its own blocks. Return whether it can."""
    enable = getattr(module, "gradient_checkpointing_enable", None)
    if enable is None:
        return False
    try:
        enable(gradient_checkpointing_kwargs=_options(checkpoints))
    except (ValueError, TypeError):  # an architecture without; a method of that name that is another
        return False
    return any(getattr(part, "gradient_checkpointing", False) for part in module.modules())


def _blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the children of a container that are blocks: called, made of layers, not the only one of their class."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return []
    children = [child for child in module.children() if not isinstance(child, nn.ModuleList | nn.ModuleDict)]
    counts = Counter(map(type, children))
    alone = len(children) == 1 and isinstance(module, nn.ModuleList)  # a model of one layer
    return [child for child in children if (counts[type(child)] > 1 or alone) and any(child.children())]


@cache
def _checkpointed(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class with checkpointed calls: a class and not a wrapper, so that names and copies stay."""
    if issubclass(kind, Checkpointed):
        return kind
    return type(kind.__name__, (Checkpointed, kind), {"__module__": kind.__module__})


REPLICAS = 2  # of hsdp


def is_sharded(settings: TrainerSettings) -> bool:
    """Return whether FSDP2 holds the model. Its policy then replaces autocast: parameters travel in bf16."""
    return settings.world_size > 1 and settings.parallel != "ddp"


def policy_of(settings: TrainerSettings, **more: Any) -> MixedPrecisionPolicy:
    """Return FSDP2's policy for the number format of a row; gradients are reduced in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if settings.dtype != "bf16":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, **more)


def _reduced_alone(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """Reduce gradients for DDP in a simulated world, whose collectives return immediately."""
    dist.all_reduce(buffer)
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
    done.set_result(buffer)
    return done


def spread(model: nn.Module, settings: TrainerSettings) -> nn.Module:
    """Return the model on `settings.world_size` processes: whole on each (ddp), or each block sharded, and the rest."""
    device = next(model.parameters()).device
    if settings.parallel == "ddp":
        whole = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
        if settings.simulate_world > 1:
            whole.register_comm_hook(None, lambda _, bucket: _reduced_alone(bucket.buffer()))
        return whole
    require_for_shards()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dimensions = {"shard": settings.world_size}
    if settings.parallel == "hsdp":
        dimensions = {"replicate": REPLICAS, "shard": settings.world_size // REPLICAS}
    mesh = init_device_mesh(device.type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
    for block in find_blocks(model):
        fully_shard(block, mp_policy=policy_of(settings), mesh=mesh)
    fully_shard(model, mp_policy=policy_of(settings, output_dtype=torch.float32), mesh=mesh)
    return model


# What torch calls them, and what it did up to 2.6.
RECOMPILE_LIMITS = ("recompile_limit", "accumulated_recompile_limit")
CACHE_SIZE_LIMITS = ("cache_size_limit", "accumulated_cache_size_limit")


def compile_model(model: nn.Module, settings: TrainerSettings) -> nn.Module:
    """Return the model as `torch.compile` runs it; it is compiled when it is first called.

    FSDP2's hooks break graphs, so each block of a sharded model is compiled by itself.
    """
    if trouble := compile_obstacle(next(model.parameters()).device.type):
        raise MeasurementFailed(f"{trouble}, or leave out --compile")
    mode = None if settings.compile == "default" else settings.compile
    blocks = find_blocks(model) if is_sharded(settings) else []
    try:
        for block in blocks:
            block.compile(mode=mode)
        compiled: Any = model if blocks else torch.compile(model, mode=mode)
    except RuntimeError as error:  # on a Python that this torch cannot compile for
        raise MeasurementFailed(f"{error}: use another Python, or leave out --compile") from None
    return compiled  # type: ignore[no-any-return]


def torch_folder() -> str:
    """Return the folder where torch is installed."""
    return str(torch.__path__[0])


def compile_obstacle(device: str) -> str | None:
    """Return why torch.compile cannot work for a device of this machine, and how to fix it; None if it may work."""
    if device == "cuda":
        from torch.utils._triton import has_triton

        if has_triton():
            return None
        return f"torch.compile needs Triton and a GPU of compute capability 7 or newer: {install_command('triton')}"
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception:  # of a class that differs between versions of torch
        return "torch.compile finds no C++ compiler: install g++, or set CXX to one that works"
    if " " in torch_folder():  # Inductor hands paths to the linker without quotes
        return "torch.compile cannot link from a path with a space: make the environment in a folder without one"
    return None


@contextmanager
def must_compile() -> Iterator[None]:
    """Raise `UserError` if nothing is compiled inside the context. Earlier graphs of this process are dropped."""
    torch._dynamo.reset()
    before = CompileCounts.now()
    yield
    after = CompileCounts.now()
    if after.graphs > before.graphs:
        return
    if after.breaks > before.breaks:
        raise UserError(
            "torch.compile compiled nothing: it can trace no part of the model. See TORCH_LOGS=graph_breaks and "
            "docs/compiled.md, or leave out --compile"
        )
    raise UserError(
        "torch.compile compiled nothing: the loss never calls the model itself, or TORCHDYNAMO_DISABLE is set. Write "
        "model(inputs) in the loss function, or leave out --compile"
    )


def any_number_of_graphs() -> AbstractContextManager[object]:
    """Let torch.compile make a graph for every shape. By default it gives up after a few, and only logs it."""
    from torch._dynamo import config

    names = RECOMPILE_LIMITS if hasattr(config, RECOMPILE_LIMITS[0]) else CACHE_SIZE_LIMITS
    context: AbstractContextManager[object] = config.patch(dict.fromkeys(names, 10**5))
    return context


def eager_calls() -> AbstractContextManager[object]:
    """Run compiled models eagerly, for instruments that observe operators, which a graph does not have."""
    context: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return context


@dataclass(frozen=True)
class CompileCounts:
    """Number of graphs that torch.compile has made, and of graph breaks."""

    graphs: int
    breaks: int

    @classmethod
    def now(cls) -> CompileCounts:
        from torch._dynamo.utils import counters

        return cls(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))


EAGER_STEPS = 3
"""Eager steps before an ordinary step is captured: they make optimizer state and compile kernels."""


def forget_peak(device: torch.device) -> None:
    """Let the allocator's peak be that of the steps to come. Replays allocate nothing, so it is that of the capture."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


class OrdinaryGraph:
    """Ordinary training steps: eager ones first, then one is captured, and further ones replay it.

    The optimizer has to be capturable. Its learning rate is that of the capture.
    """

    def __init__(self, take_step: Callable[..., Tensor], optimizer: torch.optim.Optimizer) -> None:
        self._take_step, self._optimizer = take_step, optimizer
        self._eager_steps = 0
        self._graphs: dict[Any, tuple[list[Batch], Callable[[], None], Tensor]] = {}

    def __call__(self, *batches: Batch) -> Tensor:
        key = sizes_of(batches)
        if key not in self._graphs:
            if self._eager_steps < EAGER_STEPS:
                self._eager_steps += 1
                with as_captured():
                    return self._take_step(*batches)
            self._graphs[key] = self._capture(list(batches))
        static, replay, loss = self._graphs[key]
        for kept, given in zip(tensors_in(static), tensors_in(list(batches)), strict=True):
            kept.copy_(given, non_blocking=True)
        replay()
        return loss.clone()

    def _capture(self, batches: list[Batch]) -> tuple[list[Batch], Callable[[], None], Tensor]:
        static = replace_leaves(batches, lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf)
        self._optimizer.zero_grad(set_to_none=True)
        forget_peak(tensors_in(static)[0].device)
        try:
            with as_captured():
                replay, loss = record(lambda: self._take_step(*static))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"the step cannot be captured in a CUDA graph ({reason}): leave out --cuda-graph"
            ) from error
        return static, replay, loss


class PrivateGraph:
    """Private training steps, each a replay. A new shape of batches is warmed up first, without a step."""

    def __init__(self, step: GraphedStep) -> None:
        self._step = step
        self._warm: set[Any] = set()

    def __call__(self, *batches: Batch) -> Tensor:
        for batch in batches:
            if (key := sizes_of(batch)) not in self._warm:
                self._warm.add(key)
                self._step.warm_up(batch)
                self._step.engine.verification.schedule.pause()  # a later look would be an eager step
                forget_peak(next(iter(self._step.engine.parameters)).device)
        losses = [self._replayed(batch, skips=True) for batch in batches[:-1]]
        losses.append(self._replayed(batches[-1], skips=False))
        return torch.stack(losses).mean()

    def _replayed(self, batch: Batch, *, skips: bool) -> Tensor:
        before = self._step.replays
        if skips:
            self._step.optimizer.signal_skip_step(do_skip=True)
        loss = self._step(batch)
        if self._step.replays == before and all(map(Tensor.numel, tensors_in(batch))):  # an empty draw has no graph
            raise UserError(
                "a step did not run as a CUDA graph, as when all samples of its batch are the same: leave out "
                "--cuda-graph"
            )
        return loss
