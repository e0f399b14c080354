"""Components of memory, and ways to measure a peak. Every live byte belongs to exactly one component."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True)
class Component:
    """Component of memory. `key` is its name in result files (with `_mb` in `breakdown`), `label` in reports."""

    key: str
    label: str
    private_only: bool = False  # ordinary training holds nothing of it

    def marked(self, private: str = " (private only)") -> str:
        """Return its label, with a mark if only private training holds it."""
        return self.label + (private if self.private_only else "")


# In the order in which they are stacked and listed: what stays, what a step saves, what privacy adds, what is left.
COMPONENTS: tuple[Component, ...] = (
    Component("model_parameters", "model parameters"),
    Component("optimizer_states", "optimizer states"),
    Component("gradients", "gradients"),
    Component("activations", "activations"),
    Component("activation_hooks", "activation hooks", private_only=True),
    Component("per_sample_gradients", "per-sample gradients", private_only=True),
    Component("norm_samples", "norm samples", private_only=True),
    Component("temp_matrices", "temporary matrices"),
    Component("inputs", "inputs"),
    Component("unattributed", "unattributed"),
)

# The keys, in that order.
KEYS: tuple[str, ...] = tuple(component.key for component in COMPONENTS)
(
    MODEL_PARAMETERS,
    OPTIMIZER_STATES,
    GRADIENTS,
    ACTIVATIONS,
    ACTIVATION_HOOKS,
    PER_SAMPLE_GRADIENTS,
    NORM_SAMPLES,
    TEMP_MATRICES,
    INPUTS,
    UNATTRIBUTED,
) = KEYS
_BY_KEY = {component.key: component for component in COMPONENTS}


def component_named(key: str) -> Component:
    """Return the component of a key; a component of a user's own rule is labelled by its name."""
    return _BY_KEY.get(key) or Component(key, key.replace("_", " "))


def in_order(keys: Iterable[str]) -> list[str]:
    """Return the components in stacking order: the known ones, users' own, and the rest."""
    places = {key: place for place, key in enumerate(KEYS)}
    last = places[UNATTRIBUTED]
    return sorted(dict.fromkeys(keys), key=lambda key: (places.get(key, last - 0.5), key))


def sorted_components(held: Mapping[str, Value]) -> dict[str, Value]:
    return {key: held[key] for key in in_order(held)}


TRACKER, COMPILED = "tracker", "compiled"
CUDA_ALLOCATOR, CPU_ALLOCATOR = "cuda_allocator", "cpu_allocator"

# One table shows peaks of one of them.
PEAK_SOURCES = {
    TRACKER: "of one step after warm-up; its parts from one more step whose every storage was tracked",
    COMPILED: (
        "of a compiled row, the allocator's of steps after compilation; its parts are what is there before a step, and "
        "what a compiled step makes is unattributed"
    ),
    CUDA_ALLOCATOR: "the CUDA allocator's peak of allocated bytes over the whole run",
    CPU_ALLOCATOR: (
        "live tensors at their peak during one step, from torch's CPU allocator (a step after the timed ones)"
    ),
}
