"""Solutions of lesson 2. Try first: `check` gives hints."""

import gzip
import json

import recorded
import torch

operators_per_image = 4  # mean, sub, std, div

argument = {"shapes": "record_shapes", "lines of Python": "with_stack", "allocations": "profile_memory"}

my_schedule = torch.profiler.schedule(skip_first=3, wait=6, warmup=1, active=3, repeat=2)


def most_called(profiler):
    row = max(profiler.key_averages(), key=lambda row: row.count)
    return row.key, row.count


def share_of(profiler, word):
    rows = profiler.key_averages()
    return sum(r.self_cpu_time_total for r in rows if word in r.key) / sum(r.self_cpu_time_total for r in rows)


def at_most(share):
    return 1 / (1 - share)  # Amdahl's law


def reads(path):
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    return sum(event.get("name") == "aten::item" for event in events)


def peak(changes):
    live = highest = 0
    for change in changes:
        live += change
        highest = max(highest, live)
    return highest


def busy_share(method):
    return recorded.traced("traces", method)["gpu"]["busy_ms"] / recorded.ms("traces", method)


ANSWERS = {
    "2.1": (operators_per_image,),
    "2.2": (argument,),
    "2.3": (my_schedule,),
    "2.4": (most_called,),
    "2.5": (share_of,),
    "2.6": (at_most,),
    "2.7": (reads,),
    "2.8": (peak,),
    "2.9": (busy_share,),
}
