"""Where the noise of a step comes from: its key, and the numbers of the elements that are noised."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpscope.errors import UserError
from dpscope.flash.kernels.tensor_lists import noise_span
from dpscope.flash.ranks.shards import first_element


class NoiseSource:
    """The keys of the noise (kernels/noise.py), one a step, and the numbers of the elements.

    Without a generator a key is 128 bits from the operating system, drawn when it is used: nothing is kept that could
    be saved, searched or shared with a forked process. Given a generator, keys are drawn from it and noise can be
    repeated: its state (a secret, for it gives the noise) may be saved and restored.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator
        self._draws = 0
        self._process = os.getpid()
        self._starts: dict[int, int] = {}
        self._parameters: list[Tensor] = []  # those that are numbered: held, for their ids are not to be given again
        self._numbered = 0

    def starts(self, optimizer: Optimizer) -> Mapping[int, int]:
        """By a parameter's id, the number of its first element, for all of the optimizer; frozen ones have theirs, too.

        A parameter keeps its number when others are added. A sharded one is numbered as a whole, and this is the number
        of the first element that this rank holds.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._starts:
                    self._parameters.append(parameter)
                    self._starts[id(parameter)] = self._numbered + first_element(parameter)
                    self._numbered += noise_span(parameter)
        return self._starts

    def draw(self) -> tuple[int, int]:
        """(seed, offset) of a stream that was not used before. Waits for no device."""
        generator = self.generator
        if generator is None:
            key = os.urandom(16)
            return int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
        if os.getpid() != self._process:
            raise UserError(
                "the noise generator was given before this process was forked: its processes would add the same noise; "
                "call make_private in the process that trains, or leave out noise_generator"
            )
        self._draws += 1
        if generator.device.type == "cpu":
            return _draw_words(generator)
        # A CUDA generator's position is known on the host; drawing from it would wait for the device.
        offset = generator.get_offset()
        generator.set_offset(offset + 4)
        return generator.initial_seed(), offset

    def state(self) -> dict[str, Any] | None:
        """Where the stream stands; None where no generator was given."""
        if self.generator is None:
            return None
        seed = self.generator.initial_seed()
        return {"seed": seed, "draws": self._draws, "generator": self.generator.get_state()}

    def resume(self, state: dict[str, Any]) -> None:
        """Go on where a saved stream stood, with its noise."""
        if self.generator is None:
            raise UserError(
                "the saved noise stream came from a noise generator, and this run has none: give make_private one "
                "(noise_generator=…), or leave out resume_noise"
            )
        self.generator.set_state(state["generator"].cpu())
        self._draws = state["draws"]

    def refuse_to_repeat(self, state: dict[str, Any]) -> None:
        """Refuse a generator that stands where the saved run's stood earlier: it would draw that run's noise again."""
        if self.generator is not None and _stood_earlier(self.generator, state):
            raise UserError(
                "the noise generator stands where that of the saved run stood, and would add its noise again: give it "
                "another seed, or go on with the saved run's noise: load_state_dict(state, resume_noise=True) or "
                "load_checkpoint(…, resume_noise=True)"
            )


def _stood_earlier(generator: torch.Generator, state: dict[str, Any]) -> bool:
    if generator.initial_seed() != state["seed"]:
        return False
    saved = torch.Generator(generator.device)
    if generator.device.type != "cpu":
        saved.set_state(state["generator"].cpu())
        return bool(generator.get_offset() < saved.get_offset())
    saved.manual_seed(state["seed"])
    now = generator.get_state()
    for _ in range(state["draws"]):
        if torch.equal(saved.get_state(), now):
            return True
        _draw_words(saved)
    return False


def _draw_words(generator: torch.Generator) -> tuple[int, int]:
    seed, offset = torch.randint(2**63 - 1, (2,), generator=generator, dtype=torch.int64, device="cpu").tolist()
    return seed, offset
