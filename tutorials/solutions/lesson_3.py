"""Solutions of lessons 3a and 3b. Try first: `check` gives hints."""

import csv

import recorded

may_quote = {"bytes": True, "step time": False, "hit rate": True}

command = "ncu --profile-from-start off --set basic --launch-count 1 python programs/case_5.py --steps 1"

sets_with_warp_states = ["full"]


def parts(name):
    unit, _, rest = name.partition("__")
    quantity, combined, *made = rest.split(".")
    return unit, quantity, combined, made[0] if made else ""


flags = "--kernel-name regex:gemm --launch-skip 10 --launch-count 2"

mode = {"why is this kernel slow": "kernel", "bytes of a whole step": "app-range"}


def read_raw(text):
    names, _units, first, *_ = csv.reader(text.splitlines())
    found = {}
    for name, value in zip(names, first, strict=True):
        try:
            found[name] = float(value.replace(",", ""))
        except ValueError:
            continue  # a name, not a number
    return found


def bytes_ratio(method):
    return recorded.dram_gb("traffic", method, 8, 256) / recorded.dram_gb("traffic", "standard", 8, 256)


def first_to_look(launches):
    savings = [duration * speedup / 100 for duration, speedup in launches]
    return savings.index(max(savings))


def verdict(compute, memory):
    if compute < 60 and memory < 60:
        return "latency"
    return "compute" if compute > memory else "memory"


def of_roof(flops, nbytes, seconds):
    roofs = recorded.ceilings()
    roof = min(flops / nbytes * roofs["dram_bytes_per_second"], roofs["fp32_flops_per_second"])
    return flops / seconds / roof


expected = {"read": 2 * 4 * 2**28, "written": 4 * 2**28}


def sm_busy(issue_slots, pipes):
    return max(issue_slots, *pipes.values())


def share(stalls, reason):
    return 100 * stalls[reason] / sum(stalls.values())


def occupancy(registers, threads):
    blocks = min(65536 // (registers * threads), 2048 // threads)
    return 100 * blocks * threads / 32 / 64


scattered_line = 13

ANSWERS = {
    "3.1": (may_quote,),
    "3.2": (command,),
    "3.3": (sets_with_warp_states,),
    "3.4": (parts,),
    "3.5": (flags,),
    "3.6": (mode,),
    "3.7": (read_raw,),
    "3.8": (bytes_ratio,),
    "3.9": (first_to_look,),
    "3.10": (verdict,),
    "3.11": (of_roof,),
    "3.12": (expected,),
    "3.13": (sm_busy,),
    "3.14": (share,),
    "3.15": (occupancy,),
    "3.16": (scattered_line,),
}
