# %% [markdown]
"""
# 3a. Nsight Compute: run it

*Last verified: 2026-11-16 with ncu 2025.3.1 on an NVIDIA H200.*

**Level:** practise. **Assumes:** [lesson 1](01-how-a-gpu-step-works.ipynb). **Time:** 15 minutes to read, about 30 more for the exercises.

PyTorch Profiler says *which* kernel is slow. Nsight Compute (`ncu`) says *why*: how many bytes it moved, which unit was at its limit, what its warps were waiting for. It reads the
GPU's own counters, one kernel at a time. This lesson is about running it well; [lesson 3b](03b-read-a-report.ipynb) reads what it wrote.

**After it you can**

- install `ncu` and `nsys`, and find out why counters are refused;
- run `ncu` on a Python program so that it looks at the right kernel and ends in seconds;
- ask for the metrics you need by their names of today, also when a paper gives nvprof's;
- count the bytes of a whole training step, private or not.

The commands below were run on an H200 by `programs/run_on_gpu.sh`, and what they printed is shown from its record. Solutions: [solutions/lesson_3.py](solutions/lesson_3.py).
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
from checks import check

print(recorded.output("ncu-version", last=3))

# %% [markdown]
"""
## 3.1 Install it, and what it does to your program

| where | Nsight Compute (`ncu`) | Nsight Systems (`nsys`) |
| --- | --- | --- |
| the CUDA toolkit | included: `/usr/local/cuda/bin/ncu` | included in most versions: `/usr/local/cuda/bin/nsys` |
| packages of NVIDIA's repository | `apt install nsight-compute-2025.3.1` | `apt install nsight-systems-cli` (without the window) |
| NVIDIA's site | [developer.nvidia.com/nsight-compute](https://developer.nvidia.com/nsight-compute) | [developer.nvidia.com/nsight-systems](https://developer.nvidia.com/nsight-systems) |
| your laptop, to open reports (no GPU needed) | the same download, with `ncu-ui`, for Linux, Windows and macOS | the same, with `nsys-ui` |

Container images of PyTorch often lack both: install the toolkit's packages in the image. `dpscope doctor` says what it finds, and what to type for what is missing:

```bash
dpscope doctor
```

You also need permission for counters. On rented machines it is often missing (`ERR_NVGPUCTRPERM`). If the machine is yours, load the driver with
`NVreg_RestrictProfilingToAdminUsers=0`, or run as root; a container needs `--cap-add=SYS_ADMIN`. If it is not, ask the provider, or use lesson 2 and 4, which need no counters.

**What it does.** `ncu` starts your program with a library in it that sees every kernel launch. Before a launch it wants to measure, it waits for the GPU, sets up counters, runs the
kernel, and reads them. There are more counters than can be read at once, so the kernel is **replayed**: its memory is saved, and it runs again for each *pass*. So everything
is slower, kernels run alone, and **times under ncu are not times of your program**. Use it on few kernels, and take from it bytes, ratios and reasons.

**Exercise 3.1.** Which of these may you quote from an ncu report as a property of your program? `True` or `False`.
"""

# %%
may_quote = {"bytes": ..., "step time": ..., "hit rate": ...}

# %%
check("3.1", may_quote)

# %% [markdown]
"""
## 3.2 The first command

```bash
ncu --profile-from-start off --set basic --launch-count 1 python programs/case_1.py --steps 1
```

Read it from the end. `python programs/case_1.py --steps 1` is the program, as you would start it. `--launch-count 1`: one kernel is enough. `--set basic`: which sections to collect.
`--profile-from-start off`: nothing until the program calls `torch.cuda.profiler.start()`, which the case does after its warm-up; without it you measure the initialisation of
tensors. What it prints:
"""

# %%
print(recorded.output("ncu-basic", last=40))

# %% [markdown]
"""
**Exercise 3.2.** Write the command that does the same for `programs/case_5.py`.
"""

# %%
command = ...

# %%
check("3.2", command)

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
| `basic` (older guides: `default`) | a first look: speed of light, launch, occupancy | few passes |
| `detailed` | + memory and compute workload, source counters | more |
| `full` | everything of the above, + warp states, memory tables, all rooflines | dozens of passes |
| `roofline` | roofline charts of every number format | nearly as many metrics as `full` |
| none, but `--metrics a,b` | exactly the counters you name | often one pass |

Start with `basic`; use `full` on *one launch* of *one kernel*. The column *Estimated Metrics* tells the cost: 213 for `basic`, 6649 for `roofline`, 7794 for `full`<!-- holds: all(n in output("ncu-sets") for n in ("213", "6649", "7794")) -->.

**Exercise 3.3.** Which sets contain the section with warp states, `WarpStateStats`? Give a list of names.
"""

# %%
sets_with_warp_states = ...

# %%
check("3.3", sets_with_warp_states)

# %% [markdown]
"""
## 3.4 Metrics, and their names

A metric's name has parts: `dram__bytes_read.sum.per_second` is the unit (`dram`), the quantity (`bytes_read`), how instances are combined (`.sum`, `.avg`, `.max`) and what is made
of it (nothing, `.per_second`, `.pct_of_peak_sustained_elapsed`). Ask which there are; with `--chips` no GPU is needed:

```bash
ncu --query-metrics --chips gh100 | grep -E "^dram__(bytes|throughput)"
ncu --profile-from-start off --metrics \
    dram__bytes_read.sum,dram__bytes_write.sum,gpu__time_duration.sum \
    python programs/case_1.py --steps 1
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

`smsp` is the SM's sub-partition of lesson 1.7: four to an SM, each with its own scheduler. A metric `smsp__….sum` adds up 528 of them on an H200.

**Old names.** Papers and scripts still give nvprof's. `ncu` refuses them:

```bash
ncu --profile-from-start off --metrics dram_read_throughput \
    python programs/case_1.py --steps 1
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

On Hopper `gld` is a trap: matrix kernels fetch through the copy engine (TMA), which bypasses the load/store unit, so `gld` shows almost nothing of a matrix product. dpscope takes old
names (`dpscope ncu --metrics dram_read_throughput`) and counts TMA as well.

**Exercise 3.4.** Take a metric's name apart: return unit, quantity, how it is combined, and what is made of it (an empty string if nothing).
"""


# %%
def parts(name): ...


# %%
check("3.4", parts)

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
    python programs/case_2.py --steps 1
ncu --nvtx --nvtx-include "step/" --nvtx-push-pop-scope process --launch-count 3 --metrics \
    gpu__time_duration.sum \
    python programs/case_7.py --steps 1
```

How to find a kernel's name? Run once without a filter and `--set basic`, or read it from a trace (lesson 2). The backward pass is launched from autograd's own threads, which have no NVTX
ranges of yours: `--nvtx-push-pop-scope process` makes a range count for all threads. A kernel that matches several times gives one result *per launch*; ncu does not average.
"""

# %%
print(recorded.output("ncu-name-filter", first=0, last=24))

# %% [markdown]
"""
**Exercise 3.5.** Which flags profile the 11th and 12th kernel with `gemm` in its name?
"""

# %%
flags = ...

# %%
check("3.5", flags)

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
    python programs/case_7.py --steps 1
```

The last one answers "how many bytes does a step move?", and is what `dpscope ncu` uses.
"""

# %%
print(recorded.output("ncu-app-range", last=20))

# %% [markdown]
"""
**Exercise 3.6.** Which mode answers which question?
"""

# %%
mode = {"why is this kernel slow": ..., "bytes of a whole step": ...}

# %%
check("3.6", mode)

# %% [markdown]
"""
## 3.7 Output

| you want | command |
| --- | --- |
| a report for the window (`ncu-ui`) | `-o NAME` writes `NAME.ncu-rep`; `-f` overwrites |
| text of a report | `ncu --import NAME.ncu-rep --page details` |
| numbers of a report | `ncu --import NAME.ncu-rep --page raw --csv --print-units base` |
| CSV straight away | `--csv --log-file NAME.csv`, **without** `-o` |
| the source view | compile with `-lineinfo`, add `--import-source yes`; then `--page source` (lesson 3b) |

`--csv -o report.csv`, which older guides print, makes a binary report called `report.csv.ncu-rep`. In raw CSV the first line holds names, the second units, and numbers have thousands
separators. On the Details page each value picks its own unit (`us` here, `ms` there): read them. `--import-sass no` keeps reports small.

```bash
ncu --profile-from-start off --csv --log-file live.csv --metrics gpu__time_duration.sum \
    --launch-count 2 \
    python programs/case_1.py --steps 1
ncu --import addition.ncu-rep --page details
```

For Python programs: put `python` and the script last; child processes are followed (`--target-processes all`, also under `torchrun`); warm up before `profiler.start()`, or you measure Triton's
compiler and cuDNN's search.

**Exercise 3.7.** Read raw CSV: return metric → number for the first kernel. Skip columns that are no numbers.
"""


# %%
def read_raw(text): ...


# %%
check("3.7", read_raw)

# %% [markdown]
"""
## 3.8 A whole step, private and not

For DP-SGD the question is not one kernel but the bytes of a step. `dpscope ncu` counts them in app-range mode, and takes the time from a run without ncu:

```bash
dpscope ncu --model 1b --dtype bf16 --batch-size 8,16 --seq-len 256,1024 --out traffic
dpscope ncu --methods standard,flat --print-command
```

At batch 8 and sequence 256 flat clipping moves 320 GB<!-- = dram_gb("traffic", "flat", 8, 256) --> where ordinary training moves 80 GB<!-- = dram_gb("traffic", "standard", 8, 256) -->:
3.99×<!-- = dram_times("traffic", "flat", 8, 256) -->. It writes a gradient for every sample and reads it back, for the norm and for the sum. Ghost clipping moves
2.26×<!-- = dram_times("traffic", "ghost", 8, 256) -->, flash clipping 0.97×<!-- = dram_times("traffic", "flash", 8, 256) --> (2026-11-15).
"""

# %%
from dpscope.reports.traffic.figures import draw_roofline, draw_traffic_bytes

rows = recorded.sweep("traffic").rows
pictures.show(
    draw_traffic_bytes(rows),
    "DRAM bytes of a step by method and size on an H200.",
    "H200 上各方法、各尺寸一步搬运的 DRAM 字节。",
)
pictures.show(
    draw_roofline(rows),
    "Steps of four methods under the roofline of an H200.",
    "四种方法的一步在 H200 屋顶线下的位置。",
)

# %% [markdown]
"""
**What is not a proof**: a higher `dram_read_throughput`. Twice the bytes in twice the time is the same throughput. Compare *bytes*, at the same model, batch, sequence, number format and
optimizer. [The guide](../docs/ncu-guide.md) says how to compare two reports in the window.

**Exercise 3.8.** How many times the bytes of ordinary training does a method move at batch 8 and sequence 256? `recorded.dram_gb("traffic", method, 8, 256)` has them.
"""


# %%
def bytes_ratio(method): ...


# %%
check("3.8", bytes_ratio)

# %% [markdown]
"""
## Quiz

**1. Under ncu a step takes seven times as long. Is the bandwidth that ncu shows for the range wrong?**

<details><summary>Answer</summary>

The bytes are right, the time is the profiler's. Divide the bytes by the time of an unprofiled run; do not use `.per_second` of a range.

</details>

**2. `gld` counts nearly nothing for a matrix product on an H200. A miracle?**

<details><summary>Answer</summary>

No: its tiles come through TMA, which the load/store unit's counters do not see. Count at the crossbar (*L2 to SM* in `dpscope ncu`), or in DRAM.

</details>

**3. `ncu` hangs for minutes on your training script. What do you change first?**

<details><summary>Answer</summary>

It profiles every kernel since the start. Add `--profile-from-start off` with `torch.cuda.profiler.start()` in the script, a `--kernel-name` and a `--launch-count`, and a smaller set.

</details>

## What to remember

- One kernel, one launch, after a warm-up: `--profile-from-start off --launch-count 1`.
- `basic` first, `full` on one kernel, `--metrics` for exact questions.
- Bytes are facts; rates and times under a profiler are not.
- nvprof's names are gone; TMA is invisible to `gld`.
- For a whole step use app-range, or `dpscope ncu`.

**Further**: [NVIDIA's profiling guide](https://docs.nvidia.com/nsight-compute/ProfilingGuide/), [dpscope's guide to traffic](../docs/ncu-guide.md). Next: [read a report](03b-read-a-report.ipynb).
"""
