"""What is run in a world of several processes. Each case returns the same kind of result on every rank."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Subset

from dpscope.errors import UserError
from dpscope.flash import TrainingState
from dpscope.flash.gradients.clip_rules import CLIP_RULES
from dpscope.flash.torch_side.frames import original_of
from dpscope.instruments.trace.attribution import CollectiveBytes
from tests.torch_here import CAN_COMPILE, CAN_SHARD
from tests.unit.flash.ranks import world as w

WAYS = {
    1: ("ddp", "fsdp", "hsdp"),
    2: ("ddp", "fsdp", "fsdp kept", "opacus", "partly"),
    4: ("ddp", "fsdp", "hsdp"),
}  # by world size


def every_way() -> dict[tuple[str, str], dict[str, Tensor]]:
    ways = w.possible(*WAYS[dist.get_world_size()])
    return {(way, name): w.trained(way, name) for way in ways for name in ("sgd", "adamw")}


def fused() -> dict[tuple[str, str], dict[str, Tensor]]:
    return {(way, name): w.trained(way, name, fused=True) for way, name in [("ddp", "sgd"), (w.FSDP_OR_DDP, "adamw")]}


def _compiled_blocks(model: nn.Module, way: str, **options: Any) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(**options)
    return w.spread(model, way)


# How a model may be compiled and spread, in both orders.
COMPILED: dict[str, Callable[..., nn.Module]] = {
    "ddp of compiled": lambda model, **options: w.spread(torch.compile(model, **options), "ddp"),
    "compiled ddp": lambda model, **options: torch.compile(w.spread(model, "ddp"), **options),
    "fsdp of compiled blocks": lambda model, **options: _compiled_blocks(model, "fsdp", **options),
    "compiled fsdp": lambda model, **options: torch.compile(w.spread(model, "fsdp"), **options),
}


# Even, uneven and empty shares, and no sample at all. A step of yet another size would only be compiled once more.
COMPILED_STEPS = range(4)


def compiled_ways() -> dict[str, tuple[dict[str, Tensor], int, list[str]]]:
    """Parameters, the number of graphs, and reasons of breaks in them that are the engine's."""
    found = {}
    dist._DEFAULT_FIRST_BUCKET_BYTES = 100  # type: ignore[attr-defined]  # so that DDP has several buckets
    for way in [way for way in COMPILED if CAN_SHARD or "fsdp" not in way]:
        torch._dynamo.reset()
        counters.clear()
        graphs = CompileCounterWithBackend("aot_eager")
        model = COMPILED[way](w.make_model(), backend=graphs)
        model, optimizer, _ = w.make_private(model, w.optimizer_of(model, "adamw"))
        w.train(model, optimizer, COMPILED_STEPS)
        breaks = [reason for reason in counters["graph_break"] if "capture leaves" in reason]
        found[way] = (w.whole_parameters(original_of(model)), graphs.frame_count, breaks)
    return found


def accumulated(way: str) -> dict[str, Tensor]:
    """Two backward passes before each step."""
    model = w.spread(w.make_model(), way)
    model, optimizer, _ = w.make_private(model, w.optimizer_of(model, "adamw"))
    ids, labels = w.make_data().tensors
    for pair in ((0, 1), (4, 2)):
        optimizer.zero_grad()
        for step in pair:
            rows = w.share(step, *w.rank_and_world())
            F.cross_entropy(model(ids[rows]), labels[rows]).backward()
        optimizer.step()
    return w.whole_parameters(model)


def accumulated_ways() -> dict[str, dict[str, Tensor]]:
    return {way: accumulated(way) for way in w.possible("ddp", "fsdp")}


# -- loaders -----------------------------------------------------------------------------------------------------------


def poisson(way: str, physical: int | None = None, **options: Any) -> tuple[dict[str, Tensor], list[int], float]:
    """Parameters after two epochs of Poisson batches, the sizes of this rank's batches, and ε."""
    model = w.spread(w.make_model(), way)
    optimizer = w.optimizer_of(model, "sgd")
    engine = w.PrivacyEngine()
    model, optimizer, loader = w.make_private(model, optimizer, poisson_sampling=True, engine=engine, **options)
    sizes = []

    def epoch(batches: Any) -> None:
        for ids, labels in batches:
            sizes.append(len(ids))
            optimizer.zero_grad()
            F.cross_entropy(model(ids), labels).backward()
            optimizer.step()

    for _ in range(2):
        if physical is None:
            epoch(loader)
        else:
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
            ) as batches:
                epoch(batches)
    return w.whole_parameters(model), sizes, engine.get_epsilon(delta=1e-3)


def poisson_ways() -> dict[str, Any]:
    ways: dict[str, Any] = {"ddp": poisson("ddp")}
    return {**ways, "physical": poisson(w.FSDP_OR_DDP, physical=2)}


def padded_ways() -> dict[str, Any]:
    return {"sizes": poisson("ddp", pad_batches=True), "one size": poisson(w.FSDP_OR_DDP, physical=2, pad_batches=4)}


def thousand_draws() -> list[list[int]]:
    """A data set of 40 of which 1 in 40 is drawn: most shares are empty."""
    model = w.spread(w.make_model(), "ddp")
    _, _, loader = w.make_private(model, w.optimizer_of(model, "sgd"), poisson_sampling=True, batch_size=1)
    draws: list[list[int]] = []
    while len(draws) < 1000:
        draws += [[index for index in batch if index >= 0] for batch in loader.batch_sampler]
    return draws


# -- other models ------------------------------------------------------------------------------------------------------


class Scale(nn.Module):
    """A module with a bare parameter: it runs sample by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, w.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Tied(w.Model):
    """Tied embedding and head, a frozen layer, an opaque module, checkpointed blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()
        self.unembed = nn.Linear(w.WIDTH, w.WORDS, bias=False)
        self.unembed.weight = self.embed.weight
        self.blocks[0].up.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.scale(self.embed(ids))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x.mean(1)) + self.unembed(x).mean(1)[:, : w.CLASSES]


def tied(way: str, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = w.spread(Tied(), way)
    model, optimizer, _ = w.make_private(model, w.optimizer_of(model, "adamw"), **options)
    w.train(model, optimizer, range(len(w.STEPS)))
    return w.whole_parameters(model)


class Picky(w.Model):
    """Cannot take a batch without samples, as models of Hugging Face cannot."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids.view(len(ids), -1, 1).squeeze(-1))


def picky(way: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = w.spread(Picky(), way)
    model, optimizer, _ = w.make_private(model, w.optimizer_of(model, "adamw"))
    w.train(model, optimizer, [0, 2, 4])
    return w.whole_parameters(model)


def picky_ways() -> dict[str, dict[str, Tensor]]:
    return {way: picky(way) for way in w.possible("ddp", "fsdp")}


def tied_ways() -> dict[tuple[str, str | None], dict[str, Tensor]]:
    """By way and memory budget, under which blocks run again."""
    ways = w.possible("ddp", "fsdp")
    return {(way, budget): tied(way, memory_budget=budget) for way in ways for budget in (None, "lean")}


class Repeated(w.Model):
    """Checkpointed blocks, the first of which runs twice: its norm is that of both uses."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in (self.blocks[0], *self.blocks):
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x.mean(1))


def repeated(budget: str | None, policy: MixedPrecisionPolicy | None = None) -> tuple[dict[str, Tensor], set[str]]:
    """Parameters of a sharded model after two steps, one with an empty share; what was done with its blocks."""
    torch.manual_seed(0)
    model = w.shard(Repeated(), init_device_mesh("cpu", (dist.get_world_size(),)), policy=policy)
    model, optimizer, _ = w.make_private(model, w.optimizer_of(model, "sgd"), memory_budget=budget)
    w.train(model, optimizer, [0, 1, 2])
    return w.whole_parameters(model), {row.how for row in optimizer.engine.explain().blocks}


def lean_shards() -> dict[str, Any]:
    """By policy, with each memory budget."""
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return {name: (repeated(None, policy), repeated("lean", policy)) for name, policy in (("", None), ("bf16", half))}


RULE_BOUNDS: dict[str, Any] = {"per_group": {"*norm*": 0.2, "*embed*": 0.3, "*": 0.4}}


def ruled(way: str, clipping: str, *, views: int = 1, users: bool = False) -> dict[str, Tensor]:
    """Two steps under a rule, without noise; rows are samples, views of a sample beside one another, or users'."""
    model = w.spread(w.make_model(), way)
    model, optimizer, _ = w.make_private(
        model,
        w.optimizer_of(model, "sgd"),
        noise_multiplier=0.0,
        max_grad_norm=RULE_BOUNDS.get(clipping, w.CLIP),
        clipping=clipping,
        rows_per_sample=views,
        loss_reduction="sum",
    )
    ids, labels = w.make_data().tensors
    rank, size = w.rank_and_world()
    for first in (0, 16):
        rows = range(first, first + 16) if size == 1 else range(first + 4 * rank, first + 4 + 12 * rank)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids[rows]), labels[rows], reduction="sum")
        if users:
            optimizer.engine.group_rows(torch.tensor(rows) // 4)
        loss.backward()
        optimizer.step()
    return w.whole_parameters(model)


# How rows belong to samples, by name.
ROWS: dict[str, dict[str, Any]] = {"rows": {}, "views": {"views": 2}, "users": {"users": True}}
RULED = [(rule, "rows") for rule in CLIP_RULES] + [("flat", "views"), ("per_layer", "views"), ("flat", "users")]


def ruled_ways() -> dict[tuple[str, str, str], dict[str, Tensor]]:
    return {
        (way, rule, rows): ruled(way, rule, **ROWS[rows]) for way in w.possible("ddp", "fsdp") for rule, rows in RULED
    }


def half_precision() -> tuple[dict[str, Tensor], Tensor, set[torch.dtype]]:
    """Parameters, this rank's norms of clipped gradients, and dtypes of what is reduced, under a bfloat16 policy."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = w.shard(w.make_model(), init_device_mesh("cpu", (dist.get_world_size(),)), policy=policy)
    model, optimizer, _ = w.make_private(model, w.optimizer_of(model, "sgd"))
    with CollectiveBytes() as seen:
        w.train(model, optimizer, [0])
    shares = optimizer.engine.norms * optimizer.engine.factors
    return w.whole_parameters(model), shares, seen.dtypes.get("reduce-scatter", set())


# -- neighbours, bytes, refusals ---------------------------------------------------------------------------------------


def update_without(way: str, left_out: int | None) -> dict[str, Tensor]:
    """Σ c_b v_b over all ranks, without one of the samples."""
    model = w.spread(w.make_model(), way)
    before = w.whole_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, _ = w.make_private(model, optimizer, noise_multiplier=0.0, loss_reduction="sum")
    ids, labels = w.make_data().tensors
    rows = [row for row in w.share(4, *w.rank_and_world()) if row != left_out]
    (F.cross_entropy(model(ids[rows]), labels[rows], reduction="sum") * 100).backward()
    optimizer.step()
    after = w.whole_parameters(model)
    return {name: before[name] - after[name] for name in before}


def neighbours() -> dict[tuple[str, int | None], dict[str, Tensor]]:
    return {(way, row): update_without(way, row) for way in w.possible("ddp", "fsdp") for row in (None, 21, 32)}


def communicated() -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of three steps of ordinary FSDP2 training, and of private training."""
    seen = []
    for private in (False, True):
        model = w.spread(w.Wide(), "fsdp")
        optimizer: Any = w.optimizer_of(model, "adamw")
        if private:
            model, optimizer, _ = w.make_private(model, optimizer)
        with CollectiveBytes() as collectives:
            w.train(model, optimizer, [0, 1, 4])
        seen.append(collectives.bytes)
    return seen[0], seen[1]


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
    except UserError as refusal:
        return str(refusal)
    return ""


def refusals() -> dict[str, str]:
    """What each rank is told where ranks do not do the same."""
    rank, size = w.rank_and_world()
    model = w.spread(w.make_model(), w.FSDP_OR_DDP)

    def step_with_other_noise() -> None:
        private, optimizer, _ = w.make_private(model, w.optimizer_of(model, "sgd"), noise_multiplier=1.0 + rank)
        try:
            w.train(private, optimizer, [0])
        finally:
            optimizer.engine.detach()

    def step_with_other(change: Callable[[Any], None]) -> None:
        private, optimizer, _ = w.make_private(model, w.optimizer_of(model, "sgd"))
        try:
            if rank == 1:
                change(optimizer)
            w.train(private, optimizer, [0])
        finally:
            optimizer.engine.detach()

    def skip_a_share() -> None:
        private, optimizer, loader = w.make_private(model, w.optimizer_of(model, "sgd"), poisson_sampling=True)
        try:
            batches = iter(loader)
            if rank == 1:
                next(batches)  # as `if len(x) == 0: continue` does
            ids, labels = next(batches)
            F.cross_entropy(private(ids), labels).backward()
            optimizer.step()
        finally:
            optimizer.engine.detach()

    def halve_noise_of_twice_the_bound(optimizer: Any) -> None:
        optimizer.max_grad_norm *= 2
        optimizer.noise_multiplier /= 2

    uneven = w.spread(w.make_model(), w.FSDP_OR_DDP)
    if rank == 1:
        getattr(uneven, "module", uneven).head.requires_grad_(False)
    ordered = list(model.parameters())[:: -1 if rank == 1 else 1]  # as from a set
    longer = Subset(w.make_data(), range(w.SAMPLES - rank % 2))  # of as many steps
    messages = {
        "one rank's arguments": _message(
            lambda: w.make_private(model, w.optimizer_of(model, "sgd"), max_grad_norm=1.0 if rank else -1.0)
        ),
        "noise": _message(step_with_other_noise),
        "frozen": _message(lambda: w.make_private(uneven, w.optimizer_of(uneven, "sgd"))),
        "a share skipped": _message(skip_a_share),
        "bound": _message(lambda: step_with_other(halve_noise_of_twice_the_bound)),
        "plateau": _message(lambda: step_with_other(lambda optimizer: optimizer.param_groups[0].update(lr=0.05))),
        "order of parameters": _message(lambda: w.make_private(model, torch.optim.SGD(ordered, lr=0.5))),
        "learning rate": _message(lambda: w.make_private(model, torch.optim.SGD(model.parameters(), lr=0.5 + rank))),
        "length of the data": _message(
            lambda: w.make_private(model, w.optimizer_of(model, "sgd"), data=longer, poisson_sampling=True)
        ),
        "made-up samples": _message(lambda: w.make_private(model, w.optimizer_of(model, "sgd"), rand_on_empty=True)),
    }
    if size == 4 and CAN_SHARD:
        part = w.make_model()
        fully_shard(part, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"])
        messages["submesh"] = _message(lambda: w.make_private(part, w.optimizer_of(part, "sgd")))
    return messages


def _private(way: str, **options: Any) -> tuple[nn.Module, Any, Any]:
    model = w.spread(w.make_model(), way)
    inner = getattr(model, "module", model)
    groups = [{"params": inner.blocks.parameters(), "lr": 0.5}, {"params": inner.head.parameters(), "lr": 0.25}]
    for parameter in inner.embed.parameters():
        parameter.requires_grad_(False)
    return w.make_private(model, torch.optim.SGD(groups), **options)


def _backward(model: nn.Module, ids: Tensor, labels: Tensor) -> None:
    F.cross_entropy(model(ids), labels).backward()


def _swap_learning_rates(model: nn.Module, optimizer: Any) -> None:
    one, other = optimizer.param_groups
    one["lr"], other["lr"] = other["lr"], one["lr"]


def _freeze_other_blocks(model: nn.Module, optimizer: Any) -> None:
    getattr(model, "module", model).blocks[dist.get_rank()].requires_grad_(False)


# What rank 1 does to its optimizer before a step, and the others do not.
_CHANGES: dict[str, Callable[[nn.Module, Any], None]] = {
    "learning rates swapped": _swap_learning_rates,
    "learning rate as a tensor": lambda _, optimizer: optimizer.param_groups[1].update(lr=torch.tensor(0.3)),
    "weight decay": lambda _, optimizer: optimizer.param_groups[0].update(weight_decay=0.1),
    "weights loaded": lambda model, _: model.load_state_dict(model.state_dict()),
    "an optimizer's state loaded": lambda _, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "noise used before": lambda _, optimizer: optimizer.noise.used.add((1, 2)),
}


# Arguments of make_private, of rank 1 and of the others.
_ARGUMENTS: dict[str, tuple[Any, Any]] = {"clipping": ("automatic", "flat"), "rows_per_sample": (2, 1)}


def _load_other_weights() -> None:
    model, optimizer, _ = _private("ddp")
    try:
        model.load_state_dict({name: value + dist.get_rank() for name, value in model.state_dict().items()})
        w.train(model, optimizer, [0])
    finally:
        optimizer.engine.detach()


def _change(way: str, change: Callable[[nn.Module, Any], None], ranks: tuple[int, ...] = (1,)) -> None:
    model, optimizer, _ = _private(way)
    try:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"]) if change is _CHANGES["learning rate as a tensor"] else group["lr"]
        if dist.get_rank() in ranks:
            change(model, optimizer)
        w.train(model, optimizer, [0])
    finally:
        optimizer.engine.detach()


def _step_other_model(way: str) -> None:
    models = [_private(way)[:2] for _ in range(2)]
    try:
        for model, optimizer in models[:: -1 if dist.get_rank() == 1 else 1]:
            w.train(model, optimizer, [0])
    finally:
        for _, optimizer in models:
            optimizer.engine.detach()


def _run_backward_once_more(way: str) -> None:
    model, optimizer, _ = _private(way)
    ids, labels = w.make_data().tensors
    try:
        for _ in range(2 if dist.get_rank() == 1 else 1):
            _backward(model, ids[:2], labels[:2])
        optimizer.step()
    finally:
        optimizer.engine.detach()


def _epochs(way: str, on_rank_1: Callable[[Any, Any], Any]) -> None:
    """Two epochs of Poisson batches, which rank 1 does in its own way."""
    model, optimizer, loader = _private(way, poisson_sampling=True)

    def step(ids: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        _backward(model, ids, labels)
        optimizer.step()

    try:
        if dist.get_rank() == 1:
            on_rank_1(loader, step)
        for _ in range(2):
            for batch in loader:
                step(*batch)
    finally:
        optimizer.engine.detach()


def _leave_early(loader: Any, step: Callable[..., None]) -> None:
    for batch, _ in zip(loader, range(2), strict=False):
        step(*batch)


def _catch_and_go_on(loader: Any, step: Callable[..., None]) -> None:
    for number, (ids, labels) in enumerate(loader):
        with contextlib.suppress(IndexError):
            if number == 1:
                raise IndexError("a broken sample")
            step(ids, labels)


def _skip_a_physical_batch(way: str) -> None:
    model, optimizer, loader = _private(way, poisson_sampling=True)
    try:
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=1, optimizer=optimizer) as batches:
            for number, (ids, labels) in enumerate(batches):
                if number == 1 and dist.get_rank() == 1:  # as `if len(ids) == 0: continue` does
                    continue
                optimizer.zero_grad()
                _backward(model, ids, labels)
                optimizer.step()
    finally:
        optimizer.engine.detach()


def _group_rows(way: str, ids: list[list[list[int]]]) -> None:
    """Train on physical batches of which each rank groups the rows of its share. `ids`: by batch and rank."""
    model, optimizer, _ = _private(way)
    rows, labels = w.make_data().tensors
    try:
        for number, of_batch in enumerate(ids):
            own = torch.tensor(of_batch[dist.get_rank()], dtype=torch.long)
            optimizer.signal_skip_step(number < len(ids) - 1)
            loss = F.cross_entropy(model(rows[: len(own)]), labels[: len(own)], reduction="sum")
            optimizer.engine.group_rows(own)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        optimizer.engine.detach()


def _initialise_differently() -> None:
    model = w.make_model()
    with torch.no_grad():
        for block in model.blocks:
            block.up.weight += dist.get_rank()  # type: ignore[operator]
    model = w.spread(model, "partly")
    w.make_private(model, w.optimizer_of(model, "sgd"))


def disagreements() -> dict[tuple[str, str], str]:
    """What each rank is told where ranks do not do the same in training: none waits for another."""
    found = {}
    for way in w.possible("ddp", "fsdp"):
        for name, change in _CHANGES.items():
            found[way, name] = _message(lambda way=way, change=change: _change(way, change))
        found[way, "other blocks frozen"] = _message(lambda way=way: _change(way, _freeze_other_blocks, (0, 1, 2, 3)))
        for option, (one, other) in _ARGUMENTS.items():
            given = {option: one if dist.get_rank() == 1 else other}
            found[way, option] = _message(lambda way=way, given=given: _private(way, **given))
        found[way, "another model"] = _message(lambda way=way: _step_other_model(way))
        found[way, "more backward passes"] = _message(lambda way=way: _run_backward_once_more(way))
        found[way, "a look at the loader"] = _message(
            lambda way=way: _epochs(way, lambda loader, _: next(iter(loader)))
        )
        found[way, "an epoch left early"] = _message(lambda way=way: _epochs(way, _leave_early))
        found[way, "its own error caught"] = _message(lambda way=way: _epochs(way, _catch_and_go_on))
        found[way, "a user on two ranks"] = _message(lambda way=way: _group_rows(way, [[[7, 7], [8, 7]]]))
        found[way, "a user in two batches"] = _message(
            lambda way=way: _group_rows(way, [[[1], [2, 2]], [[3], []], [[], [1]]])
        )
        found[way, "a physical batch skipped"] = _message(lambda way=way: _skip_a_physical_batch(way))
    found["ddp", "other weights loaded"] = _message(_load_other_weights)
    if CAN_SHARD:
        found["partly", "initialised differently"] = _message(_initialise_differently)
    return found


def killed(way: str) -> tuple[str, float]:
    """What ends a rank when another is killed between two steps; how long that took."""
    model = w.spread(w.make_model(), way)
    model, optimizer, _ = w.make_private(model, w.optimizer_of(model, "sgd"))
    w.train(model, optimizer, [0])
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    return _message(lambda: w.train(model, optimizer, [1])), time.monotonic() - began


# -- checkpoints -------------------------------------------------------------------------------------------------------

CHECKPOINTED = [(way, {"ddp": "sgd", "fsdp": "adamw"}[way]) for way in w.possible("fsdp", "ddp")]


def start(way: str, name: str) -> tuple[nn.Module, Any, TrainingState]:
    engine = w.PrivacyEngine()
    model = w.spread(w.make_model(), way)
    model, optimizer, _ = w.make_private(model, w.optimizer_of(model, name), engine=engine)
    return model, optimizer, TrainingState(model, optimizer, engine, resume_noise=True)


def save(folder: Path) -> None:
    for way, name in CHECKPOINTED:
        model, optimizer, state = start(way, name)
        w.train(model, optimizer, range(3))
        dcp.save({"training": state}, checkpoint_id=folder / way)


def load(folder: Path) -> dict[tuple[str, str], tuple[dict[str, Tensor], int]]:
    found = {}
    for way, name in CHECKPOINTED:
        model, optimizer, state = start(way, name)
        dcp.load({"training": state}, checkpoint_id=folder / way)
        w.train(model, optimizer, range(3, len(w.STEPS)))
        found[way, name] = (w.whole_parameters(model), sum(n for *_, n in state.privacy_engine.accountant.history))
    return found


# Which cases run in a world of which size: processes are costly, and most cases say the same in any of them.
CASES: dict[int, tuple[Callable[..., Any], ...]] = {
    1: (every_way, half_precision),
    2: (
        every_way,
        fused,
        *((compiled_ways,) if CAN_COMPILE else ()),
        accumulated_ways,
        picky_ways,
        tied_ways,
        lean_shards,
        ruled_ways,
        half_precision,
        communicated,
        thousand_draws,
        refusals,
        disagreements,
        load,
    ),
    4: (every_way, poisson_ways, padded_ways, neighbours, thousand_draws, refusals, save),
}


def all_cases(folder: Path) -> dict[str, Any]:
    cases = [
        case
        for case in CASES[dist.get_world_size()]
        if CAN_SHARD or case not in (half_precision, communicated, lean_shards)
    ]
    return {case.__name__: case(folder) if case in (save, load) else case() for case in cases}
