# %% [markdown]
"""
# 3. Nsight Compute

*Last verified: 2026-11-15 with ncu 2025.3.1 on an NVIDIA H200.*

PyTorch Profiler says *which* kernel is slow. Nsight Compute (`ncu`) says *why*: how many bytes it moved, which unit was at its limit,
what its warps were waiting for. It reads the GPU's own counters, one kernel at a time.

**After it you can**

- run `ncu` on a Python program so that it looks at the right kernel and ends in seconds;
- ask for the metrics you need by their names of today, also when a paper gives nvprof's;
- read a report section by section, and say what bounds the kernel and what would help;
- count the bytes of a whole training step, private or not, and compare two methods by them.

The commands below were run on an H200 by `programs/run_on_gpu.sh`, and what they printed is shown from its record. Reading a report
needs no GPU.
"""

# %%
import sys
from pathlib import Path

TUTORIALS = next(p for p in [Path.cwd(), *Path.cwd().parents, Path.cwd() / "tutorials"] if (p / "programs").is_dir())
sys.path.insert(0, str(TUTORIALS / "programs"))

import pictures
import recorded

print(recorded.output("ncu-version", last=3))

# %% [markdown]
"""
## 3.1 What it does to your program

`ncu` starts your program with a library in it that sees every kernel launch. Before a launch it wants to measure, it waits for the
GPU, sets up counters, runs the kernel, and reads them. There are more counters than can be read at once, so the kernel is **replayed**:
its memory is saved, and it runs again for each *pass*.

So everything is slower, kernels run alone, and **times under ncu are not times of your program**. Use it on few kernels, and take
from it bytes, ratios and reasons.

You need permission for counters. On rented machines it is often missing (`ERR_NVGPUCTRPERM`); `dpscope doctor` tells, and says how to
mend it:

```bash
dpscope doctor
```
"""

# %% [markdown]
"""
## 3.2 The first command

```bash
ncu --profile-from-start off --set basic --launch-count 1 python programs/memory_bound.py --steps 1
```

Read it from the end. `python programs/memory_bound.py --steps 1` is the program, as you would start it. `--launch-count 1`: one kernel
is enough. `--set basic`: which sections to collect. `--profile-from-start off`: nothing until the program calls
`torch.cuda.profiler.start()`, which `memory_bound.py` does after its warm-up; without it you measure the initialisation of tensors. What
it prints:
"""

# %%
print(recorded.output("ncu-basic", last=40))

# %% [markdown]
"""
## 3.3 Sets

A **section** is a page of the report with its metrics; a **set** is a bundle of sections.

```bash
ncu --list-sets
```
"""

# %%
print(recorded.output("ncu-sets"))

# %% [markdown]
"""
| set | use it for | cost |
| --- | --- | --- |
| `basic` (what older guides call `default`) | a first look: speed of light, launch, occupancy | few passes |
| `detailed` | + memory and compute workload | more |
| `full` | everything but the source view's extras: warp states, memory tables, roofline | dozens of passes |
| `roofline` | roofline charts | few |
| none, but `--metrics a,b` | exactly the counters you name | often one pass |

Start with `basic`; use `full` on *one launch* of *one kernel*.
"""

# %% [markdown]
"""
## 3.4 Metrics, and their names

A metric's name has parts: `dram__bytes_read.sum.per_second` is the unit (`dram`), the quantity (`bytes_read`), how instances are combined
(`.sum`, `.avg`, `.max`) and what is made of it (nothing, `.per_second`, `.pct_of_peak_sustained_elapsed`). Ask which there are; with
`--chips` no GPU is needed:

```bash
ncu --query-metrics --chips gh100 | grep -E "^dram__(bytes|throughput)"
ncu --profile-from-start off --metrics \
    dram__bytes_read.sum,dram__bytes_write.sum,gpu__time_duration.sum \
    python programs/memory_bound.py --steps 1
```
"""

# %%
print(recorded.output("ncu-names", last=12))
print(recorded.output("ncu-metrics", last=40))

# %% [markdown]
"""
Useful ones on Hopper:

| question | metric |
| --- | --- |
| bytes from and to DRAM | `dram__bytes_read.sum`, `dram__bytes_write.sum` |
| how long the kernel ran | `gpu__time_duration.sum` |
| how busy SMs were | `sm__cycles_active.avg.pct_of_peak_sustained_elapsed` |
| warps on an SM | `sm__warps_active.avg.pct_of_peak_sustained_active` |
| loads and stores of the load/store unit | `l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum`, `…_op_st.sum` |
| float32 additions | `smsp__sass_thread_inst_executed_op_fadd_pred_on.sum` |
| tensor-core operations in bfloat16 | `sm__ops_path_tensor_src_bf16_dst_fp32.sum` |

**Old names.** Papers and scripts still give nvprof's. `ncu` refuses them:

```bash
ncu --profile-from-start off --metrics dram_read_throughput \
    python programs/memory_bound.py --steps 1
```
"""

# %%
print(recorded.output("ncu-old-name", last=6))

# %% [markdown]
"""
| nvprof | today |
| --- | --- |
| `dram_read_throughput`, `dram_write_throughput` | `dram__bytes_read.sum`, `dram__bytes_write.sum` (`.per_second` for one kernel) |
| `l2_read_throughput`, `l2_write_throughput` | 32 bytes × `lts__t_sectors_op_read.sum` (`_write`), plus atomics and reductions |
| `gld_throughput`, `gst_throughput` | `l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum`, `…_op_st.sum` |
| `achieved_occupancy` | `sm__warps_active.avg.pct_of_peak_sustained_active` |

On Hopper the last but one is a trap: matrix kernels fetch through the copy engine (TMA), which passes the load/store unit by, so
`gld` shows almost nothing of a matrix product. dpscope takes old names (`dpscope ncu --metrics dram_read_throughput`) and counts TMA as
well.
"""

# %%
from dpscope.instruments.ncu.metrics import METRIC_ALIASES

for old, new in METRIC_ALIASES.items():
    if old.endswith("throughput"):
        print(f"{old:24} {', '.join(new)}")

# %% [markdown]
"""
## 3.5 Filters: look at less

A training step launches thousands of kernels. Four filters, alone or together:

| filter | example |
| --- | --- |
| a stretch of the program | `--profile-from-start off` and `torch.cuda.profiler.start()` … `stop()` |
| by kernel name | `--kernel-name regex:elementwise` |
| by count | `--launch-skip 10 --launch-count 2` (counted among those that match) |
| by NVTX range | `--nvtx --nvtx-include "step/"` |

```bash
ncu --profile-from-start off --kernel-name regex:elementwise --launch-skip 10 --launch-count 2 \
    --metrics gpu__time_duration.sum \
    python programs/launch_bound.py --steps 1
ncu --nvtx --nvtx-include "step/" --nvtx-push-pop-scope process --launch-count 3 --metrics \
    gpu__time_duration.sum \
    python programs/hidden_sync.py --steps 1
```

How to find a kernel's name? Run once without a filter and `--set basic`, or read it from a trace (tutorial 2). The backward pass is
launched from autograd's own threads, which have no NVTX ranges of yours: `--nvtx-push-pop-scope process` makes a range count for all
threads. A kernel that matches several times gives one result *per launch*; ncu does not average.
"""

# %%
print(recorded.output("ncu-name-filter", first=0, last=24))

# %% [markdown]
"""
## 3.6 Replay modes

| mode | what is repeated | with PyTorch |
| --- | --- | --- |
| `kernel` (default) | each kernel, with its memory restored | works; slow for thousands |
| `application` | the whole program, once a pass | needs the same launches in the same order |
| `range` | a range, by recording API calls | fails with PyTorch |
| `app-range` | the whole program; counters over a whole range | works: **one row for a whole step** |

```bash
ncu --replay-mode app-range --metrics dram__bytes_read.sum,dram__bytes_write.sum \
    python programs/hidden_sync.py --steps 1
```

The last one answers "how many bytes does a step move?", and is what `dpscope ncu` uses.
"""

# %%
print(recorded.output("ncu-app-range", last=20))

# %% [markdown]
"""
## 3.7 Output

| you want | command |
| --- | --- |
| a report for the window (`ncu-ui`) | `-o NAME` writes `NAME.ncu-rep`; `-f` overwrites |
| text of a report | `ncu --import NAME.ncu-rep --page details` |
| numbers of a report | `ncu --import NAME.ncu-rep --page raw --csv --print-units base` |
| CSV straight away | `--csv --log-file NAME.csv`, **without** `-o` |

`--csv -o report.csv`, which older guides print, makes a binary report called `report.csv.ncu-rep`. In raw CSV the first line holds names,
the second units, and numbers have thousands separators. On the Details page each value picks its own unit (`us` here, `ms` there): read them. `--import-sass no` keeps reports small.

```bash
ncu --profile-from-start off --csv --log-file live.csv --metrics gpu__time_duration.sum \
    --launch-count 2 \
    python programs/memory_bound.py --steps 1
ncu --import memory_bound.ncu-rep --page details
```

For Python programs: put `python` and the script last; child processes are followed (`--target-processes all`); warm up before
`profiler.start()`, or you measure Triton's compiler and cuDNN's search.
"""

# %% [markdown]
"""
## 3.8 A report, section by section

Four kernels were profiled with `--set full`: an addition (memory-bound), a product in float32 and one in bfloat16 (compute-bound), and
dpscope's own kernel for the norms of per-sample gradients, `_gram_kernel`:

```bash
ncu --profile-from-start off --set full --import-sass no --launch-skip 1 --launch-count 1 -f -o \
    memory_bound \
    python programs/memory_bound.py --steps 1
ncu --profile-from-start off --set full --import-sass no --launch-count 1 -f -o compute_bound \
    python programs/compute_bound.py --steps 1 --size 4096
ncu --profile-from-start off --set full --import-sass no --launch-count 1 -f -o tensor_cores \
    python programs/compute_bound.py --way bfloat16 --steps 1 --size 4096
ncu --profile-from-start off --set full --import-sass no --kernel-name regex:_gram_kernel \
    --launch-count 1 -f -o gram \
    python programs/per_sample_norms.py --way gram --steps 1
```

**Summary.** In the window, the first page lists every profiled launch with its duration, throughputs and an estimated speed-up. Sort by
duration; begin with the top. Here is the same from the recorded CSV:
"""

# %%
REPORTS = ("memory_bound", "compute_bound", "tensor_cores", "gram")
for name in REPORTS:
    if kernel := recorded.details(name):
        print(f"{name:14} grid {kernel.grid:18} block {kernel.block:15} {kernel.kernel[:70]}")
    else:
        print(f"{name:14} {recorded.NOT_RECORDED}")

# %% [markdown]
"""
### Speed of light

*How near is the kernel to what the hardware can do?* Two numbers first: **Compute (SM) Throughput** and **Memory Throughput**, in percent
of the peak. Memory high, compute low: memory-bound. The reverse: compute-bound. Both above 80 %<!-- given: NVIDIA's guidance -->:
well balanced, hard to improve. Both below 60 %<!-- given: NVIDIA's guidance -->: latency; go to *Warp State*.

*Memory Throughput* is the largest of DRAM, L2 and L1 (shared memory counts there), so look at which: `DRAM Throughput` tells whether bytes
really come from memory.
"""

# %%
SOL = (
    "Duration",
    "Compute (SM) Throughput",
    "Memory Throughput",
    "DRAM Throughput",
    "L2 Cache Throughput",
    "L1/TEX Cache Throughput",
)
pictures.tell_section("GPU Speed Of Light Throughput", *REPORTS, metrics=SOL)

# %% [markdown]
"""
### Roofline

The same question as a picture (tutorial 1.9): operations for each byte of DRAM to the right, operations a second upwards. Under the slope a
kernel is memory-bound, under the flat roof compute-bound; how far below tells what is to be had. The roofs are those that dpscope *measured* on this
H200, not those of a data sheet; the points are the four kernels. They lie a little below their roofs because ncu holds the clock at its base, so that two runs can be compared
(*SM Frequency* says 1.48 GHz<!-- = details("memory_bound").number("SM Frequency") -->); the roofs were measured with the clocks free. `--clock-control none` leaves them alone, and
is what dpscope passes.
"""

# %%
points = {name: point for name in REPORTS if (point := recorded.kernel_on_roofline(name))}
if points:
    pictures.show(
        pictures.draw_kernels_on_roofline(points, recorded.ceilings()), "four kernels under the roofs of an H200"
    )
else:
    print(recorded.NOT_RECORDED)

# %% [markdown]
"""
### Memory workload analysis

*Where do bytes come from, and is the way well used?* The chart in the window shows every level with the traffic on each arrow. In numbers:

- **Mem Busy**: how busy caches and DRAM are inside. **Max Bandwidth**: how full the connections between them are. **Mem Pipes Busy**: how
  busy the pipes that issue memory instructions are.
- **L1/TEX Hit Rate**, **L2 Hit Rate**: of sectors (32 bytes) looked up, how many were there. A line has four sectors; asking for one of
  them is a partial use.
- Below, tables of loads and stores: *sectors per request* well above what the data type needs means scattered addresses.

A streaming addition hits nothing and does not have to; a product lives from hits. ncu's advice is left out here: to all four it recommends the compression of L2,
which is no matter for any of them. Its rules know the counters, not your program.
"""

# %%
pictures.tell_section(
    "Memory Workload Analysis",
    *REPORTS,
    metrics=("Memory Throughput", "Mem Busy", "Max Bandwidth", "L1/TEX Hit Rate", "L2 Hit Rate", "Mem Pipes Busy"),
    advice=False,
)

# %% [markdown]
"""
### Compute workload analysis

*Which pipe does the work?* **IPC** is instructions per cycle: *executed* per elapsed cycle, and *issued* per active cycle. **SM Busy** is the
busiest pipe. The pipes: **FMA** (float32 multiply and add), **ALU** (integers, logic, comparisons), **Tensor** (matrix instructions),
**LSU** (loads and stores), **TMA** (bulk copies of tiles), **XU** (exp, sin, conversions), **FP64**, **Uniform**, **CBU/ADU** (branches,
barriers), **TEX**.

A product whose tensor pipe is idle runs in the wrong number format: compare `compute_bound` (float32, FMA pipe) with `tensor_cores`. Low IPC is
no fault there: one tensor instruction does the work of thousands of others.
"""

# %%
pictures.tell_section("Compute Workload Analysis", *REPORTS)

# %% [markdown]
"""
### Warp states

*What were warps waiting for?* Between two instructions a warp spends cycles in **stalls**. The main ones:

| stall | waits for | what helps |
| --- | --- | --- |
| long scoreboard | global memory, L2 | better locality, more warps, more loads in flight |
| short scoreboard | shared memory, special functions | fewer bank conflicts |
| MIO / LG throttle | too many memory instructions queued | wider loads |
| barrier | other warps of the block | less synchronisation, balanced work |
| math pipe throttle | a busy arithmetic pipe | good news: it is compute-bound |
| wait, not selected | nothing serious: fixed latency; another warp was chosen | |

Stalls matter only if the scheduler finds *no* warp to issue (*No Eligible* in Scheduler Statistics). Many *not selected* means more than
enough warps.
"""

# %%
pictures.tell_section("Warp State Statistics", *REPORTS)
pictures.tell_section("Scheduler Statistics", *REPORTS)

# %% [markdown]
"""
### Occupancy

*How many warps could an SM hold, and how many did it?* **Theoretical** occupancy is limited by registers, shared memory and the size of
blocks (the *Block Limit* lines say which is the smallest); **achieved** is what was measured. Far below theoretical: uneven work, or a grid too
small to fill the GPU. High occupancy is no aim in itself: matrix kernels hold large tiles and run well with few warps.
"""

# %%
pictures.tell_section("Occupancy", *REPORTS)
pictures.tell_section(
    "Launch Statistics",
    *REPORTS,
    metrics=("Grid Size", "Block Size", "Registers Per Thread", "Dynamic Shared Memory Per Block", "Waves Per SM"),
)

# %% [markdown]
"""
**The verdict on four kernels**, from what you have read:

- `memory_bound` uses 90.8 %<!-- = details("memory_bound").number("DRAM Throughput") --> of DRAM and
  7.5 %<!-- = details("memory_bound").number("Compute (SM) Throughput") --> of compute; its warps wait
  213 cycles<!-- = details("memory_bound").number("Warp Cycles Per Issued Instruction") --> between two instructions, nearly all for memory. Nothing but fewer
  bytes helps, and all the advice about occupancy is beside the point.
- `compute_bound` uses 88.2 %<!-- = details("compute_bound").number("Compute (SM) Throughput") --> of compute and
  2.4 %<!-- = details("compute_bound").number("DRAM Throughput") --> of DRAM, at an occupancy of
  12.5 %<!-- = details("compute_bound").number("Achieved Occupancy") -->: low occupancy, full speed. Another number format moves it to another roof.
- `tensor_cores` is on that roof: 90.9 %<!-- = details("tensor_cores").number("Compute (SM) Throughput") -->.
- `gram` works on tensor cores at 54.5 %<!-- = details("gram").number("Compute (SM) Throughput") --> and hardly touches DRAM,
  14.5 %<!-- = details("gram").number("DRAM Throughput") -->. Its grid of 288 blocks is
  2.2 waves<!-- = details("gram").number("Waves Per SM") --> for 132 SMs, so in the last one most SMs are idle: one layer alone is too small for it. That is
  why flash clipping puts the layers of a model into one launch.

And a warning from our own program: for this one layer, forming the gradients
(0.13 ms<!-- = program("per_sample_norms", "gradients")["median_ms"] -->) is *faster* than the Gram kernel
(0.42 ms<!-- = program("per_sample_norms", "gram")["median_ms"] -->, of which the kernel itself is
0.10 ms<!-- = details("gram").number("Duration") / 1e3 --> and the rest is launching). What it saves is memory and bytes, and what counts is the whole step (3.9).
A kernel's report answers a kernel's question.
"""

# %% [markdown]
"""
## 3.9 A whole step, private and not

For DP-SGD the question is not one kernel but the bytes of a step. `dpscope ncu` counts them in app-range mode, and takes the time from a
run without ncu:

```bash
dpscope ncu --model 1b --dtype bf16 --batch-size 8,16 --seq-len 256,1024 --out traffic
dpscope ncu --methods standard,flat --print-command
```

At batch 8 and sequence 256 flat clipping moves
320 GB<!-- = dram_gb("traffic", "flat", 8, 256) --> where ordinary training moves
80 GB<!-- = dram_gb("traffic", "standard", 8, 256) -->:
3.99×<!-- = dram_times("traffic", "flat", 8, 256) -->. It writes a gradient for every sample and reads it back twice, for the norm and
for the sum. Ghost clipping moves 2.26×<!-- = dram_times("traffic", "ghost", 8, 256) -->, flash clipping
0.97×<!-- = dram_times("traffic", "flash", 8, 256) -->.
"""

# %%
from dpscope.reports.traffic.figures import draw_roofline, draw_traffic_bytes

rows = recorded.sweep("traffic").rows
pictures.show(draw_traffic_bytes(rows), "DRAM bytes of a step by method and size on an H200")
pictures.show(draw_roofline(rows), "steps of four methods under the roofline of an H200")

# %% [markdown]
"""
**What is not a proof**: a higher `dram_read_throughput`. Twice the bytes in twice the time is the same throughput. Compare *bytes*, at the same
model, batch, sequence, number format and optimizer. [The guide](../docs/ncu-guide.md) says how to compare two reports in the window.

## Exercises

1. From the counters of `memory_bound`: how many bytes should `t + b` move for 2²⁸ numbers, and how far is ncu's count from it?
2. Which of the methods moves the fewest bytes *per token* at each size of the recorded sweep?
3. Write the command that counts only DRAM bytes of the first three GEMM kernels of the backward pass of `hidden_sync.py`.
"""

# %%
# Solution 1: t and b are read, y is written, 4 bytes each
expected = {"read": 2 * 4 * 2**28, "written": 4 * 2**28}
if seen := recorded.counters("memory_bound"):
    for name, metric in (("read", "dram__bytes_read.sum"), ("written", "dram__bytes_write.sum")):
        counted = seen.metrics.get(metric, float("nan"))
        print(
            f"{name}: expected {expected[name] / 1e9:.3f} GB, counted {counted / 1e9:.3f} GB ({counted / expected[name] - 1:+.2%})"
        )
else:
    print(expected, recorded.NOT_RECORDED)

# %%
# Solution 2
for batch, seq in ((8, 256), (8, 1024), (16, 256), (16, 1024)):
    per_token = {
        m: recorded.dram_gb("traffic", m, batch, seq) * 1e3 / batch / seq
        for m in ("standard", "flat", "ghost", "flash")
    }
    best = min(per_token, key=per_token.get)
    print(f"{batch:2} × {seq:4}: " + ", ".join(f"{m} {mb:.1f} MB" for m, mb in per_token.items()) + f": least {best}")

# %% [markdown]
"""
Solution 3: `ncu --nvtx --nvtx-include "step/" --nvtx-push-pop-scope process --kernel-name regex:gemm --launch-count 3 --metrics
dram__bytes_read.sum,dram__bytes_write.sum python programs/hidden_sync.py --steps 1`; add `--launch-skip` for the kernels of the forward
pass, one for each layer. (On Hopper cuBLAS names many kernels `nvjet…`: look first.)

## Quiz

**1. Under ncu a step takes seven times as long. Is the bandwidth that ncu shows for the range wrong?**

<details><summary>Answer</summary>

The bytes are right, the time is the profiler's. Divide the bytes by the time of an unprofiled run; do not use `.per_second` of a range.

</details>

**2. Memory Throughput 90 %<!-- given -->, DRAM Throughput 20 %<!-- given -->. What is the kernel bound by?**

<details><summary>Answer</summary>

By a cache or by shared memory: Memory Throughput is the largest over all levels. Look at L1 and L2; bank conflicts and scattered sectors are
the usual reasons.

</details>

**3. `gld` counts nearly nothing for a matrix product on an H200. A miracle?**

<details><summary>Answer</summary>

No: its tiles come through TMA, which the load/store unit's counters do not see. Count at the crossbar (*L2 to SM* in `dpscope ncu`), or in DRAM.

</details>

**4. Occupancy fell from 60 %<!-- given --> to 25 %<!-- given --> after a change and the kernel became faster. How?**

<details><summary>Answer</summary>

Larger tiles: more registers and shared memory for each block, hence fewer warps, but each byte is used more often. Occupancy is a means.

</details>

## What to remember

- One kernel, one launch, after a warm-up: `--profile-from-start off --launch-count 1`.
- Speed of light first, then the section it points to. Both low: warp states.
- Bytes are facts; rates under a profiler are not.
- nvprof's names are gone; TMA is invisible to `gld`.
- For a whole step use app-range, or `dpscope ncu`.

**Further**: [NVIDIA's profiling guide](https://docs.nvidia.com/nsight-compute/ProfilingGuide/), [dpscope's guide to traffic](../docs/ncu-guide.md).
Next: [Nsight Systems](04-nsight-systems.ipynb).
"""
