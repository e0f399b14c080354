"""The memory instrument: live bytes of a step by component, exact to the byte, over time.

    record = track(step, device="cuda", model=model, holdings=holdings)   # what happened to every storage
    use = attribute(record, rules=[my_rule])                              # which component each byte was for

A rule is a function from a storage's birth to the name of a component, or None; see `Birth` and docs/memory.md.
"""

from dpscope.instruments.memory.record import Birth
from dpscope.instruments.memory.tracker import Holding, Tracker, track
from dpscope.instruments.memory.use import ComponentRule, MemoryUse, attribute, model_holdings

__all__ = ["Birth", "ComponentRule", "Holding", "MemoryUse", "Tracker", "attribute", "model_holdings", "track"]
