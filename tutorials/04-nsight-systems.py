# %% [markdown]
"""
# 4. Nsight Systems and NVTX

*Last verified: 2026-11-15 with the nsys of Nsight Compute 2025.3.1 on an NVIDIA H200.*

Nsight Compute looks into one kernel. Nsight Systems (`nsys`) looks at everything at once: host threads, CUDA calls, copies, kernels on
every stream, on one clock. It costs little, so what it shows is close to how the program really runs. It is the tool for gaps.

**After it you can**

- record the steps you mean, from the command line or by hand while a program runs, without gigabytes of the rest;
- annotate code in five ways, so that a timeline speaks your words;
- read five views of a timeline from its SQLite export, in Python, without a GPU and without a window;
- avoid six mistakes that spoil recordings, and one that leaks secrets.
"""

# %%
import sys
from pathlib import Path

TUTORIALS = next(p for p in [Path.cwd(), *Path.cwd().parents, Path.cwd() / "tutorials"] if (p / "programs").is_dir())
sys.path.insert(0, str(TUTORIALS / "programs"))

import pictures
import recorded

print(recorded.output("nsys-version"))

# %% [markdown]
"""
## 4.1 Record with `nsys profile`

The work goes in three steps: record on the machine with the GPU (a `.nsys-rep` file), copy the file, look at it on your own computer
(`nsys-ui`, free) or export it (4.4). One command records and ends with the program:

```bash
nsys profile --trace=cuda,nvtx,osrt --sample=none --cpuctxsw=none \
    --capture-range=cudaProfilerApi --capture-range-end=stop --force-overwrite=true \
    --output=hidden_sync \
    python programs/hidden_sync.py --steps 3
```

| option | what it does |
| --- | --- |
| `--trace=cuda,nvtx,osrt` | what to record: CUDA calls and kernels, NVTX ranges, calls of the operating system; also `cudnn`, `cublas` |
| `--sample=none --cpuctxsw=none` | no sampling of host threads: needs permission and slows the host |
| `--capture-range=cudaProfilerApi` | record between `torch.cuda.profiler.start()` and `stop()` only |
| `--capture-range-end=stop` | then stop recording, but let the program go on |
| `--delay=N --duration=N` | the alternative: start after N seconds, for N seconds |
| `--gpu-metrics-devices=all` | how busy the GPU's units are, sampled (older: `--gpu-metrics-device`); needs permission |
| `--cuda-memory-usage=true` | allocations of device memory |
| `--cuda-graph-trace=node` | kernels inside CUDA graphs, which otherwise are one block |
| `--output=NAME --force-overwrite=true` | where to |

Options differ between versions: ask `nsys profile --help`. `dpscope nsys` builds this command for the nsys that is installed, warms up,
records three steps of each method and reads the result:

```bash
dpscope nsys --methods flat --print-command
```
"""

# %%
print(recorded.output("nsys-profile", last=14))

# %% [markdown]
"""
## 4.2 Record by hand with `nsys launch`

Sometimes you want to see first that training goes well, and *then* record. Start the program under a session; nothing is recorded yet. From
another terminal start and stop as often as you like:

```bash
nsys launch --session-new=lesson --trace=cuda,nvtx python programs/launch_bound.py --steps 5000
nsys sessions list
nsys start --session=lesson --sample=none --force-overwrite=true --output=by_hand
nsys stop --session=lesson
nsys shutdown --session=lesson --kill=sigkill
```

| | `nsys profile` | `nsys launch` |
| --- | --- | --- |
| begins | at once, after a delay, or by the program | when you say so |
| how often | once | as often as you like |
| good for | scripts, known steps | long runs, "now it is slow" |

`dpscope nsys --methods flat --launch` prints these lines for a workload of dpscope.
"""

# %%
for name in ("nsys-sessions", "nsys-start", "nsys-stop"):
    print(f"$ {name}: {recorded.output(name, last=8)}")

# %% [markdown]
"""
## 4.3 NVTX: make the timeline speak your words

A timeline of thousands of kernels named `vectorized_elementwise_kernel` says little. **NVTX** ranges name stretches of your code. They
cost about a third of a microsecond, so they may stay in. Five ways:

| way | with PyTorch | with the package `nvtx` (`pip install nvtx`) |
| --- | --- | --- |
| decorator | `@nvtx_range("augment")` (dpscope) | `@nvtx.annotate("augment", color="blue")` |
| context | `with nvtx_range("forward"):` (dpscope), `torch.cuda.nvtx.range` | `with nvtx.annotate("forward"):` |
| push and pop | `torch.cuda.nvtx.range_push("x")`, `range_pop()` | `nvtx.push_range("x")`, `nvtx.pop_range()` |
| start and end | `h = torch.cuda.nvtx.range_start("x")`, `range_end(h)` | `h = nvtx.start_range("x")`, `nvtx.end_range(h)` |
| automatic | `torch.autograd.profiler.emit_nvtx()`; `dpscope nsys --autograd` | `nvtx.Profile()`; `python -m nvtx script.py` for every function |

Push and pop nest and belong to one thread. Start and end may overlap and end on another thread. On builds of PyTorch without CUDA
`torch.cuda.nvtx` raises; dpscope's `nvtx_range` then does nothing, so that the same code runs everywhere. `programs/annotated.py` uses them
all; here it runs, inside two ranges of ours:
"""

# %%
from annotated import train

from dpscope.instruments.nvtx import nvtx_available, nvtx_range


@nvtx_range("a lesson")
def lesson() -> float:
    with nvtx_range("training"):
        return train("cpu", 2)


print(f"loss {lesson():.3f}; ranges go to a profiler: {nvtx_available()}")

# %% [markdown]
"""
**Autograd ranges.** With `emit_nvtx` every operator is a range, forward and backward, and the backward ones carry the sequence number of the forward
operator they belong to. It is the way from a backward kernel to the line that caused it. It makes many ranges and a slower host: for looking, not for
timing. Newer versions of nsys do the same without touching the code:

```bash
nsys profile --trace=cuda,nvtx --pytorch=autograd-nvtx --sample=none \
    --capture-range=cudaProfilerApi --capture-range-end=stop --force-overwrite=true \
    --output=autograd \
    python programs/hidden_sync.py --steps 1
```
"""

# %%
from collections import Counter

from dpscope.instruments.nsys import views
from dpscope.instruments.nsys.reading import read_timeline
from dpscope.reports.trace.capture_figure import draw_capture

autograd = recorded.timeline("autograd")
if autograd:
    names = Counter(r.name.split(",")[0] for r in autograd.ranges)
    print(f"{len(autograd.ranges)} ranges in one step of hidden_sync on the H200; the most frequent:")
    for name, count in names.most_common(8):
        print(f"  {count:4} × {name[:90]}")
else:
    print(recorded.NOT_RECORDED)

# %% [markdown]
"""
## 4.4 From a report to a database

```bash
nsys export --type=sqlite --force-overwrite=true --output=hidden_sync.sqlite hidden_sync.nsys-rep
nsys stats --report cuda_gpu_kern_sum,cuda_gpu_mem_size_sum,cuda_api_sum,nvtx_gpu_proj_sum \
    --force-export=true hidden_sync.nsys-rep
dpscope nsys --read hidden_sync.sqlite
```

`nsys stats` prints ready-made tables. The SQLite file has a table for each kind of event (`CUPTI_ACTIVITY_KIND_KERNEL`, `…_MEMCPY`,
`…_RUNTIME`, `NVTX_EVENTS`; names are numbers into `StringIds`; times in nanoseconds), and `correlationId` joins a launch to its kernel. dpscope reads
it on any machine. `dpscope nsys --read` of the recorded `hidden_sync`:
"""

# %%
print(recorded.output("nsys-read", last=24))

# %% [markdown]
"""
## 4.5 Five views of a timeline

The example is `hidden_sync` as recorded on the H200; where that is not there, two steps of ghost clipping of a small model, also from the
H200.
"""

# %%
timeline, title = recorded.timeline("hidden_sync"), "hidden_sync on an H200, recorded"
if timeline is None:
    timeline, title = (
        read_timeline(recorded.ROOT / "tests" / "data" / "nsys_nvtx_step.sqlite"),
        "ghost clipping on an H200, recorded",
    )
print(
    f"{title}: {len(timeline.activities)} activities of the GPU, {len(timeline.calls)} CUDA calls, {len(timeline.ranges)} ranges"
)

# %% [markdown]
"""
**View 1: the GPU's timeline.** CUDA calls above, streams below, and your ranges over both. Look for: holes in the stream lanes; copies beside
kernels or instead of them; streams that never overlap. A kernel is drawn as faint as it is short, so a pale lane is an idle GPU.
"""

# %%
pictures.show(draw_capture(views.lanes(timeline), title=title), "ranges, CUDA calls and streams")
views.gpu_timeline(timeline).head(4)

# %% [markdown]
"""
Three steps of `hidden_sync`, each in three stretches: the forward pass, the backward pass, and then a stretch in which every red tick is a wait and the stream is
almost white. That last one is the logging of norms. The GPU is busy for 28 %<!-- = busy_percent("hidden_sync") --> of the recording.

**View 2: host and GPU.** Who waits for whom? Time in `…Synchronize` is the host waiting for the GPU; that is harmless at the end of a step and costly
within it. Gaps whose next kernel had not been launched are the GPU waiting for the host.
"""

# %%
views.host_and_gpu(timeline).head(6)

# %% [markdown]
"""
**View 3: from the whole to a launch.** How busy the GPU was; how many kernels are shorter than a launch costs; how long a launch takes; how long it lies
in the queue. A long time from launch to start is *good*: the host is ahead.
"""

# %%
for what, value in views.levels(timeline).items():
    print(f"{what:50} {value:10.2f}")

# %% [markdown]
"""
**View 4: the link and the machine.** What crossed between host and device, from which kind of memory, how fast. Temperature, power and the state of the
link come from the driver: `nvidia-smi -q` prints them, and `--gpu-metrics-devices=all` puts the load of the link and of the units on the timeline, with permission.
"""

# %%
copies = {name: recorded.timeline(name) for name in ("unpinned_copy", "prefetched_copy")}
for name, seen in copies.items():
    if seen:
        print(name, views.link(seen).to_string(index=False), sep="\n")
        pictures.show(draw_capture(views.lanes(seen), title=f"{name} on an H200, recorded"), f"timeline of {name}")
views.link(timeline)

# %% [markdown]
"""
In the two timelines of the copying program the difference is plain to see: from pageable memory, copies and kernels take turns on one stream, and the
copies crawl (6.2 GB/s<!-- = copies_gb_per_second("unpinned_copy") -->); prefetched, they come from pinned memory
(55.4 GB/s<!-- = copies_gb_per_second("prefetched_copy") -->), have a stream of their own and lie beside the kernels. In the second picture the host has ordered all five steps
long before the GPU has done the second: that is what "the host is ahead" looks like.

`utilization.gpu` of nvidia-smi is a famous trap: it is the share of time in which *some* kernel ran. One thread on one SM makes it 100 %<!-- given -->.
"""

# %% [markdown]
"""
**View 5: libraries.** Whose kernels are they? cuBLAS and cuDNN you can only choose (formats, shapes, versions); PyTorch's elementwise kernels you can fuse;
your own you can rewrite.
"""

# %%
views.libraries(timeline).head(8)

# %% [markdown]
"""
## 4.6 A private step on the timeline

Phases of a step as dpscope's NVTX ranges, 1.17 billion parameters, batch 8, sequence 1024, bf16, on the H200. A kernel belongs to the phase in which
it was *launched*, on whatever thread:
"""

# %%
for method in ("standard", "flat", "ghost", "flash"):
    seen = recorded.captured("traces", method)
    phases = ", ".join(f"{p['phase']} {p['gpu_ms']:.1f}" for p in seen["phases"] if p["gpu_ms"] > 0.05)
    print(
        f"{method:9} GPU busy {seen['gpu']['busy_ms']:6.1f} ms, {seen['kernel_total']['calls']:5.0f} kernels; ms by phase: {phases}"
    )

# %% [markdown]
"""
Two tools that know nothing of each other agree: for flat clipping nsys says the GPU is busy for
236.2 ms<!-- = captured("traces", "flat")["gpu"]["busy_ms"] --> a step and torch.profiler says
235.8 ms<!-- = traced("traces", "flat")["gpu"]["busy_ms"] -->.

## 4.7 Six cautions, and one more

1. **When.** A fixed `--delay` misses the steps you mean, or catches the warm-up. Let the program say when (`cudaProfilerApi`).
2. **How long.** Seconds, not minutes. A whole program made 1.2 GB<!-- given: measured with nsys 2025.3.1, docs/nsys.md's facts --> where one step is below
   0.1 MB<!-- given: the same -->. Beyond a minute nothing opens it.
3. **Where to.** nsys writes to the current folder and keeps temporary files in `TMPDIR`: both need room and permission.
4. **Whose.** On shared storage put the host's name (`%h`) into the output's name, or machines overwrite each other.
5. **Schedulers** that kill all workers when one ends cut off the others' reports: record by hand (4.2).
6. **Permission.** Sampling the host needs `/proc/sys/kernel/perf_event_paranoid` of 2 or less; GPU metrics need access to counters. Without them, leave
   both off: CUDA and NVTX need neither.

And: **a report holds your environment**, every token that is exported in your shell, and that of other processes too. Start nsys with a short
environment (`env -i …`; `dpscope nsys` does), and share a stripped export (`python -m dpscope.instruments.nsys.stripping`), not the report.

Some installations leave a raw `.qdstrm`; the `QdstrmImporter` beside nsys makes a report of it. dpscope does that for you.

## Exercises

1. In the timeline above, which single call of the host takes most time in all, and does it wait?
2. Write a function that gives the longest gap of the GPU and the kernel that ended it.
3. Record `programs/annotated.py` with the command of 4.1, if you have a GPU, and find its ranges. Then annotate your own loop with the five phases' names (`forward`, `backward`, `clip`, `noise`, `optimizer`) inside a range `step`, and `dpscope nsys --read` will
   give you the table by phase. Try the ranges on the CPU: they must not raise.
"""

# %%
# Solution 1
first = views.host_and_gpu(timeline).iloc[0]
print(
    f"{first['call']}: {first['calls']} calls, {first['ms']:.2f} ms, {'waits for the GPU' if first['waits'] else 'does not wait'}"
)


# %%
# Solution 2
def longest_gap(capture):
    table = views.gpu_timeline(capture)
    ended = (table["start_ms"] + table["ms"]).cummax().shift(fill_value=0.0)
    gaps = table["start_ms"] - ended
    gaps.iloc[0] = 0.0
    return gaps.max(), table.loc[gaps.idxmax(), "what"]


length, kernel = longest_gap(timeline)
print(f"{length:.3f} ms without work, ended by {kernel}")

# %%
# Solution 3
from dpscope.vocabulary.phases import PHASES

with nvtx_range("step"):
    for phase in PHASES:
        with nvtx_range(phase):
            pass
print("ranges:", ", ".join(PHASES))

# %% [markdown]
"""
## Quiz

**1. The stream lane is full, and a step is still slow. Is nsys of further use?**

<details><summary>Answer</summary>

It says which kernels fill it (view 5). Why a kernel is slow is a question for Nsight Compute.

</details>

**2. `cudaStreamSynchronize` takes 90 %<!-- given --> of the host's time. Bad?**

<details><summary>Answer</summary>

It depends on where. At the end of a step it means that the host is fast and waits for a busy GPU: good. In the middle, with gaps in the stream lane after
it, it is a hidden synchronisation.

</details>

**3. Your range `backward` contains no kernels, though the backward pass clearly runs. Why?**

<details><summary>Answer</summary>

Autograd launches them from its own thread, where your push is not seen. The thread that called `backward()` waits meanwhile, so count launches of *all*
threads within the range's time, as dpscope does, or use `emit_nvtx`.

</details>

**4. Which is the better start of a recording, `--delay=120` or `cudaProfilerApi`?**

<details><summary>Answer</summary>

The second: it starts at a step, not at a time, and is the same step on a faster machine.

</details>

## What to remember

- nsys for *when* and *who waits*, ncu for *why* a kernel is slow.
- Record a few steps that the program itself marks.
- NVTX ranges are nearly free: name your phases once, and every tool speaks your words.
- The SQLite export is data: gaps, waits, copies and libraries can be computed and tested.
- Reports hold secrets. Strip before you share.

**Further**: [NVIDIA's user guide](https://docs.nvidia.com/nsight-systems/UserGuide/), [nsys in dpscope](../docs/nsys.md).
Next: [What privacy costs](05-what-privacy-costs.ipynb).
"""
