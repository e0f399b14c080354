"""Models without their randomness, for checks that compare one step with another."""

from __future__ import annotations

from torch import nn

# Attributes that hold a probability, by a part of their name, and the value that takes the randomness away.
_PROBABILITIES = {"drop": 0.0, "survival": 1.0, "keep_prob": 1.0}


def silence(model: nn.Module) -> int:
    """Switch dropout and stochastic depth off, a module's `p` or attributes (`attention_dropout`); how many modules."""
    found = 0
    for module in model.modules():
        values = {
            name: quiet
            for name, value in vars(module).items()
            for part, quiet in _PROBABILITIES.items()
            if part in name.lower() and isinstance(value, float) and value != quiet
        }
        is_dropout = "drop" in type(module).__name__.lower() or type(module).__name__ == "StochasticDepth"
        if is_dropout and isinstance(getattr(module, "p", None), (int, float)) and module.p:
            values["p"] = 0.0
        for name, quiet in values.items():
            setattr(module, name, quiet)
        found += bool(values)
    return found
