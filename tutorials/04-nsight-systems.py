# %% [markdown]
"""
# 4. Nsight Systems and NVTX

*Last verified: 2026-11-16 with the nsys of Nsight Compute 2025.3.1 on an NVIDIA H200.*

**Level:** practise. **Assumes:** [lesson 1](01-how-a-gpu-step-works.ipynb); some SQL for one exercise. **Time:** 20 minutes to read, about 30 more for the exercises.

Nsight Compute looks into one kernel. Nsight Systems (`nsys`) looks at everything at once: host threads, CUDA calls, copies, kernels on every stream, on one clock. It costs little, so what it
shows is close to how the program really runs. It is the tool for gaps. (Installing it: [lesson 3a](03a-run-nsight-compute.ipynb), section 3.1.)

**After it you can**

- record the steps you mean, from the command line or by hand while a program runs, without gigabytes of the rest;
- annotate code in five ways, so that a timeline speaks your words;
- find your way in the window, and read five views of a timeline from its SQLite export, in Python, without a GPU;
- avoid six mistakes that spoil recordings, and one that leaks secrets.

Solutions: [solutions/lesson_4.py](solutions/lesson_4.py).
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
import pictures
import recorded
import windows
from checks import check, passed

print(recorded.output("nsys-version"))

# %% [markdown]
"""
## 4.1 Record with `nsys profile`

The work has three parts: record on the machine with the GPU (a `.nsys-rep` file), copy the file, look at it on your own computer (`nsys-ui`, free) or export it (4.4). One command records and
ends with the program:

```bash
nsys profile --trace=cuda,nvtx,osrt --sample=none --cpuctxsw=none \
    --capture-range=cudaProfilerApi --capture-range-end=stop --force-overwrite=true \
    --output=case_4 \
    python programs/case_4.py --steps 3
```

| option | what it does |
| --- | --- |
| `--trace=cuda,nvtx,osrt` | what to record: CUDA calls and kernels, NVTX ranges, calls of the operating system; also `cudnn`, `cublas` |
| `--sample=none --cpuctxsw=none` | no sampling of host threads, no context switches: both need permission and slow the host |
| `--capture-range=cudaProfilerApi` | record between `torch.cuda.profiler.start()` and `stop()` only |
| `--capture-range-end=stop` | then stop recording, but let the program go on |
| `--delay=N --duration=N` | the alternative: start after N seconds, for N seconds |
| `--gpu-metrics-devices=all` | how busy the GPU's units are, sampled (older: `--gpu-metrics-device`); needs permission |
| `--cuda-memory-usage=true` | allocations of device memory |
| `--cuda-graph-trace=node` | kernels inside CUDA graphs, which otherwise are one block |
| `--output=NAME --force-overwrite=true` | where to |

Options differ between versions: ask `nsys profile --help`. With several ranks, put nsys in front of the launcher (`nsys profile … torchrun train.py`): it follows child processes, and one report holds all
ranks of a machine. `dpscope nsys` builds this command for the nsys that is installed, warms up, records three steps of each method and reads the result:

```bash
dpscope nsys --methods flat --print-command
```
"""

# %%
print(recorded.output("nsys-profile", last=14))

# %% [markdown]
"""
**Exercise 4.1.** Write the command that records three steps of `programs/case_2.py`.
"""

# %%
command = ...

# %%
check("4.1", command)

# %% [markdown]
"""
## 4.2 Record by hand with `nsys launch`

Sometimes you want to see first that training goes well, and *then* record. Start the program under a session; nothing is recorded yet. From another terminal start and stop as often as you like:

```bash
nsys launch --session-new=lesson --trace=cuda,nvtx python programs/case_2.py --steps 5000
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
**Exercise 4.2.** Which fits, `"profile"` or `"launch"`?
"""

# %%
way = {"a script in CI": ..., "it became slow after an hour": ...}

# %%
check("4.2", way)

# %% [markdown]
"""
## 4.3 NVTX: make the timeline speak your words

A timeline of thousands of kernels named `vectorized_elementwise_kernel` says little. **NVTX** ranges name stretches of your code. One range cost 0.36 µs<!-- = first_look()["nvtx_range_us"] --> on the host of our H200
while no profiler was attached, so they may stay in. Five ways:

| way | with PyTorch | with the package `nvtx` (`pip install nvtx`) |
| --- | --- | --- |
| decorator | `@nvtx_range("augment")` (dpscope) | `@nvtx.annotate("augment", color="blue")` |
| context | `with nvtx_range("forward"):` (dpscope), `torch.cuda.nvtx.range` | `with nvtx.annotate("forward"):` |
| push and pop | `torch.cuda.nvtx.range_push("x")`, `range_pop()` | `nvtx.push_range("x")`, `nvtx.pop_range()` |
| start and end | `h = torch.cuda.nvtx.range_start("x")`, `range_end(h)` | `h = nvtx.start_range("x")`, `nvtx.end_range(h)` |
| automatic | `torch.autograd.profiler.emit_nvtx()`; `dpscope nsys --autograd` | `nvtx.Profile()`; `python -m nvtx script.py` for every function |

Push and pop nest and belong to one thread. Start and end may overlap and end on another thread. On builds of PyTorch without CUDA `torch.cuda.nvtx` raises; dpscope's `nvtx_range` then does nothing, so that the
same code runs everywhere. `programs/annotated.py` uses them all. This is its timeline on the H200:

```bash
nsys profile --trace=cuda,nvtx --sample=none --cpuctxsw=none --capture-range=cudaProfilerApi \
    --capture-range-end=stop --force-overwrite=true --output=annotated python programs/annotated.py
```
"""

# %%
from dpscope.instruments.nsys import views
from dpscope.reports.trace.figures import draw_capture

annotated = recorded.timeline("annotated")
pictures.show(
    draw_capture(views.lanes(annotated)) if annotated else None,
    "annotated.py on an H200: NVTX ranges on top, CUDA calls of the host below them, then the GPU's stream.",
    "H200 上的 annotated.py：最上面是 NVTX 区间，下面是主机的 CUDA 调用，再下面是 GPU 的流。",
)
if annotated:
    print("ranges:", ", ".join(sorted({r.name for r in annotated.ranges})))

# %% [markdown]
"""
**Autograd ranges.** With `emit_nvtx` every operator is a range, forward and backward, and the backward ones carry the sequence number of the forward operator they belong to. That is the way from a backward
kernel to the line that caused it. It makes many ranges and a slower host: for looking, not for timing. Newer versions of nsys do the same without touching the code:

```bash
nsys profile --trace=cuda,nvtx --pytorch=autograd-nvtx --sample=none \
    --capture-range=cudaProfilerApi --capture-range-end=stop --force-overwrite=true \
    --output=autograd \
    python programs/case_7.py --steps 1
```
"""

# %%
from collections import Counter

autograd = recorded.timeline("autograd")
if autograd:
    names = Counter(r.name.split(",")[0] for r in autograd.ranges)
    print(f"{len(autograd.ranges)} ranges in one step of case 7 on the H200; the most frequent:")
    for name, count in names.most_common(6):
        print(f"  {count:4} × {name[:90]}")
else:
    print(recorded.NOT_RECORDED)

# %% [markdown]
"""
**Exercise 4.3.** Annotate a step: a range `step` around `forward`, `backward` and `optimizer`. `annotate` is given to you; it works like `nvtx_range` (`with annotate("step"): …`). With these names,
`dpscope nsys --read` gives you a table by phase for your own loop.
"""


# %%
def annotated_step(annotate): ...


# %%
check("4.3", annotated_step)

# %% [markdown]
"""
## 4.4 From a report to a database

```bash
nsys export --type=sqlite --force-overwrite=true --output=case_4.sqlite case_4.nsys-rep
nsys stats --report cuda_gpu_kern_sum,cuda_gpu_mem_size_sum,cuda_api_sum,nvtx_gpu_proj_sum \
    --force-export=true case_4.nsys-rep
dpscope nsys --read case_4.sqlite
```

`nsys stats` prints ready-made tables. The SQLite file has a table for each kind of event (`CUPTI_ACTIVITY_KIND_KERNEL`, `…_MEMCPY`, `…_RUNTIME`, `NVTX_EVENTS`; names are numbers into `StringIds`; times in
nanoseconds), and `correlationId` joins a launch to its kernel. dpscope reads it on any machine. `dpscope nsys --read` of the recorded case 4:
"""

# %%
print(recorded.output("nsys-read", last=24))

# %% [markdown]
"""
**Exercise 4.4.** Write the SQL that gives each kernel's short name and its total nanoseconds, longest first. `CUPTI_ACTIVITY_KIND_KERNEL` has `start`, `end` and `shortName`, a number into
`StringIds(id, value)`.
"""

# %%
query = ...

# %%
check("4.4", query)

# %% [markdown]
"""
## 4.5 The window, and five views of a timeline

`nsys-ui NAME.nsys-rep` opens the timeline. Rows are threads and streams, time runs to the right, everything shares one clock:
"""

# %%
timeline = recorded.timeline("case_4")
pictures.show(
    windows.draw_nsys_window(timeline, "case_4.nsys-rep") if timeline else None,
    "Nsight Systems' timeline, drawn (not a screenshot) from the recorded case 4. 1: the clock; 2: NVTX ranges; 3: CUDA calls of the host, waits in red; 4: the GPU's stream.",
    "Nsight Systems 的时间线，根据录下的 case 4 绘制（不是截图）。1：时间轴；2：NVTX 区间；3：主机的 CUDA 调用，红色为等待；4：GPU 的流。",
)

# %% [markdown]
"""
In the window: **Ctrl** with the mouse wheel zooms; a drag selects a stretch, **Shift+Z** zooms into it; a right click on a row offers *Show in Events View*, a table you can sort; a click on a CUDA call highlights its kernel.
The five views below are the same as data.

**View 1: the GPU's timeline.** Look for holes in the stream lanes; copies beside kernels or instead of them; streams that never overlap.
"""

# %%
views.gpu_timeline(timeline).head(4)

# %% [markdown]
"""
The GPU is busy for 49 %<!-- = busy_percent("case_4") --> of the recording: after each layer there is a hole, because the host waits for a mean and only then launches the next layer.

**View 2: host and GPU.** Who waits for whom? Time in `…Synchronize` is the host waiting for the GPU; that is harmless at the end of a step and costly within it. Gaps whose next kernel had not been launched are the
GPU waiting for the host.
"""

# %%
views.host_and_gpu(timeline).head(6)

# %% [markdown]
"""
**View 3: from the whole to a launch.** How busy the GPU was; how many kernels are shorter than a launch costs; how long a launch takes; how long it lies in the queue. A long time from launch to start is *good*: the
host is ahead.
"""

# %%
for what, value in views.levels(timeline).items():
    print(f"{what:50} {value:10.2f}")

# %% [markdown]
"""
**View 4: the link and the machine.** What crossed between host and device, from which kind of memory, how fast:
"""

# %%
for name in ("case_3", "case_3_c"):
    if seen := recorded.timeline(name):
        print(name, views.link(seen).to_string(index=False), sep="\n")
        pictures.show(
            draw_capture(views.lanes(seen)),
            f"Timeline of {name} on an H200: copies in yellow."
            if name == "case_3"
            else f"Timeline of {name}: copies on a stream of their own.",
            f"H200 上 {name} 的时间线：黄色为拷贝。" if name == "case_3" else f"{name} 的时间线：拷贝在单独的流上。",
        )

# %% [markdown]
"""
From pageable memory (case 3, way a) copies and kernels take turns on one stream, and the copies crawl: 10.0 GB/s<!-- = copies_gb_per_second("case_3") -->. Prefetched (way c), they come from pinned memory at
55.4 GB/s<!-- = copies_gb_per_second("case_3_c") -->, have a stream of their own and lie beside the kernels. In the second picture the host has ordered all five steps long before the GPU has done the second: that is
what "the host is ahead" looks like.

**Temperature, power, PCIe.** They come from the driver:

```bash
nvidia-smi --query-gpu=name,temperature.gpu,power.draw,power.limit,clocks.sm,pcie.link.gen.current,pcie.link.width.current --format=csv
```
"""

# %%
print(recorded.output("nvidia-smi-query"))
log = recorded.card_over_time()
pictures.show(
    pictures.draw_card(log) if log else None,
    "Power, temperature and SM clock of the H200 by nvidia-smi, four readings a second: idle, then bf16 products for four seconds, then copies over PCIe.",
    "nvidia-smi 读出的 H200 功率、温度和 SM 时钟，每秒四次：先空闲，再做四秒 bf16 矩阵乘，然后经 PCIe 拷贝。",
)

# %% [markdown]
"""
Products take the card from 121 W<!-- = coolest("power.draw") --> to 694 W<!-- = hottest("power.draw") -->, where its limit is 700 W<!-- given: the line above -->, and to
62 °C<!-- = hottest("temperature.gpu") -->. Meanwhile `clocks.sm` falls from 1,980 MHz<!-- = hottest("clocks") --> to 1,290 MHz<!-- = coolest("clocks") -->: the card lowers its clock to stay within its power<!-- holds: hottest("power.draw") > 650 and coolest("clocks") < 0.8 * hottest("clocks") -->. That is normal for
dense products, and a reason to compare two programs in one run: a "slower" program may only have met a hotter card. The PCIe link is
generation 5<!-- = hottest("pcie.link.gen.current") -->, 16 lanes<!-- = hottest("pcie.link.width.current") --> wide; an idle card may report a lower generation to save power.

`utilization.gpu` of nvidia-smi is a famous trap: it is the share of time in which *some* kernel ran. One thread on one SM makes it 100 %<!-- given -->. `--gpu-metrics-devices=all` puts the load of the units on the timeline,
with permission.

**Context switches.** If the operating system takes the thread that launches off its core, the GPU runs dry. `--cpuctxsw=process-tree` records every switch; here for 20 steps of case 4:

```bash
nsys profile --trace=cuda,nvtx --sample=none --cpuctxsw=process-tree \
    --capture-range=cudaProfilerApi --capture-range-end=stop --force-overwrite=true \
    --output=switches \
    python programs/case_4.py --steps 20
python programs/context_switches.py switches.db
```
"""

# %%
print(recorded.output("nsys-switches", last=8))

# %% [markdown]
"""
Some switches are normal (threads that wait for work). Many for the launching thread means too many processes for the cores: fewer data-loader workers, or `taskset`.

**View 5: libraries.** Whose kernels are they? cuBLAS and cuDNN you can only choose (formats, shapes, versions); PyTorch's elementwise kernels you can fuse; your own you can rewrite.
"""

# %%
views.libraries(timeline).head(8)

# %% [markdown]
"""
**Exercise 4.5.** Write a function that returns the length of the longest gap of the GPU and the kernel that ended it. `table` is like `views.gpu_timeline(timeline)`: columns `start_ms`, `ms`, `what`, in order of start; kernels may overlap.
"""


# %%
def longest_gap(table): ...


# %%
if passed("4.5", longest_gap) and timeline:
    print("in case 4:", longest_gap(views.gpu_timeline(timeline)))

# %% [markdown]
"""
## 4.6 A private step on the timeline

Phases of a step as dpscope's NVTX ranges, 1.17 billion parameters, batch 8, sequence 1024, bf16, on the H200 (2026-11-15). A kernel belongs to the phase in which it was *launched*, on whatever thread:
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
For flat clipping nsys says the GPU is busy for 236.2 ms<!-- = captured("traces", "flat")["gpu"]["busy_ms"] --> a step, torch.profiler 235.8 ms<!-- = traced("traces", "flat")["gpu"]["busy_ms"] -->. Both read the same source, NVIDIA's CUPTI, so
their agreement shows that dpscope reads both rightly, and is no independent proof of the figure.

## 4.7 Six cautions, and one more

1. **When.** A fixed `--delay` misses the steps you mean, or catches the warm-up. Let the program say when (`cudaProfilerApi`).
2. **How long.** Seconds, not minutes. A whole program made 1.2 GB<!-- given: measured with nsys 2025.3.1, docs/nsys.md's facts --> where one step is below 0.1 MB<!-- given: the same -->. Large reports open slowly, or not at all on a small machine.
3. **Where to.** nsys writes to the current folder and keeps temporary files in `TMPDIR`: both need room and permission.
4. **Whose.** On shared storage put the host's name (`%h`) into the output's name, or machines overwrite each other.
5. **Schedulers** that kill all workers when one ends cut off the others' reports: record by hand (4.2).
6. **Permission.** Sampling the host needs `/proc/sys/kernel/perf_event_paranoid` of 2 or less; GPU metrics need access to counters. Without them, leave both off: CUDA and NVTX need neither.

And: **a report holds your environment**, every token that is exported in your shell, and that of other processes too. Start nsys with a short environment (`env -i …`; `dpscope nsys` does), and share a stripped export
(`python -m dpscope.instruments.nsys.stripping`), not the report.

Some installations leave a raw `.qdstrm`; the `QdstrmImporter` beside nsys makes a report of it. dpscope does that for you.

**Exercise 4.6.** Which file may you attach to a public issue? `True` or `False`.
"""

# %%
may_share = {"report.nsys-rep": ..., "stripped.sqlite": ...}

# %%
check("4.6", may_share)

# %% [markdown]
"""
## Quiz

**1. The stream lane is full, and a step is still slow. Is nsys of further use?**

<details><summary>Answer</summary>

It says which kernels fill it (view 5). Why a kernel is slow is a question for Nsight Compute.

</details>

**2. `cudaStreamSynchronize` takes 90 %<!-- given --> of the host's time. Bad?**

<details><summary>Answer</summary>

It depends on where. At the end of a step it means that the host is fast and waits for a busy GPU: good. In the middle, with gaps in the stream lane after it, it is a hidden synchronisation.

</details>

**3. Your range `backward` contains no kernels, though the backward pass clearly runs. Why?**

<details><summary>Answer</summary>

Autograd launches them from its own thread, where your push is not seen. The thread that called `backward()` waits meanwhile, so count launches of *all* threads within the range's time, as dpscope does, or use `emit_nvtx`.

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

**Further**: [NVIDIA's user guide](https://docs.nvidia.com/nsight-systems/UserGuide/), [nsys in dpscope](../docs/nsys.md). Next: [What privacy costs](05-what-privacy-costs.ipynb).
"""
