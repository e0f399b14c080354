"""Runs of several steps in which models, calls and gradients change: a pure function of a seed.

A run is a chain of blocks (ordinary, odd, perhaps one that mixes), and some steps. Before a step the model may change
(changes.py), while it runs classes or functions may be patched, and between its micro-batches a loop may change
gradients. The model is called with other lengths, numbers, options and shared tensors from step to step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.blocks import TOKEN_LAYERS, WRAPPERS, Sizes
from tests.fuzz.changes import BETWEEN, CHANGES, DURING, ENDING, During
from tests.fuzz.mixing_blocks import Mixer, make_mixer
from tests.fuzz.odd_layers import ODD_LAYERS
from tests.fuzz.random_models import CLASSES, Model

MOST_STEPS = 9
FIXED_LENGTH = ("over", "position", "mask", "torch attention", "in place", "attention bias", "scale")
"""Words in the names of blocks that take one length alone."""


@dataclass
class Step:
    """`before`: what happens to the model first. `parts`: sizes of micro-batches. `call`: further arguments."""

    batch: tuple[Tensor, Tensor]
    parts: list[int]
    call: dict[str, Any] = field(default_factory=dict)
    before: list[Callable[[], Any]] = field(default_factory=list)
    during: During = nullcontext
    between: str = "nothing"
    mixes: bool = False


@dataclass
class Run:
    seed: int
    model: nn.Module
    steps: list[Step]
    path: str | None
    loss_reduction: str
    clipping: str
    dtype: torch.dtype
    found: str = ""  # when mixing has to be refused (mixing_blocks.py); "" if nothing mixes
    names: list[str] = field(default_factory=list)
    mistake: bool = False  # the user has done what is refused

    def __str__(self) -> str:
        sizes = [step.parts for step in self.steps]
        return (
            f"seed {self.seed}: {' > '.join(self.names)}; micro-batches {sizes}; {self.loss_reduction}, path "
            f"{self.path}, clip {self.clipping}, {self.dtype}"
        )


class CalledModel(Model):
    """A model with options: another branch, a number, a tensor that all samples share."""

    def __init__(self, *args: Any, width: int) -> None:
        super().__init__(*args)
        self.branch = nn.Linear(width, width)

    def forward(
        self, inputs: Tensor, labels: Tensor, *, branch: bool = False, scale: float = 1.0, shared: Tensor | None = None
    ) -> Tensor:
        x = self.entry(inputs) * scale
        if shared is not None:
            x = x + shared[: x.shape[1]].to(x)
        if branch:
            x = x + self.branch(x)
        return self.losses(self.blocks(x), inputs, labels)


def make_run(seed: int, device: str = "cpu") -> Run:
    rng = random.Random(f"changing {seed}")
    torch.manual_seed(seed)
    first = rng.choice([2, 3, 4, 5, 8, 9])
    sizes = Sizes(
        length=rng.choice([first, 2, 3, 5, 7]),
        width=rng.choice([first, 2, 4, 6]) if first > 1 else 4,
        side=4,
        vocabulary=9,
    )
    names: list[str] = []
    blocks = [_block(rng, sizes, names) for _ in range(rng.randint(1, 3))]
    mixer = None
    if rng.random() < 0.3:
        name, mixer = make_mixer(rng, sizes)
        names.append(name)
        blocks.insert(rng.randint(0, len(blocks)), mixer.block)
    by_ids = rng.random() < 0.5 and mixer is None  # short samples of few ids may be one another in another order
    entry = nn.Embedding(sizes.vocabulary, sizes.width) if by_ids else nn.Linear(3, sizes.width)
    model: nn.Module = CalledModel(
        entry, blocks, lambda x: x.mean(1), nn.Linear(sizes.width, CLASSES), width=sizes.width
    )
    dtype = rng.choice([torch.float32, torch.float64])
    if device == "cuda" and any("old-style" in name for name in names):
        dtype = torch.float32  # torch's kernel of weight_norm takes the root of a norm in float32
    model = model.to(device, dtype)
    run = Run(
        seed=seed,
        model=model,
        steps=[],
        path=rng.choice([None, None, None, "direct", "keep"]),
        loss_reduction=rng.choice(["mean", "sum"]),
        clipping=rng.choice(["all", "some", "none"]),
        dtype=dtype,
        names=names,
    )
    _add_steps(run, rng, sizes, first, by_ids, device, mixer)
    return run


def _block(rng: random.Random, sizes: Sizes, names: list[str]) -> nn.Module:
    table = ODD_LAYERS if rng.random() < 0.75 else TOKEN_LAYERS
    name = rng.choice(list(table))
    block = table[name](rng, sizes)
    if rng.random() < 0.2:
        wrapper = rng.choice(["residual", "twice", "checkpoint", "gate"])
        block, name = WRAPPERS[wrapper](rng, block), f"{wrapper} of {name}"
    names.append(name)
    return block


def _add_steps(
    run: Run, rng: random.Random, sizes: Sizes, first: int, by_ids: bool, device: str, mixer: Mixer | None
) -> None:
    count = rng.randint(2, 4)
    begins = None
    if mixer is not None:
        run.found, begins = mixer.found, 0 if mixer.at_once else rng.randint(1, 3)
        # A look out of turn is not promised: the run goes on until the next one.
        count = max(count, begins + 1) if mixer.found != "look" else MOST_STEPS
    fixed_length = any(word in name for name in run.names for word in FIXED_LENGTH)
    for index in range(count):
        size = first if index == 0 else rng.choice([first, first, rng.randint(1 if mixer is None else 2, 9)])
        length = (
            sizes.length if fixed_length or index == 0 else rng.choice([sizes.length, rng.randint(2, sizes.length)])
        )
        inputs = torch.randint(sizes.vocabulary, (size, length)) if by_ids else torch.randn(size, length, 3)
        inputs = inputs.to(device, run.dtype if inputs.is_floating_point() else None)
        parts = _parts(rng, size) if mixer is None else [size]  # one sample mixes with nobody
        step = Step((inputs, torch.randint(CLASSES, (size,)).to(device)), parts)
        step.call = _call(rng, sizes)
        if len(step.parts) > 1:
            step.between = rng.choice([name for name in BETWEEN if name not in ENDING or rng.random() < 0.1])
        if mixer is None and index and rng.random() < 0.6:
            name = rng.choice([name for name in CHANGES if name not in ENDING or rng.random() < 0.2])
            step.before.append(_changing(run, name, random.Random(f"{run.seed} {index}"), index))
        if mixer is None and index and rng.random() < 0.2:
            name = rng.choice(list(DURING))
            step.during = DURING[name]
            run.names.append(f"[{index}: {name}]")
        if begins is not None and index >= begins:
            step.mixes = run.found != "count"
            step.call |= mixer.call if mixer is not None else {}
            if index == begins and mixer is not None:
                step.before.append(mixer.arm)
        if step.between != "nothing":
            step.before.append(lambda step=step: setattr(run, "mistake", run.mistake or step.between in ENDING))
            run.names.append(f"[{index}: {step.between}]")
        run.steps.append(step)


def _changing(run: Run, name: str, rng: random.Random, index: int) -> Callable[[], None]:
    def change() -> None:
        done = CHANGES[name](run.model, rng)
        if done:
            run.names.append(f"[{index}: {done}]")
            run.mistake = run.mistake or name in ENDING

    return change


def _parts(rng: random.Random, size: int) -> list[int]:
    if size < 2 or rng.random() < 0.6:
        return [size]
    cut = rng.randint(1, size - 1)
    return [cut, size - cut]


def _call(rng: random.Random, sizes: Sizes) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if rng.random() < 0.25:
        options["branch"] = True
    if rng.random() < 0.25:
        options["scale"] = rng.choice([0.5, 2.0])
    if rng.random() < 0.25:
        options["shared"] = torch.randn(sizes.length, sizes.width)
    return options
