"""Solutions of lesson 1. Try first: `check` gives hints."""

from itertools import pairwise

import recorded


def step_us(operators, launch_us, kernel_us):
    return operators * max(launch_us, kernel_us)  # they work side by side: the slower one decides


def copy_ms(nbytes, gb_per_second):
    return 1e3 * nbytes / (gb_per_second * 1e9)


without = {"wait_stream": "race", "record_stream": "race", "torch.cuda.stream": "slow"}

# 2: a truth value; 3: a number; 5: the size of the result depends on the data. 4 prints a Python float.
lines_that_wait = [2, 3, 5]


def time_right(gpu, ms):
    gpu.synchronize()
    began = gpu.clock()
    gpu.launch(ms)
    gpu.synchronize()
    return gpu.clock() - began


def bend(points):
    for a, b in pairwise(points):
        if b["median_ms"] >= 1.7 * a["median_ms"]:
            return b["bytes"]
    return None


def waves(blocks, blocks_per_sm):
    return blocks / (132 * blocks_per_sm)


def bytes_moved(numbers, fused):
    return (3 if fused else 5) * 4 * numbers


def bound_by(flops, nbytes, unit):
    roofs = recorded.ceilings()
    ridge = roofs[f"{unit}_flops_per_second"] / roofs["dram_bytes_per_second"]
    return "compute" if flops / nbytes > ridge else "memory"


first_tool = {"idle GPU": "timeline", "slow kernel": "ncu", "out of memory": "memory"}


def days(method):
    return recorded.ms("page", method) / recorded.ms("page", "standard")


ANSWERS = {
    "1.1": (step_us,),
    "1.2": (copy_ms,),
    "1.3": (without,),
    "1.4": (lines_that_wait,),
    "1.5": (time_right,),
    "1.6": (bend,),
    "1.7": (waves,),
    "1.8": (bytes_moved,),
    "1.9": (bound_by,),
    "1.10": (first_tool,),
    "1.11": (days,),
}
