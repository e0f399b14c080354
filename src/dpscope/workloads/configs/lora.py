"""Adapters to train: `r=8,alpha=16,target=q_proj,v_proj`."""

from __future__ import annotations

from dataclasses import dataclass

from dpscope.errors import UserError
from dpscope.numbers import WholeNumber

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
