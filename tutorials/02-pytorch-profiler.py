# %% [markdown]
"""
# 2. PyTorch Profiler

*Last verified: 2026-11-15, torch 2.13 on a CPU, torch 2.11 on an NVIDIA H200.*

`torch.profiler` comes with PyTorch and answers the first question about a slow step: *which operators, and who waits?* It needs
no other tool and works on a CPU too. This page records a small convolutional network, analyses the recording in five ways, finds a
bottleneck, mends it and measures the gain. Then it reads a recording of private training.

**After it you can**

- configure a recording and choose which steps of a run it looks at;
- read the tables of operators, by time, shape and memory, and know which column to trust;
- find a bottleneck, mend it, and show the gain by timing without the profiler;
- open a trace in Perfetto and recognise a wait, a gap and a copy.

Tutorial 1 explains launches, waits and right timing.
"""

# %%
import os
import sys
import tempfile
import warnings
from pathlib import Path

os.environ |= {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # the profiler is talkative
warnings.filterwarnings("ignore", message=".*clears events at the end of each cycle")

TUTORIALS = next(p for p in [Path.cwd(), *Path.cwd().parents, Path.cwd() / "tutorials"] if (p / "programs").is_dir())
sys.path.insert(0, str(TUTORIALS / "programs"))

import pictures
import recorded
import torch
from practice import device_here
from torch import nn

device = device_here()
torch.manual_seed(0)
workplace = Path(tempfile.mkdtemp())
print(f"torch {torch.__version__}, measuring on: {device}")

# %% [markdown]
"""
## 2.1 Something to look at

A small network for images, an optimizer, and a step. The step normalises the batch first, the way one writes it on a first day:
image by image.
"""

# %%
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(8, 16, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(16, 10),
).to(device)
optimizer = torch.optim.Adam(model.parameters())
images = torch.rand(128, 3, 12, 12, device=device)
labels = torch.randint(10, (128,), device=device)


def normalise_one_by_one(batch):
    return torch.stack([(image - image.mean()) / image.std() for image in batch])


def make_step(normalise):
    def step():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(normalise(images)), labels).backward()
        optimizer.step()

    return step


step = make_step(normalise_one_by_one)

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

Every setting makes the step slower. **A step under the profiler is not a step**: take its *proportions* from the profiler, and its
*time* from a run without. Do not forget `profiler.step()` at the end of each step: without it a schedule never moves.
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
## 2.3 Which steps? Schedules

The first steps of a run are not like the others: memory is allocated, kernels are chosen, caches fill. A schedule says how many
steps to skip at the start (`skip_first`), and then in each cycle how many to `wait`, to `warmup` (recorded and thrown away, because
the profiler's own start disturbs) and to record (`active`), and how often to `repeat`. Three cover most needs:

| schedule | looks at | for the question |
| --- | --- | --- |
| `early_training` | the first steps | why does it start slowly? |
| `steady_state` | ten steps after fifty, twice | what does a step cost? |
| `periodic` | three steps, again and again | does a step change during the run? |
"""

# %%
from dpscope.instruments.trace import early_training
from dpscope.vocabulary.schedules import SCHEDULES

pictures.show(
    pictures.draw_schedules({name: SCHEDULES[name] for name in ("early_training", "steady_state", "periodic")}),
    "which steps three schedules record",
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
## 2.4 Five ways to look at a recording

dpscope turns a recording into data frames. Every function takes a profiler, a trace that was read, or the path of a trace.

**Basic**: operators by time and by memory. `cpu_ms` includes what an operator calls; `self_cpu_ms` does not. Sort by the first to
find *where* time goes, by the second to find *what* does the work. On a GPU there are `device_ms` columns as well, and they are the ones
to sort by: host time of an asynchronous operator is the time of launching it.
"""

# %%
from dpscope.instruments.trace import (
    advanced_analysis,
    basic_analysis,
    detect_bottlenecks,
    generate_performance_report,
    memory_analysis,
)

basic_analysis(profiler, limit=8)["by CPU time"]

# %% [markdown]
"""
**Advanced**: the same operator with other input shapes is other work. Here `aten::std` and `aten::mean` of
single images stand out: one call for every image in every step.
"""

# %%
advanced = advanced_analysis(profiler, limit=8)
print(advanced.totals)
advanced["by input shape"]

# %% [markdown]
"""
**Memory**: who allocates, and how much is live over time.
"""

# %%
memory = memory_analysis(profiler, limit=5)
print(memory.totals)
memory["by cpu memory"]

# %% [markdown]
"""
**Report**: all of it as one text, to keep beside a run.
"""

# %%
report = generate_performance_report(profiler, "the CNN", limit=5)
print("\n".join(report.splitlines()[:14]), "\n…")

# %% [markdown]
"""
**Bottlenecks**: every operator above a threshold over the whole recording, slowest first, with the shapes it was called with.
"""

# %%
for found in detect_bottlenecks(profiler, threshold_ms=2.0)[:6]:
    print(f"{found.name:45} {found.cpu_ms:8.1f} ms host {found.device_ms:8.1f} ms GPU {found.count:5} calls")

# %% [markdown]
"""
> **Old names.** Scripts from before 2024 ask rows of `key_averages()` for `cuda_time_total`; today that raises an AttributeError, and
> the name is `device_time_total`. `torch.profiler.ProfilerMetrics` does not exist. `export_memory_timeline` is deprecated.
"""

# %% [markdown]
"""
## 2.5 A bottleneck, mended

The network has two convolutions, but most operators of the recording are not theirs: `normalise_one_by_one` calls several
operators for every image of the batch. None of them is slow; there are too many. It is the launch-bound loop of tutorial 1 in real life, and the remedy is the
same: one operator for all images.
"""

# %%
from dpscope.instruments.timing import time_steps


def normalise_at_once(batch):
    mean = batch.mean(dim=(1, 2, 3), keepdim=True)
    return (batch - mean) / batch.std(dim=(1, 2, 3), keepdim=True)


torch.testing.assert_close(normalise_at_once(images), normalise_one_by_one(images))  # first: is it the same?

before = time_steps(make_step(normalise_one_by_one), device=device, warmup=3, steps=15)
after = time_steps(make_step(normalise_at_once), device=device, warmup=3, steps=15)
print(
    f"a step before {before.median_ms:.2f} ms, after {after.median_ms:.2f} ms: {before.median_ms / after.median_ms:.2f}× faster"
)

with profile(activities=activities, record_shapes=True) as mended:
    for _ in range(3):
        make_step(normalise_at_once)()
calls = {
    name: basic_analysis(p, limit=10_000)["by CPU time"]["calls"].sum()
    for name, p in (("before", profiler), ("after", mended))
}
print(f"operators called in three steps: {calls['before']} before, {calls['after']} after")

# %% [markdown]
"""
Three things make this a proof and not an anecdote: the two are checked to compute the same; the gain is a ratio of *unprofiled* medians;
and the profiler confirms the reason, the number of operators. On a GPU one would expect more (not measured here): convolutions are
faster there, and launching is not.
"""

# %% [markdown]
"""
## 2.6 The trace, in Perfetto

Tables lose *when*. Save the recording as a trace and open it at <https://ui.perfetto.dev> (the file stays in your browser) or
`chrome://tracing`:
"""

# %%
from dpscope.instruments.trace import export_trace, read_trace, summarise

path = export_trace(profiler, workplace / "cnn.json.gz")
print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")

# %% [markdown]
"""
- **W** and **S** zoom, **A** and **D** move, a click shows an event's arguments: shapes, and for a kernel its grid and occupancy.
- Each thread of the host has a lane; autograd runs the backward pass on a thread of its own. Below are the GPU's streams.
- Arrows lead from a launch to its kernel. A kernel far to the right of its launch means that the host is ahead: good.
- A gap in the GPU's lane is idle time. If the launch of the next kernel lies *after* the gap began, the GPU waited for the host.
- A long `cudaStreamSynchronize` is a wait. Look above it for the operator: `aten::item` is `.item()`, `float()` or `if tensor:`.

dpscope reads any such trace and says these things in words. This is the recorded trace of `programs/hidden_sync.py` on the H200 if it
is there, and a trace made here otherwise:
"""

# %%
from hidden_sync import PROGRAM as hidden_sync

trace = recorded.trace_of("hidden_sync", "norms_read_at_once")
where = "H200, recorded" if trace else "here"
trace = trace or hidden_sync.record("norms_read_at_once", workplace)
seen = summarise([read_trace(trace)])
print(f"hidden_sync, {where}: {seen['step_ms']:.2f} ms a traced step")
if "gpu" in seen:
    gpu = seen["gpu"]
    print(
        f"GPU busy {gpu['busy_ms']:.2f} ms, idle {gpu['idle_ms']:.2f} ms, of it waiting for the host {gpu['idle_waiting_for_host_ms']:.2f} ms"
    )
for wait in seen["synchronisations"]:
    print(f"  {wait['count']:4.0f} × {wait['call']} by {wait['operator']} ({wait['phase']}): {wait['ms']:.2f} ms")

# %% [markdown]
"""
Thirty-two waits in a step, one for each parameter: the finding that `hidden_sync.py` was written to give. In a trace of the CPU nothing
waits; dpscope counts what *would*, if the tensors were on a GPU.
"""

# %% [markdown]
"""
## 2.7 Memory

`memory_analysis` also gives allocated bytes over time, which answers *when* the peak is. To learn *what* the peak is made of
(parameters, activations, per-sample gradients) use `dpscope memory`, of which tutorial 5 shows more.
"""

# %%
over_time = memory["over time"]
peak = over_time.loc[over_time["total_bytes"].idxmax()]
print(
    f"highest {peak['total_bytes'] / 2**20:.2f} MiB above the start, {peak['time_ms']:.2f} ms in, at {peak['operator']}"
)
over_time.sort_values("bytes", ascending=False).head(5)

# %% [markdown]
"""
## 2.8 What private training adds

`dpscope trace` records every method next to ordinary training, each in a process of its own, once with the profiler and once
without:

```bash
dpscope trace --methods standard,flat,ghost,flash --model 1b --dtype bf16 --batch-size 8 \
    --seq-len 1024
```

These are its results on the H200, drawn from the recorded files. In the *phases*, flat's `clip` and ghost's long `backward` stand
out:
"""

# %%
from dpscope.reports.trace.figures import draw_differences, draw_phases

rows = recorded.sweep("traces").rows
pictures.show(draw_phases(rows), "time of a step by phase for four methods on an H200")

# %% [markdown]
"""
The *differences* say which operators make a method slower than ordinary training. They sum to the difference of the two steps:
"""

# %%
pictures.show(draw_differences(rows), "what each method adds to an ordinary step, by operator")

# %% [markdown]
"""
Flat clipping's step runs 5,151 kernels<!-- = traced("traces", "flat")["gpu"]["kernels"] -->, ordinary training's
1,651<!-- = traced("traces", "standard")["gpu"]["kernels"] -->. Its GPU is busy for
235.8 ms<!-- = traced("traces", "flat")["gpu"]["busy_ms"] --> of the traced step against
121.1 ms<!-- = traced("traces", "standard")["gpu"]["busy_ms"] -->, and idle for
63.9 ms<!-- = traced("traces", "flat")["gpu"]["idle_ms"] --> because the host cannot launch fast enough *under the profiler*. Ghost
clipping waits for the GPU
16 times<!-- = sum(w["count"] for w in traced("traces", "ghost")["synchronisations"]) --> a step (`aten::unique_dim`: the size
of its result depends on the data).

Is `flat` launch-bound, then? No: the profiler slows the host and hardly the kernels, so one divides busy time by the *unprofiled* step:
235.8 ms<!-- = traced("traces", "flat")["gpu"]["busy_ms"] --> of
262.4 ms<!-- = ms("traces", "flat") -->, 90 %<!-- = 100 * traced("traces", "flat")["gpu"]["busy_ms"] / ms("traces", "flat") -->.
"""

# %% [markdown]
"""
## 2.9 And TensorBoard?

Its profiler plug-in (torch-tb-profiler) is no longer maintained: the tab needs a script from the internet and shows no GPU time for
current traces. `dpscope trace` therefore writes scalars, tables and pictures that TensorBoard's ordinary tabs show offline:

```bash
tensorboard --logdir runs
```

## Exercises

1. Which operator of the first recording has the most calls? How many of them belong to the network itself?
2. Record the mended step with the schedule `periodic` shortened to two cycles, and print how many cycles were saved.
3. `detect_bottlenecks` with a threshold of zero lists everything. Which share of `self_cpu_ms` is convolution (forward and backward)?
   What is the most the step could gain if convolutions cost nothing?
"""

# %%
# Solution 1
table = advanced_analysis(profiler, limit=10_000)["by operator"].sort_values("calls", ascending=False)
print(table[["operator", "calls"]].head(5).to_string(index=False))
fewer = advanced_analysis(mended, limit=10_000)["by operator"].set_index("operator")["calls"]
name = table.iloc[0]["operator"]
print(f"{name}: {table.iloc[0]['calls']} calls, of which {fewer.get(name, 0)} remain without the loop over images")

# %%
# Solution 2
from dataclasses import replace

shorter = replace(SCHEDULES["periodic"], skip_first=2, wait=1, warmup=1, active=2, repeat=2)
saved = []
with profile(
    activities=activities, schedule=shorter.to_torch(), on_trace_ready=lambda p: saved.append(p.step_num)
) as p:
    for _ in range(shorter.steps):
        make_step(normalise_at_once)()
        p.step()
print(f"{len(saved)} cycles were saved, after steps {saved}")
assert len(saved) == 2

# %%
# Solution 3
table = advanced_analysis(profiler, limit=10_000)["by operator"]
column = "self_device_ms" if "self_device_ms" in table else "self_cpu_ms"
convolution = table[table["operator"].str.contains("conv")][column].sum()
share = convolution / table[column].sum()
print(f"convolution is {share:.0%} of the work; without it the step could be at most {1 / (1 - share):.1f}× as fast")

# %% [markdown]
"""
The last line is Amdahl's law, and the reason to look before optimising: an operator that takes a tenth of the time cannot give more
than a tenth back.

## Quiz

**1. `aten::mm` has a large `cpu_ms` and a small `self_cpu_ms`. What does that say?**

<details><summary>Answer</summary>

Most of its host time is spent in what it calls. On a GPU neither column is the time of the product: look at `self_device_ms`.

</details>

**2. Under the profiler the GPU is idle for a third of the step. Is the program launch-bound?**

<details><summary>Answer</summary>

Not proven. The profiler costs the host microseconds for every operator, which makes idle time. Divide the GPU's busy time by the
*unprofiled* step: if it is well below one, it is launch-bound. dpscope calls it so below 80 %<!-- given: dpscope's threshold -->.

</details>

**3. Why is the warm-up of a schedule recorded and thrown away instead of just skipped?**

<details><summary>Answer</summary>

The first recorded step contains the start of the profiler itself (CUPTI on a GPU). If recording began with the first active step,
that would be in your numbers.

</details>

**4. Your run saves a trace every cycle, but `key_averages()` at the end shows only the last one. Why?**

<details><summary>Answer</summary>

Events are cleared at the start of each cycle. Analyse in `on_trace_ready`, read the saved traces, or pass `acc_events=True`.

</details>

## What to remember

- Warm up, record few steps, take proportions from the profiler and times from a run without it.
- Sort by *total* to find where, by *self* to find what; on a GPU by device time.
- Many calls of small operators are a bottleneck that no single row shows: look at counts.
- A wait has an operator. `aten::item` is almost always yours.
- A mend is proven by equal results, unprofiled medians, and a recording that shows the reason gone.

**Further**: [PyTorch's recipe](https://docs.pytorch.org/tutorials/recipes/recipes/profiler_recipe.html),
[Perfetto](https://perfetto.dev/docs/), [traces in dpscope](../docs/traces.md). Next: [Nsight Compute](03-nsight-compute.ipynb).
"""
