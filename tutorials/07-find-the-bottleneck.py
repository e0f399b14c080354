# %% [markdown]
"""
# 7. Find the bottleneck

*Last verified: 2026-11-16, torch 2.13 on a CPU, torch 2.11 on an NVIDIA H200.*

**Level:** practise. **Assumes:** lessons [1](01-how-a-gpu-step-works.ipynb) and [2](02-pytorch-profiler.ipynb); [3b](03b-read-a-report.ipynb) and [4](04-nsight-systems.ipynb) help. **Time:** 10 minutes to read, about 60 more for the hunt.

Five programs, `case_6` to `case_10`. Each works, and each wastes time or memory in one way. Their names do not say which, and neither does their first line. You get evidence as you would in real life: a trace, a table, a curve. Find the cause, then fix three of them.

**Rules.** Look at the evidence first, then open the program, then answer. A hint costs nothing. The whole story of every case is in [solutions/cases.md](solutions/cases.md).

| letter | cause |
| --- | --- |
| a | too many tiny operators: launch-bound |
| b | the host prepares data while the GPU has nothing to do |
| c | a hidden synchronisation |
| d | copies from pageable memory, nothing beside them |
| e | data is copied into another layout in every step |
| f | large intermediate results go to memory and back |
| g | arithmetic in a slow number format |
| h | memory that is never freed |

**After it you can**

- go from "it is slow" to a named cause with two or three looks;
- say which tool gave it away, and prove the fix.
"""

# %%
# Set up. In a clone this only finds the course; elsewhere (Colab, an empty folder) it fetches it first.
REPOSITORY = ""  # the address of dpscope's repository: needed outside a clone only

import importlib
import subprocess
import sys
from pathlib import Path


def find_course():
    places = [Path.cwd(), *Path.cwd().parents, Path.cwd() / "dpscope-course"]
    return next((place / "tutorials" for place in places if (place / "tutorials" / "programs").is_dir()), None)


if find_course() is None:
    assert REPOSITORY, "Open this notebook in a clone of dpscope, or write its repository's address into REPOSITORY."
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", REPOSITORY, "dpscope-course"], check=True)
    if subprocess.call([sys.executable, "-c", "import dpscope.cli"], stderr=subprocess.DEVNULL) != 0:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "./dpscope-course"], check=True)
        importlib.invalidate_caches()
TUTORIALS = find_course()
sys.path.insert(0, str(TUTORIALS / "programs"))

import language

language.use("en")

# %%
import os

os.environ |= {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}

import evidence
import pictures
import recorded
import torch
import windows
from case_6 import PROGRAM as case_6_program
from case_7 import PROGRAM as case_7_program
from case_8 import PROGRAM as case_8_program
from case_9 import PROGRAM as case_9_program
from case_10 import PROGRAM as case_10_program
from checks import check
from language import say
from practice import device_here

device = device_here()
print(f"torch {torch.__version__}, measuring on: {device}")


def picture(program, way="a"):
    trace, where = evidence.trace_of(program, way)
    pictures.show(
        windows.draw_perfetto_window(windows.tracks_of(trace), f"{program.name}-{way}"),
        f"{program.name}, way {way}: one step, drawn from the trace ({where}).",
        f"{program.name}，方式 {way}：一步，根据 trace 绘制（{where}）。",
    )


# %% [markdown]
"""
## 7.1 Case 6: a classifier of images

The traces of all cases can be [downloaded](traces.md) and opened in Perfetto.
"""

# %%
evidence.show(case_6_program)
picture(case_6_program)

# %%
case_6 = ...  # one letter

# %%
check("7.1", case_6)

# %% [markdown]
"""
## 7.2 Case 7: a token classifier

Some positions carry no label. Do not stop at the first thing you find: is it long enough to explain the step? The unprofiled step takes 3.1 ms<!-- = took("case_7", "a") -->.
"""

# %%
evidence.show(case_7_program)
picture(case_7_program)

# %%
case_7 = ...

# %%
check("7.2", case_7)

# %% [markdown]
"""
## 7.3 Case 8: a recommender

Every step scores a batch of users against a table of items that does not change.
"""

# %%
evidence.show(case_8_program)
picture(case_8_program)

# %%
case_8 = ...

# %%
check("7.3", case_8)

# %% [markdown]
"""
## 7.4 Case 9: attention

Two sequences of 4096 positions, 16 heads. Compare the two ways: which kernels does b not have, and how much memory does each need?
"""

# %%
for way in "ab":
    evidence.show(case_9_program, way)
    if kept := recorded.program("case_9", way):
        print(f"  H200: {kept['median_ms']:.2f} ms a step, peak memory {kept['peak_bytes'] / 2**30:.2f} GiB")

# %%
case_9 = ...

# %%
check("7.4", case_9)

# %% [markdown]
"""
## 7.5 Case 10: a validation loop

Its steps are quick. After an hour the run ends with "out of memory".
"""


# %%
def tensors_behind(total):
    """Count the saved steps that hang behind a tensor: nodes of its graph that add one more loss."""
    count, node = 0, total.grad_fn
    while node is not None and node.next_functions:
        count, node = count + 1, node.next_functions[0][0]
    return count


step = case_10_program.ways["a"]("cpu", 8)
print("graph behind the total after each of five steps:", [tensors_behind(step()) for _ in range(5)])
try:
    live = {way: [n / 2**30 for n in recorded.live_bytes(way)] for way in "ab"}
except LookupError:
    live = {}
pictures.show(
    pictures.draw_lines(live, say("step", "步"), say("live memory, GiB", "活跃显存，GiB")) if live else None,
    "Live memory after each step of case 10 on an H200, ways a and b.",
    "H200 上 case 10 每一步之后的活跃显存，方式 a 和 b。",
)

# %%
case_10 = ...

# %%
check("7.5", case_10)

# %% [markdown]
"""
## 7.6 Fix three of them

To prove a fix, show that the results are equal, and that the cause is gone. The checks do both.

**Exercise 7.6 (case 7).** Make it ready for a CUDA graph: the loss over positions that have a label (others carry -100), without an operator whose result size depends on the data.
"""


# %%
def loss(logits, labels): ...


# %%
check("7.6", loss)

# %% [markdown]
"""
**Exercise 7.7 (case 8).** `table` has shape (width, items), `users` (batch, width). Return a function that does one step, `users @ table`, without copying the table in each step.
"""


# %%
def make_scores(table, users): ...


# %%
check("7.7", make_scores)

# %% [markdown]
"""
**Exercise 7.8 (case 10).** Return a function that adds `(model(batch) - 1).square().mean()` to a running total and returns the total, without keeping anything of the steps before.
"""


# %%
def make_validation(model, batch): ...


# %%
check("7.8", make_validation)

# %% [markdown]
"""
## 7.7 What it was worth

Step times of both ways on the H200, and here:
"""

# %%
for program in (case_6_program, case_7_program, case_8_program, case_9_program, case_10_program):
    live = [program.measure(way, steps=5) for way in program.ways_on(device)]
    here = live[0]["median_ms"] / live[1]["median_ms"]
    kept = [recorded.program(program.name, way) for way in program.ways]
    there = (
        f"{kept[0]['median_ms']:8.2f} → {kept[1]['median_ms']:7.2f} ms, {kept[0]['median_ms'] / kept[1]['median_ms']:5.2f}×"
        if all(kept)
        else recorded.NOT_RECORDED
    )
    print(f"{program.name:8} H200: {there}; here: {here:.2f}×")

# %% [markdown]
"""
Not every fix pays the same. Work of the host that the GPU waits for is nearly all of case 6. A fault of memory costs no time until the run ends (case 10). And what you see first need not be the cause: in case 7 way b removes the waits and gains nothing<!-- holds: took("case_7", "b") > 0.95 * took("case_7", "a") -->, because the GPU works for
40 %<!-- = 100 * trace_summary("case_7", "a")["gpu"]["busy_ms"] / took("case_7", "a") --> of the step and waits for launches in the rest. What way b does gain is that its sizes no longer depend on the data, which CUDA graphs and a whole compiled graph need. Measure before and after, and say what you gained.

## What to remember

- First *who waits* (timeline), then *which kernel* (table), then *why* (ncu).
- A kernel that computes nothing (copy, cast, transpose) is a question to the program, not to the kernel.
- Memory that grows by the same amount in each step is a graph or a list.
- Equal results, unprofiled medians, cause gone: that is a fix.

The page to keep beside the screen: [from symptom to fix](sheets/symptoms-en.pdf). Back to the [overview](README.md).
"""
