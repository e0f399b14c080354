"""The oracle: what torch.profiler's allocation events say of a step, which know nothing of storages or components."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from dpscope.instruments.peaks import _quiet_stderr


@dataclass(frozen=True)
class Allocation:
    """One allocation (+) or free (-), and the operator, as a dispatch mode sees operators, that it happened in."""

    size: int
    address: int
    operator: str
    call: int | None  # which call of that operator


@dataclass(frozen=True)
class AllocatorPeak:
    growth: int  # highest running sum
    growth_outside: int  # the same without what operators allocate and free inside themselves
    inside: dict[str, int]  # operator -> the most it had live inside itself


def allocator_peak(step: Callable[[], object]) -> AllocatorPeak:
    with _quiet_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    found: list[tuple[int, Allocation]] = []
    for root in profiler.profiler.kineto_results.experimental_event_tree():
        _collect(root, "", None, found)
    events = _of_the_step([event for _, event in sorted(found, key=lambda item: item[0])])
    inner = _inside(events)
    return AllocatorPeak(
        growth=_highest([event.size for event in events]),
        growth_outside=_highest([event.size for index, event in enumerate(events) if index not in inner]),
        inside={
            name: max(
                _highest([events[i].size for i in sorted(inner) if events[i].call == call])
                for call in {events[i].call for i in inner if events[i].operator == name}
            )
            for name in sorted({events[i].operator for i in inner})
        },
    )


def _collect(event, operator, call, found):
    if event.tag == _EventType.Allocation:
        fields = event.typed[1]
        found.append((event.start_time_ns, Allocation(fields.alloc_size, fields.ptr, operator, call)))
    elif call is None and event.tag == _EventType.TorchOp and _is_one_operator(event.name):
        operator, call = event.name, event.id
    for child in event.children:
        _collect(child, operator, call, found)


@cache
def _is_one_operator(name: str) -> bool:
    """Whether a dispatch mode sees the call itself, and not the operators that it is made of."""
    namespace, _, base = name.partition("::")
    if namespace != "aten":
        return False
    overloads = getattr(torch.ops.aten, base).overloads()
    return not any(_is_composite(name if o == "default" else f"{name}.{o}") for o in overloads)


def _is_composite(name: str) -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    except RuntimeError:  # TorchScript's own overloads, as of lists
        return False


def _of_the_step(events: list[Allocation]) -> list[Allocation]:
    """Without the frees of what was there before: the rubbish of other tests, collected meanwhile."""
    live: set[int] = set()
    own = []
    for event in events:
        if event.size > 0:
            live.add(event.address)
        elif event.address not in live:
            continue
        else:
            live.remove(event.address)
        own.append(event)
    return own


def _inside(events: list[Allocation]) -> set[int]:
    """Indices of allocations and frees whose whole life is within one call of one operator."""
    born: dict[int, int] = {}
    inside: set[int] = set()
    for index, event in enumerate(events):
        if event.size > 0:
            born[event.address] = index
        elif event.address in born:
            birth = born.pop(event.address)
            if events[birth].call is not None and events[birth].call == event.call:
                inside |= {birth, index}
    return inside


def _highest(deltas: list[int]) -> int:
    level = highest = 0
    for delta in deltas:
        level += delta
        highest = max(highest, level)
    return highest
