# %% [markdown]
"""
# 2. PyTorch Profiler

*Last verified: 2026-11-16, torch 2.13 on a CPU, torch 2.11 on an NVIDIA H200.*

**Level:** start. **Assumes:** [lesson 1](01-how-a-gpu-step-works.ipynb), sections 1.1 to 1.6. **Time:** 20 minutes to read, about 40 more for the exercises.

`torch.profiler` comes with PyTorch and answers the first question about a slow step: *which operators, and who waits?* It needs no other tool and works on a
CPU too. This lesson records a small network, reads the recording with torch's own tables and with dpscope's, finds a bottleneck, fixes it and
measures the gain.

**After it you can**

- configure a recording and choose which steps of a run it looks at;
- read torch's tables by time, shape and memory, and know which column to trust;
- find a bottleneck, fix it, and show the gain by timing without the profiler;
- open a trace in Perfetto and recognise a wait, a gap and a copy.

Solutions of the exercises: [solutions/lesson_2.py](solutions/lesson_2.py).
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
import inspect
import os
import warnings

os.environ |= {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # the profiler is talkative
warnings.filterwarnings("ignore", message=".*clears events at the end of each cycle")

import cnn
import pictures
import recorded
import torch
import windows
from checks import check
from practice import device_here

device = device_here()
print(f"torch {torch.__version__}, measuring on: {device}")

# %% [markdown]
"""
## 2.1 Something to look at

A small network for images (`programs/cnn.py`), an optimizer, and a step. The step normalises the batch first, the way one writes it on a first day: image by
image.
"""

# %%
print(inspect.getsource(cnn.normalise_one_by_one))
print(inspect.getsource(cnn.network))
step = cnn.make_step(cnn.normalise_one_by_one, device)

# %% [markdown]
"""
**Exercise 2.1.** How many PyTorch operators does `(image - image.mean()) / image.std()` call directly, for one image? (The batch has 128.)
"""

# %%
operators_per_image = ...

# %%
check("2.1", operators_per_image)

# %% [markdown]
"""
## 2.2 A recording, and its settings

| argument of `torch.profiler.profile` | what it does | what it costs |
| --- | --- | --- |
| `activities=[CPU, CUDA]` | host operators; kernels and copies | leave `CUDA` out on a machine without one |
| `schedule=…` | which steps are recorded (2.3) | nothing |
| `on_trace_ready=…` | called with the profiler after each cycle, to save it | the time of writing |
| `record_shapes=True` | shapes of inputs: tells one `mm` from another | some time in each operator |
| `profile_memory=True` | every allocation and free, with its operator | some time in each allocation |
| `with_stack=True` | lines of Python | much time, large files |
| `with_flops=True` | operations of products and convolutions, from shapes | little |
| `with_modules=True` | module names, for TorchScript only; use `dpscope trace --modules` | |
| `acc_events=True` | keep events of all cycles; otherwise each cycle starts empty | memory |

Every setting makes the step slower. **A step under the profiler is not a step**: take *proportions* from the profiler and *times* from a run without it. With a schedule, call
`profiler.step()` at the end of each step; without it the schedule never moves.
"""

# %%
from torch.profiler import ProfilerActivity, profile

activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
for _ in range(3):
    step()  # warm up

with profile(activities=activities, record_shapes=True, profile_memory=True) as profiler:
    for _ in range(3):
        step()
print(f"{len(profiler.events())} events in three steps")

# %% [markdown]
"""
**Exercise 2.2.** Which argument gives you what you need?
"""

# %%
argument = {"shapes": ..., "lines of Python": ..., "allocations": ...}

# %%
check("2.2", argument)

# %% [markdown]
"""
## 2.3 Which steps? Schedules

The first steps of a run are not like the others: memory is allocated, kernels are chosen, caches fill. A schedule says how many steps to skip at the start
(`skip_first`), and then in each cycle how many to `wait`, to `warmup` (recorded and thrown away, because the profiler's own start disturbs) and to record
(`active`), and how often to `repeat`. Three cover most needs:

| schedule | looks at | for the question |
| --- | --- | --- |
| `early_training` | the first steps | why does it start slowly? |
| `steady_state` | ten steps after fifty, twice | what does a step cost? |
| `periodic` | three steps, again and again | does a step change during the run? |
"""

# %%
from dpscope.instruments.trace import early_training
from dpscope.vocabulary.instruments import SCHEDULES

pictures.show(
    pictures.draw_schedules({name: SCHEDULES[name] for name in ("early_training", "steady_state", "periodic")}),
    "Which steps three schedules record.",
    "三种 schedule 各记录哪些步。",
)
recorded_steps = []
with profile(
    activities=activities, schedule=early_training(), on_trace_ready=lambda p: recorded_steps.append(p.step_num)
) as early:
    for _ in range(8):
        step()
        early.step()
print(f"early_training was ready after step {recorded_steps}")

# %% [markdown]
"""
**Exercise 2.3.** Make a `torch.profiler.schedule(...)` that records steps 10, 11, 12 and 20, 21, 22 (the first step is 0), with a warm-up step before each.
"""

# %%
my_schedule = ...

# %%
check("2.3", my_schedule)

# %% [markdown]
"""
## 2.4 Torch's own tables

`key_averages()` groups events by name, and `.table()` prints them. This is what every guide shows, so learn to read it:
"""

# %%
print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=8, max_name_column_width=36))

# %% [markdown]
"""
- **Self CPU** is the operator itself; **CPU total** includes what it calls. Sort by *total* to find *where* time goes, by *self* to find *what* does the work. Totals do not add up
  to the whole: a caller and its callee both count.
- **Self CPU Mem** is what the operator allocated minus what it freed.
- On a GPU there are **CUDA** columns. They are the ones to sort by (`sort_by="self_cuda_time_total"`): the CPU time of an asynchronous operator is the time of launching it.

The same network recorded on the H200, three steps:
"""

# %%
print(recorded.table("one-by-one-by-device-time"))

# %% [markdown]
"""
Read the bottom lines first. `Self CUDA time total` is how long the GPU worked in three steps, and `Self CPU time total` how long the host did: the GPU worked for
a small part of it<!-- holds: totals("one-by-one")["self_device_ms"] < 0.5 * totals("one-by-one")["self_cpu_ms"] -->. (An operator and the kernel it launched are two rows with the same GPU time; the bottom line counts it once.) Then look at *# of Calls* and *CUDA time avg*: `std`, `mean`, `div` and `sub` run
384 times, one to three microseconds each. No single call is slow; there are too many. That is what a launch-bound program looks like in this table.

Three more things that the object can do. (`total_average()` adds up all rows, so on a GPU its device time counts operators and their kernels: about twice the bottom line of the table.)
"""

# %%
by_shape = profiler.key_averages(group_by_input_shape=True)
total = profiler.key_averages().total_average()
print(
    f"total_average(): {total.self_cpu_time_total / 1e3:.1f} ms of host time, {total.self_device_time_total / 1e3:.1f} ms of GPU time"
)
print(f"events(): {len(profiler.events())} single events; the first: {profiler.events()[0].name}")
print(by_shape.table(sort_by="self_cpu_time_total", row_limit=5, max_name_column_width=24, max_shapes_column_width=40))

# %% [markdown]
"""
> **Old names.** Scripts from before 2024 ask rows for `cuda_time_total`; today that raises an AttributeError, and the name is `device_time_total` (in `sort_by` the old names
> still work). `torch.profiler.ProfilerMetrics` does not exist. `export_memory_timeline` is deprecated.

**Exercise 2.4.** Write a function that returns the name and the number of calls of the operator that was called most often.
"""


# %%
def most_called(profiler): ...


# %%
check("2.4", most_called)

# %% [markdown]
"""
## 2.5 The same as data

dpscope turns a recording into data frames. Every function takes a profiler, a trace that was read, or the path of a trace: `basic_analysis` (operators by time and
memory), `advanced_analysis` (by operator, by input shape), `memory_analysis`, `generate_performance_report` (all of it as one text, to keep beside a run) and
`detect_bottlenecks` (every operator above a threshold, slowest first).
"""

# %%
from dpscope.instruments.trace import (
    advanced_analysis,
    basic_analysis,
    detect_bottlenecks,
    generate_performance_report,
    memory_analysis,
)

basic_analysis(profiler, limit=6)["by CPU time"]

# %%
operators = advanced_analysis(profiler, limit=10_000)["by operator"].sort_values("calls", ascending=False)
print(operators[["operator", "calls", "self_cpu_ms"]].head(8).to_string(index=False))
for found in detect_bottlenecks(profiler, threshold_ms=2.0)[:4]:
    print(
        f"{found.name:32} {found.cpu_ms:8.1f} ms of host time in {found.count:5} calls, shapes {found.input_shapes}"[
            :110
        ]
    )

# %%
report = generate_performance_report(profiler, "the CNN", limit=3)
print("\n".join(report.splitlines()[:10]), "\n…")

# %% [markdown]
"""
Sorted by calls, the picture is clear: what single images cause comes first (`mean`, `std` and what they call), hundreds of times each. The convolutions are called six times.

**Exercise 2.5.** Which share of the host's work do operators have whose name contains `word`? Use `profiler.key_averages()`, and mind which of the two times adds up.
"""


# %%
def share_of(profiler, word): ...


# %%
check("2.5", share_of)

# %% [markdown]
"""
## 2.6 A bottleneck, fixed

The network has two convolutions, but most operators of the recording are not theirs: `normalise_one_by_one` calls several for every image of the batch. None of them is
slow; there are too many. It is the launch-bound loop of lesson 1 in real life, and the fix is the same: one operator for all images.
"""

# %%
from dpscope.instruments.timing import time_steps

print(inspect.getsource(cnn.normalise_at_once))
images = torch.rand(128, 3, 12, 12, device=device)
torch.testing.assert_close(cnn.normalise_at_once(images), cnn.normalise_one_by_one(images))  # first: is it the same?

before = time_steps(step, device=device, warmup=3, steps=15)
fixed_step = cnn.make_step(cnn.normalise_at_once, device)
after = time_steps(fixed_step, device=device, warmup=3, steps=15)
print(
    f"a step here: before {before.median_ms:.2f} ms, after {after.median_ms:.2f} ms: {before.median_ms / after.median_ms:.2f}× as fast"
)

with profile(activities=activities, record_shapes=True) as fixed:
    for _ in range(3):
        fixed_step()
for name, p in (("before", profiler), ("after", fixed)):
    print(f"operators called in three steps, {name}: {sum(row.count for row in p.key_averages())}")

# %% [markdown]
"""
On the H200 the fix takes the step from 9.3 ms<!-- = totals("one-by-one")["median_ms"] --> to 1.7 ms<!-- = totals("at-once")["median_ms"] -->:
5.3×<!-- = totals("one-by-one")["median_ms"] / totals("at-once")["median_ms"] --> as fast. The gain is larger than on a CPU, because the GPU does the convolutions quickly and launching
costs the same.

Three things make this a proof: the two are checked to compute the same; the gain is a ratio of *unprofiled* medians; and the profiler confirms the reason, the number of
operators. To prove a fix, show that the results are equal.

**Exercise 2.6.** If an operator takes a `share` of the step and costs nothing after a fix, the step becomes at most how many times as fast? (This is Amdahl's law, and the reason to
look before optimising.)
"""


# %%
def at_most(share): ...


# %%
check("2.6", at_most)

# %% [markdown]
"""
## 2.7 The trace, in Perfetto

Tables lose *when*. Save the recording as a trace and open it at <https://ui.perfetto.dev> (the file stays in your browser) or `chrome://tracing`:
"""

# %%
folder = Path("traces-of-lesson-2")
folder.mkdir(exist_ok=True)
profiler.export_chrome_trace(str(folder / "cnn.json.gz"))
print(
    f"{folder / 'cnn.json.gz'}: {(folder / 'cnn.json.gz').stat().st_size / 1024:.0f} KiB, in the folder you started from"
)

# %% [markdown]
"""
A file to try without a GPU of your own: [the trace of case 4 on the H200](../benchmarks/results/2026-11-16-h200-tutorials/recorded/traces/case_4-a/trace.json.gz); more of them, each with a question, are on the page
[traces to download](traces.md). This is the window you will see, drawn from that file:
"""

# %%
trace = recorded.trace_of("case_4", "a")
pictures.show(
    windows.draw_perfetto_window(windows.tracks_of(trace), "case_4-a/trace.json.gz") if trace else None,
    "Perfetto's window, drawn (not a screenshot) from the H200 trace of case 4, way a. 1: the clock; 2: the host's operators; 3: CUDA calls, waits in red; 4: the GPU's stream; 5: details of what you click.",
    "Perfetto 的窗口，根据 H200 上 case 4 方式 a 的 trace 绘制（不是截图）。1：时间轴；2：主机上的算子；3：CUDA 调用，红色为等待；4：GPU 的流；5：点击后显示的详情。",
)

# %% [markdown]
"""
- **W** and **S** zoom, **A** and **D** move, a click shows an event's arguments: shapes, and for a kernel its grid and occupancy.
- Each thread of the host has a track; autograd runs the backward pass on a thread of its own. Below are the GPU's streams.
- Arrows lead from a launch to its kernel. A kernel far to the right of its launch means that the host is ahead: good.
- A gap in the GPU's track is idle time. If the launch of the next kernel lies *after* the gap began, the GPU waited for the host.
- A long `cudaStreamSynchronize` is a wait. Look above it for the operator: `aten::item` is `.item()`, `float()` or `if tensor:`.

dpscope reads any such trace and says these things in words:
"""

# %%
from dpscope.instruments.trace import read_trace, summarise

for way in "ab":
    if not recorded.trace_of("case_4", way):
        continue
    seen = summarise([read_trace(recorded.trace_of("case_4", way))])
    gpu = seen["gpu"]
    print(
        f"case_4 {way}, H200: traced step {seen['step_ms']:.2f} ms; GPU busy {gpu['busy_ms']:.2f} ms, waits for the host {gpu['idle_waiting_for_host_ms']:.2f} ms"
    )
    for wait in seen["synchronisations"]:
        print(f"    {wait['count']:4.0f} × {wait['call']} by {wait['operator']}: {wait['ms']:.2f} ms")

# %% [markdown]
"""
Way a waits 32 times<!-- = sum(w["count"] for w in trace_summary("case_4", "a")["synchronisations"] if w["operator"] == "aten::item") --> a step, once for each layer, and the GPU is idle
after each wait. Compare the two lines: the work of the GPU is the same, the idle time is not. Do not read the cost off the waits themselves: a host that waits while the
GPU is busy loses nothing. What a wait costs is the idle time that *follows* it. On a CPU nothing waits; dpscope then counts what *would*, if the tensors were on
a GPU.

**Exercise 2.7.** Write a function that counts the `aten::item` events in a trace file (gzipped JSON with a list `traceEvents`).
"""


# %%
def reads(path): ...


# %%
check("2.7", reads)

# %% [markdown]
"""
## 2.8 Memory

`memory_analysis` gives allocated bytes over time, which answers *when* the peak is. To learn *what* the peak is made of (parameters, activations, per-sample gradients) use
`dpscope memory`; lesson 5 shows it.
"""

# %%
over_time = memory_analysis(profiler, limit=5)["over time"]
peak_row = over_time.loc[over_time["total_bytes"].idxmax()]
print(
    f"highest {peak_row['total_bytes'] / 2**20:.2f} MiB above the start, {peak_row['time_ms']:.2f} ms in, at {peak_row['operator']}"
)
print(recorded.table("one-by-one-by-memory"))

# %% [markdown]
"""
The table is torch's own from the H200, sorted by `self_device_memory_usage`.

**Exercise 2.8.** `changes` is a list of allocations (positive) and frees (negative), in order. Return the peak of live memory.
"""


# %%
def peak(changes): ...


# %%
check("2.8", peak)

# %% [markdown]
"""
## 2.9 What private training adds

`dpscope trace` records every method next to ordinary training, each in a process of its own, once with the profiler and once without:

```bash
dpscope trace --methods standard,flat,ghost,flash --model 1b --dtype bf16 --batch-size 8 \
    --seq-len 1024
```

These are its results on the H200 (2026-11-15), drawn from the recorded files. In the *phases*, flat's `clip` and ghost's long `backward` stand out; the *differences* say which
operators make a method slower than ordinary training, and sum to the difference of the two steps:
"""

# %%
from dpscope.reports.trace.figures import draw_differences, draw_phases

rows = recorded.sweep("traces").rows
pictures.show(
    draw_phases(rows),
    "Time of a step by phase for four methods on an H200.",
    "H200 上四种方法一步的时间，按阶段划分。",
)
pictures.show(
    draw_differences(rows),
    "What each method adds to an ordinary step, by operator.",
    "每种方法比普通训练的一步多出的时间，按算子划分。",
)

# %% [markdown]
"""
Flat clipping's step runs 5,151 kernels<!-- = traced("traces", "flat")["gpu"]["kernels"] -->, ordinary training's
1,651<!-- = traced("traces", "standard")["gpu"]["kernels"] -->. In the traced step its GPU is busy for 235.8 ms<!-- = traced("traces", "flat")["gpu"]["busy_ms"] -->
and idle for 63.9 ms<!-- = traced("traces", "flat")["gpu"]["idle_ms"] -->. Ghost clipping waits for the GPU
16 times<!-- = sum(w["count"] for w in traced("traces", "ghost")["synchronisations"]) --> a step (`aten::unique_dim`: the size of its result depends on the data).

Is `flat` launch-bound, then? The profiler slows the host much more than the kernels, so divide busy time by the *unprofiled* step: 235.8 ms<!-- = traced("traces", "flat")["gpu"]["busy_ms"] -->
of 262.4 ms<!-- = ms("traces", "flat") --> is 90 %<!-- = 100 * traced("traces", "flat")["gpu"]["busy_ms"] / ms("traces", "flat") -->: it is not.

**Exercise 2.9.** Write that as a function of the method: `recorded.traced("traces", method)["gpu"]["busy_ms"]` over the step time `recorded.ms("traces", method)`.
"""


# %%
def busy_share(method): ...


# %%
check("2.9", busy_share)

# %% [markdown]
"""
## 2.10 And TensorBoard?

Its profiler plug-in (torch-tb-profiler) is no longer maintained: the tab needs a script from the internet and shows no GPU time for current traces. `dpscope trace` writes scalars,
tables and pictures that TensorBoard's ordinary tabs show offline:

```bash
tensorboard --logdir runs
```

## Quiz

**1. `aten::mm` has a large `cpu_ms` and a small `self_cpu_ms`. What does that say?**

<details><summary>Answer</summary>

Most of its host time is spent in what it calls. On a GPU neither column is the time of the product: look at `self_device_ms`.

</details>

**2. Under the profiler the GPU is idle for a third of the step. Is the program launch-bound?**

<details><summary>Answer</summary>

Not proven. The profiler costs the host microseconds for every operator, which makes idle time. Divide the GPU's busy time by the *unprofiled* step: if it is well below one, it is
launch-bound. dpscope calls it so below 80 %<!-- given: dpscope's threshold -->.

</details>

**3. Why is the warm-up of a schedule recorded and thrown away instead of just skipped?**

<details><summary>Answer</summary>

The first recorded step contains the start of the profiler itself (CUPTI on a GPU). If recording began with the first active step, that would be in your numbers.

</details>

**4. Your run saves a trace every cycle, but `key_averages()` at the end shows only the last one. Why?**

<details><summary>Answer</summary>

Events are cleared at the start of each cycle. Analyse in `on_trace_ready`, read the saved traces, or pass `acc_events=True`.

</details>

## What to remember

- Warm up, record few steps, take proportions from the profiler and times from a run without it.
- Sort by *total* to find where, by *self* to find what; on a GPU by device time.
- Many calls of small operators are a bottleneck that no single row shows: look at counts.
- A wait costs the idle time that follows it. `aten::item` is almost always yours.
- To prove a fix: equal results, unprofiled medians, and a recording that shows the reason gone.

**Further**: [PyTorch's recipe](https://docs.pytorch.org/tutorials/recipes/recipes/profiler_recipe.html), [Perfetto](https://perfetto.dev/docs/), [traces in dpscope](../docs/traces.md).
Next: [Nsight Compute: run it](03a-run-nsight-compute.ipynb).
"""
