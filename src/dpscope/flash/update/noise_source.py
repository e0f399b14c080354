"""Source of a step's noise: its key, and the numbers of the elements that get noise."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpscope.errors import UserError
from dpscope.flash.kernels.tensor_lists import as_word, noise_span
from dpscope.flash.torch_side.shards import first_element

Key = tuple[int, int]  # (seed, offset): 64 bits each
NO_KEY: Key = (0, 0)  # of a step that adds no noise
REMEMBERED_KEYS = 2**20  # of a model, the newest; older ones are forgotten

_GO_ON = (
    "give it another seed, once and before make_private, or go on with the saved run's noise: "
    "load_state_dict(state, resume_noise=True) or load_checkpoint(…, resume_noise=True)"
)


class UsedKeys:
    """Keys whose noise was added to a model, as digests of 64 bits: two keys of a million collide once in 10⁷ runs."""

    def __init__(self) -> None:
        self._digests: dict[int, None] = {}  # in the order of use

    def __contains__(self, key: Key) -> bool:
        return _digest(key) in self._digests

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, key: Key) -> None:
        self.update([_digest(key)])

    def update(self, digests: Iterable[int]) -> None:
        self._digests.update(dict.fromkeys(digests))
        while len(self._digests) > REMEMBERED_KEYS:
            del self._digests[next(iter(self._digests))]

    def replace(self, digests: Iterable[int]) -> None:
        self._digests.clear()
        self.update(digests)

    def state(self) -> list[int]:
        return list(self._digests)

    def last(self) -> int | None:
        """Return the newest digest. Ranks compare it and the number of keys."""
        return next(reversed(self._digests), None)


def _hashed(key: Key, size: int, use: bytes = b"") -> bytes:
    return blake2b(struct.pack("<2q", *map(as_word, key)), digest_size=size, person=use).digest()


def _digest(key: Key) -> int:
    return int.from_bytes(_hashed(key, 8), "little", signed=True)


def normal_of_count(key: Key) -> float:
    """Return a standard normal of a step's key that no element of the sums has, by Box and Muller."""
    first, second = struct.unpack("<2Q", _hashed(key, 16, b"count"))
    return math.sqrt(-2 * math.log((first + 1) / 2**64)) * math.cos(2 * math.pi * second / 2**64)


_USED: WeakKeyDictionary[nn.Module, UsedKeys] = WeakKeyDictionary()


def used_keys_of(model: nn.Module) -> UsedKeys:
    """Return the keys that were used for a model, however often it was made private, wrapped or compiled."""
    inner: Any = model
    while (inside := getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)) is not None:
        if not isinstance(inside, nn.Module):
            break
        inner = inside
    return _USED.setdefault(inner, UsedKeys())


class NoiseSource:
    """The keys of the noise (kernels/noise.py), one a step, and the numbers of the elements.

    Without a generator a key is 128 bits from the operating system, drawn when it is used: nothing is kept that could
    be saved, searched or shared with a forked process. Given a generator, keys are drawn from it and noise can be
    repeated: its state (a secret, for it gives the noise) may be saved and restored. Keys that were used are
    remembered, in checkpoints too, and refused when they come again.
    """

    def __init__(self, generator: torch.Generator | None = None, used: UsedKeys | None = None) -> None:
        self.generator = generator
        self.used = UsedKeys() if used is None else used
        self._process = os.getpid()
        self._starts: dict[int, int] = {}
        self._parameters: list[Tensor] = []  # those that are numbered: held, for their ids are not to be given again
        self._numbered = 0

    def starts(self, optimizer: Optimizer) -> Mapping[int, int]:
        """Map the id of each of the optimizer's parameters, frozen ones too, to the number of its first element.

        A parameter keeps its number when others are added. A sharded one is numbered as a whole, and this is the number
        of the first element that this rank holds.
        """
        for group in optimizer.param_groups:
            if self._starts.keys() >= set(map(id, group["params"])):  # as a rule
                continue
            for parameter in group["params"]:
                if id(parameter) not in self._starts:
                    self._parameters.append(parameter)
                    self._starts[id(parameter)] = self._numbered + first_element(parameter)
                    self._numbered += noise_span(parameter)
        return self._starts

    def draw(self) -> Key:
        """Draw the next key. Wait for no device."""
        generator = self.generator
        if generator is None:
            key = os.urandom(16)
            return int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
        if os.getpid() != self._process:
            raise UserError(
                "the noise generator was given before this process was forked: its processes would add the same noise; "
                "call make_private in the process that trains, or leave out noise_generator"
            )
        return _draw_from(generator)

    def use(self, key: Key) -> None:
        """Refuse a key whose noise was added to the model before; remember it otherwise."""
        if self.generator is None:  # 128 bits of the operating system do not come again
            return
        if key in self.used:
            raise UserError(
                "the noise generator gives the key of an earlier step again, and with it the same noise, which could "
                f"then be taken off: it was seeded anew or set back (torch.manual_seed in a loop?); {_GO_ON}"
            )
        self.used.add(key)

    def state(self) -> dict[str, Any]:
        """Return the used keys and, given a generator, where it stands; as JSON."""
        return {"used": self.used.state(), "generator": None if self.generator is None else _as_text(self.generator)}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue a saved stream of noise where it stood."""
        if state.get("generator") is None:
            raise UserError(
                "the state holds no noise stream to resume: it was saved by a run without noise_generator; leave out "
                "resume_noise"
            )
        if self.generator is None:
            raise UserError(
                "the saved noise stream came from a noise generator, and this run has none: give make_private one "
                "(noise_generator=…), or leave out resume_noise"
            )
        self.generator.set_state(torch.tensor(list(bytes.fromhex(state["generator"])), dtype=torch.uint8))
        self.used.replace(state["used"])

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Remember the keys of a saved run; refuse a generator that would draw one of them next."""
        self.used.update(state.get("used", ()))
        if self.generator is not None and _draw_from(self.generator.clone_state()) in self.used:  # its next key
            raise UserError(
                f"the noise generator stands where that of the saved run stood, and would add its noise again: {_GO_ON}"
            )


def _as_text(generator: torch.Generator) -> str:
    return bytes(generator.get_state().tolist()).hex()


def _draw_from(generator: torch.Generator) -> Key:
    if generator.device.type == "cpu":
        seed, offset = torch.randint(2**63 - 1, (2,), generator=generator, dtype=torch.int64, device="cpu").tolist()
        return seed, offset
    # A CUDA generator's position is known on the host; drawing from it would wait for the device.
    offset = generator.get_offset()
    generator.set_offset(offset + 4)
    return generator.initial_seed(), offset


def old_noise(state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what `NoiseSource.state` would, from that of an earlier version."""
    if state is None:
        return {}
    if "used" in state:
        used = state["used"].tolist()
    else:  # before keys were remembered: those of a generator from which nothing but noise was drawn
        seed, draws, generator = state["seed"], range(state["draws"]), torch.Generator().manual_seed(state["seed"])
        of_cuda = state["generator"].numel() == 16  # its seed and its offset
        used = [_digest((seed, 4 * draw) if of_cuda else _draw_from(generator)) for draw in draws]
    text = bytes(state["generator"].tolist()).hex() if "generator" in state else None
    return {"used": used, "generator": text}
