# %% [markdown]
"""
# 3b. Nsight Compute: read a report

*Last verified: 2026-11-16 with ncu 2025.3.1 on an NVIDIA H200.*

**Level:** practise; 3.15 and 3.16 *deeper*. **Assumes:** lessons [1](01-how-a-gpu-step-works.ipynb) and [3a](03a-run-nsight-compute.ipynb). **Time:** 20 minutes to read, about 40 more for the
exercises.

Four kernels were profiled on an H200 with `--set full`, and this lesson reads their reports section by section. Reading needs no GPU.

| report | what it is |
| --- | --- |
| `addition` | the second half of case 1, way a: `t + b` for 2²⁸ float32 numbers |
| `product` | case 5, way a: a 4096³ product in float32 |
| `tensor_cores` | case 5, way b: the same in bfloat16 |
| `gram` | dpscope's kernel for the norms of per-sample gradients of one layer |

**After it you can**

- find your way in the window of Nsight Compute: Summary, Details, Source, Raw;
- say what bounds a kernel and what would help, from eight numbers;
- tell which of ncu's advice matters for your kernel.

```bash
ncu --profile-from-start off --set full --import-sass no --launch-skip 1 --launch-count 1 -f -o \
    addition \
    python programs/case_1.py --steps 1
ncu --profile-from-start off --set full --import-sass no --launch-count 1 -f -o product \
    python programs/case_5.py --steps 1 --size 4096
ncu --profile-from-start off --set full --import-sass no --launch-count 1 -f -o tensor_cores \
    python programs/case_5.py --way b --steps 1 --size 4096
ncu --profile-from-start off --set full --import-sass no --kernel-name regex:_gram_kernel \
    --launch-count 1 -f -o gram \
    python programs/per_sample_norms.py --way gram --steps 1
ncu --profile-from-start off --set full --import-sass no --launch-count 12 -f -o cnn \
    python programs/cnn.py --steps 1
```

Statements about these kernels are checked against the recorded reports by a test. Solutions: [solutions/lesson_3.py](solutions/lesson_3.py).
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
from language import say

REPORTS = ("addition", "product", "tensor_cores", "gram")
for name in REPORTS:
    if kernel := recorded.details(name):
        print(f"{name:14} grid {kernel.grid:18} block {kernel.block:15} {kernel.kernel[:70]}")
    else:
        print(f"{name:14} {recorded.NOT_RECORDED}")

# %% [markdown]
"""
## 3.9 The window: Summary

Open a report with `ncu-ui NAME.ncu-rep`, or drag it into the window. The first page is the **Summary**: one row a launch. This is its drawing for the first twelve kernels of the network of lesson 2
(batch 4096):
"""

# %%
pictures.show(
    windows.draw_ncu_summary("cnn"),
    "Nsight Compute's Summary page, drawn (not a screenshot) from a recorded report. 1: what ncu's rules think can be gained; 2: the kernel; 3: its duration; 4: throughputs in percent of the peak; 5: the other pages.",
    "Nsight Compute 的 Summary 页，根据录下的报告绘制（不是截图）。1：ncu 的规则估计能提升多少；2：kernel；3：耗时；4：吞吐量占峰值的百分比；5：其他页面。",
)

# %% [markdown]
"""
Sort by duration and begin at the top. *Estimated speedup* is what a rule thinks one launch could gain if its finding were fixed. It is an upper bound of one rule for one kernel, not a promise:
multiply it by the duration to see what is at stake.

**Exercise 3.9.** `launches` is a list of `(duration_us, estimated_speedup_percent)`. Return the index of the launch where the most time could be saved.
"""


# %%
def first_to_look(launches): ...


# %%
check("3.9", first_to_look)

# %% [markdown]
"""
## 3.10 Details, first section: speed of light

A double click on a row opens **Details**. Each section has a headline of numbers, and a box with the advice of ncu's rules:
"""

# %%
pictures.show(
    windows.draw_ncu_details("addition"),
    "Nsight Compute's Details page, drawn (not a screenshot) from the report of the addition. 1: kernel, grid and block; 2: a section; 3: percent of the peak; 4: what a rule says; 5: the next sections, folded.",
    "Nsight Compute 的 Details 页，根据加法的报告绘制（不是截图）。1：kernel、网格和线程块；2：一个小节；3：占峰值的百分比；4：规则的建议；5：后面折叠的小节。",
)

# %% [markdown]
"""
*How near is the kernel to what the hardware can do?* Two numbers first: **Compute (SM) Throughput** and **Memory Throughput**, in percent of the peak.

- Memory high, compute low: memory-bound. The reverse: compute-bound.
- *Either* above 80 %<!-- given: the text of ncu's rule -->: ncu says that the kernel uses the device well, and that work has to move to another unit to gain more.
- *Both* below 60 %<!-- given: the text of ncu's rule -->: latency; go to *Warp State*.

*Memory Throughput* is a maximum over parts of DRAM, L2 and L1 (shared memory counts there), so look at which: `DRAM Throughput` tells whether bytes really come from memory. It is not the maximum of the lines below it, which count some
parts more: for the addition *L2 Cache Throughput* says 93.8 %<!-- = metric("addition", "L2 Cache Throughput") --> where *Memory Throughput* says 91.3 %<!-- = metric("addition", "Memory Throughput") --><!-- holds: metric("addition", "L2 Cache Throughput") > metric("addition", "Memory Throughput") == metric("addition", "DRAM Throughput") -->.
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
**Exercise 3.10.** Write the verdict: `"latency"` if both are below 60, otherwise the name of the larger one, `"compute"` or `"memory"`.
"""


# %%
def verdict(compute, memory): ...


# %%
check("3.10", verdict)

# %% [markdown]
"""
## 3.11 Roofline

The same question as a picture (lesson 1.9): operations for each byte of DRAM to the right, operations a second upwards. Under the slope a kernel is memory-bound, under the flat roof
compute-bound. The distance below the roof is the headroom. The roofs are those that dpscope *measured* on an H200, not those of a data sheet; the points are the four kernels.
"""

# %%
points = {name: point for name in REPORTS if (point := recorded.kernel_on_roofline(name))}
pictures.show(
    pictures.draw_kernels_on_roofline(points, recorded.ceilings()) if points else None,
    "Four kernels under the measured roofs of an H200.",
    "四个 kernel 与实测的 H200 屋顶线。",
)

# %% [markdown]
"""
Two things need an explanation.

- The two products lie at 77 %<!-- = 100 * of_roof("product") --> and 80 %<!-- = 100 * of_roof("tensor_cores") --> of their roofs, although ncu reports
  88 %<!-- = metric("product", "Compute (SM) Throughput") --> and 91 %<!-- = metric("tensor_cores", "Compute (SM) Throughput") --> of the peak. Percent of the peak means the peak at the clock of that run, and ncu lowers the SM clock to its base so that two runs
  can be compared: *SM Frequency* says 1.50 GHz<!-- = metric("product", "SM Frequency") --> and 1.27 GHz<!-- = metric("tensor_cores", "SM Frequency") -->, where a free card runs at up to
  1.98 GHz<!-- = hottest("clocks") / 1e3 -->. The roofs were measured with the clocks free. `--clock-control none` leaves the clock alone, and is what dpscope passes.
- `addition` lies *above* its roof, at 103 %<!-- = 100 * of_roof("addition") --><!-- holds: of_roof("addition") > 1 -->. A roof that is measured is the rate of one program: ours is a copy, which reads one byte for each it
  writes. The addition reads two for each it writes, which is another mix. Data sheets give a limit that nothing passes and nothing reaches; measured roofs can be passed by a few percent.

**Exercise 3.11.** Return a float32 kernel's rate as a share of its roof. `recorded.ceilings()` has `dram_bytes_per_second` and `fp32_flops_per_second`.
"""


# %%
def of_roof(flops, nbytes, seconds): ...


# %%
check("3.11", of_roof)

# %% [markdown]
"""
## 3.12 Memory workload analysis

*Where do bytes come from, and is the path well used?* The chart in the window shows every level with the traffic on each arrow. In numbers:

- **Mem Busy**: how busy caches and DRAM are inside. **Max Bandwidth**: how full the connections between them are. **Mem Pipes Busy**: how busy the pipes that issue memory instructions are.
- **L1/TEX Hit Rate**, **L2 Hit Rate**: of sectors (32 bytes) looked up, how many were there. A line has four sectors; asking for one of them is a partial use.
- Below, tables of loads and stores: *sectors per request* well above what the data type needs means scattered addresses.
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
- The addition reads every number once, so nothing it *reads* can be in a cache: L1 hits 0 %<!-- = metric("addition", "L1/TEX Hit Rate") -->. L2 still shows
  34 %<!-- = metric("addition", "L2 Hit Rate") -->, and the raw counters say why: of its reads 0 %<!-- = counter("addition", "lts__t_sector_op_read_hit_rate.pct") --> hit, of its stores
  100 %<!-- = counter("addition", "lts__t_sector_op_write_hit_rate.pct") -->, because L2 takes a store in without looking for old data, and one of three sectors is a store<!-- holds: 30 < metric("addition", "L2 Hit Rate") < 38 and counter("addition", "lts__t_sector_op_read_hit_rate.pct") < 1 -->. A hit
  rate is no measure of reuse by itself.
- The product uses each number thousands of times, and its L1 hit rate is 0 %<!-- = metric("product", "L1/TEX Hit Rate") -->: tiles go to *shared memory*, past the L1 cache, and are reused there. What L2
  serves, 90 %<!-- = metric("product", "L2 Hit Rate") --> of it<!-- holds: metric("product", "L2 Hit Rate") > 80 and metric("product", "L1/TEX Hit Rate") < 1 -->, is the sharing between blocks.
- ncu's advice is left out here: to all four it recommends the compression of L2, which does not matter for any of them. Its rules know the counters, not your program.

**Exercise 3.12.** How many bytes should `t + b` read and write for 2²⁸ float32 numbers? The check compares your figures with what they must be; the cell after it with what ncu counted.
"""

# %%
expected = {"read": ..., "written": ...}

# %%
if passed("3.12", expected) and (seen := recorded.counters("addition")):
    for name, metric in (("read", "dram__bytes_read.sum"), ("written", "dram__bytes_write.sum")):
        counted = seen.metrics[metric]
        print(
            f"{name}: expected {expected[name] / 1e9:.3f} GB, counted {counted / 1e9:.3f} GB ({counted / expected[name] - 1:+.2%})"
        )

# %% [markdown]
"""
## 3.13 Compute workload analysis

*Which pipe does the work?* **IPC** is instructions per cycle: *executed* per elapsed cycle, and *issued* per active cycle. **SM Busy** is the larger of two things: how often the schedulers issued (*Issue
Slots Busy*), and how busy the busiest pipe was. The pipes:

| pipe | does |
| --- | --- |
| FMA | float32 multiply and add, integer multiply |
| ALU | integers, logic, comparisons |
| Tensor | matrix instructions |
| LSU | loads and stores, shared memory |
| TMA | bulk copies of tiles (Hopper) |
| XU | exp, sin, square roots, conversions |
| FP64 | float64 |
| Uniform | scalars that all threads of a warp share |
| ADU, CBU | addresses of branches and constants; branches and barriers |
| TEX | textures |
"""

# %%
pictures.tell_section("Compute Workload Analysis", *REPORTS, advice=False)
found = {name: recorded.pipes(name) for name in REPORTS if recorded.counters(name)}
pictures.show(
    pictures.draw_bars(found, say("% of active cycles", "占活跃周期的 %"), limit=100) if found else None,
    "How busy each pipe was, from raw.csv: the eight busiest of each kernel.",
    "各流水线的忙碌程度，取自 raw.csv：每个 kernel 最忙的八条。",
)

# %% [markdown]
"""
- `product`: SM Busy equals Issue Slots Busy<!-- holds: metric("product", "SM Busy") == metric("product", "Issue Slots Busy") -->, because the schedulers issue nearly every cycle; the FMA pipe is the busiest, at
  80 %<!-- = pipes("product")["FMA"] -->.
- `tensor_cores`: issue slots are busy for 11 %<!-- = metric("tensor_cores", "Issue Slots Busy") --> only, and the tensor pipe for 95 %<!-- = pipes("tensor_cores")["Tensor"] -->
  <!-- holds: max(pipes("tensor_cores"), key=pipes("tensor_cores").get) == "Tensor" -->. Low IPC is no fault here: one tensor instruction does the work of thousands of others.
- A product whose tensor pipe is idle runs in the wrong number format: compare the two.

**Exercise 3.13.** Compute SM Busy from Issue Slots Busy and the pipes (a dict of percentages of *elapsed* cycles).
"""


# %%
def sm_busy(issue_slots, pipes): ...


# %%
check("3.13", sm_busy)

# %% [markdown]
"""
## 3.14 Warp states and schedulers

*What were warps waiting for?* Between two instructions a warp spends cycles in **stalls**. The main ones:

| stall | waits for | what helps |
| --- | --- | --- |
| long scoreboard | global memory, L2 | better locality, more warps, more loads in flight |
| short scoreboard | shared memory, special functions | fewer bank conflicts |
| MIO / LG throttle | too many memory instructions queued | wider loads |
| drain | stores at the end of a kernel | fewer or wider stores |
| barrier | other warps of the block | less synchronisation, balanced work |
| gmma | tensor-core instructions that run on their own | nothing: the tensor pipe is at work |
| math pipe throttle | a busy arithmetic pipe | nothing: it is compute-bound |
| wait, selected, not selected | nothing serious: fixed latency; this warp issued; another was chosen | |
"""

# %%
found = {name: recorded.stalls(name) for name in REPORTS if recorded.counters(name)}
pictures.show(
    pictures.draw_bars(found, say("cycles between two instructions of a warp", "warp 两条指令之间的周期数"), most=6)
    if found
    else None,
    "What warps waited for, from raw.csv: the six largest states of each kernel.",
    "warp 在等什么，取自 raw.csv：每个 kernel 最大的六种状态。",
)
pictures.tell_section("Warp State Statistics", *REPORTS, advice=False)
pictures.tell_section("Scheduler Statistics", *REPORTS, advice=False)

# %% [markdown]
"""
- `addition`: a warp waits 217 cycles<!-- = metric("addition", "Warp Cycles Per Issued Instruction") --> between two instructions, 72 %<!-- = stall_percent("addition", "long_scoreboard") --> of them for loads (long
  scoreboard), and 12 %<!-- = stall_percent("addition", "drain") --> for its stores to drain.
- *No Eligible* says in how many cycles a scheduler found no warp ready to issue. It is a reason to look at stalls only if no unit is at its limit: `tensor_cores` has
  88 %<!-- = metric("tensor_cores", "No Eligible") --> and is 91 %<!-- = metric("tensor_cores", "Compute (SM) Throughput") --> utilised<!-- holds: metric("tensor_cores", "No Eligible") > 80 and metric("tensor_cores", "Compute (SM) Throughput") > 85 -->, because few
  instructions keep its pipe full. `addition` has 94 %<!-- = metric("addition", "No Eligible") -->, and DRAM is full.
- Many *not selected* means more than enough warps.

**Exercise 3.14.** Which share of a warp's cycles, in percent, has a reason? `stalls` is a dict like `recorded.stalls("addition")`.
"""


# %%
def share(stalls, reason): ...


# %%
check("3.14", share)

# %% [markdown]
"""
## 3.15 Occupancy (deeper)

*How many warps could an SM hold, and how many did it?* **Theoretical** occupancy is limited by registers, shared memory and the size of blocks (the *Block Limit* lines say which is the smallest);
**achieved** is what was measured. Far below theoretical: uneven work, or a grid too small to fill the GPU. High occupancy is no aim in itself: matrix kernels hold large tiles and run well with few warps.
"""

# %%
pictures.tell_section("Occupancy", *REPORTS, advice=False)
pictures.tell_section(
    "Launch Statistics",
    *REPORTS,
    metrics=("Grid Size", "Block Size", "Registers Per Thread", "Dynamic Shared Memory Per Block", "Waves Per SM"),
    advice=False,
)

# %% [markdown]
"""
**Exercise 3.15.** An SM has 65,536 registers and holds at most 64 warps (2048 threads). Return the occupancy in percent that `registers` a thread and blocks of `threads` allow. Only whole blocks fit.
"""


# %%
def occupancy(registers, threads): ...


# %%
check("3.15", occupancy)

# %% [markdown]
"""
## 3.16 Source view (deeper)

Which *line* is it? For CUDA C++ compile with `-lineinfo`, which adds line numbers and does not slow the code (unlike `-G`). Triton kernels have line numbers already.

```bash
nvcc -lineinfo -arch=sm_90 -o strided programs/strided.cu
ncu --set full --import-source yes -f -o strided ./strided
```

In the window the page **Source** shows the code beside the machine instructions (SASS), with samples of where warps stalled and with memory traffic for each line. Its counters as text, from the record, for the instructions that touch global memory:
"""

# %%
print((TUTORIALS / "programs" / "strided.cu").read_text(encoding="utf-8").split("int main")[0])
print(recorded.source_table())

# %% [markdown]
"""
`neighbours` and `strided` move the same numbers. Threads that lie next to each other read addresses next to each other in one and far apart in the other, so each request of a warp touches
32 sectors<!-- = sectors_a_request("strided") --> instead of 4<!-- = sectors_a_request("neighbours") -->, and the kernel takes 2.5×<!-- = strided_times() --> as long. In the window the excess stands beside the line of the source; as text ncu gives it
for the instruction: `LDG` is the load, `STG` the store.

**Exercise 3.16.** Which line of `strided.cu` loads the scattered numbers? (The first line is 1.)
"""

# %%
scattered_line = ...

# %%
check("3.16", scattered_line)

# %% [markdown]
"""
## 3.17 The verdict on four kernels

- `addition` uses 91.3 %<!-- = metric("addition", "DRAM Throughput") --> of DRAM and 7.5 %<!-- = metric("addition", "Compute (SM) Throughput") --> of compute. Only fewer bytes help; the advice about occupancy is beside the
  point.
- `product` uses 87.8 %<!-- = metric("product", "Compute (SM) Throughput") --> of compute and 2.4 %<!-- = metric("product", "DRAM Throughput") --> of DRAM, at an occupancy of
  12.5 %<!-- = metric("product", "Achieved Occupancy") -->: low occupancy, full speed. Another number format moves it to another roof.
- `tensor_cores` is on that roof: 90.7 %<!-- = metric("tensor_cores", "Compute (SM) Throughput") -->.
- `gram` works on tensor cores at 53.6 %<!-- = metric("gram", "Compute (SM) Throughput") --> and hardly touches DRAM, 14.8 %<!-- = metric("gram", "DRAM Throughput") -->. Its grid is
  2.2 waves<!-- = metric("gram", "Waves Per SM") --> for 132 SMs, so in the last one most SMs are idle: one layer alone is too small for it. Flash clipping puts the layers of a model into one launch.

And a warning from our own program: for this one layer, forming the gradients takes 0.13 ms<!-- = took("per_sample_norms", "gradients") --> and the Gram way
0.25 ms<!-- = took("per_sample_norms", "gram") -->, of which the kernel itself is 0.10 ms<!-- = metric("gram", "Duration") / 1e3 -->. What the rest is, this report cannot say: it sees one kernel. A trace of the call would
(lesson 2). What the Gram kernel saves is memory and bytes, and what counts is the whole step (3.8). A kernel's report answers a kernel's question.

## Quiz

**1. Memory Throughput 90 %<!-- given -->, DRAM Throughput 20 %<!-- given -->. What is the kernel bound by?**

<details><summary>Answer</summary>

By a cache or by shared memory: Memory Throughput is a maximum over parts of all levels. Look at L1 and L2; bank conflicts and scattered sectors are the usual reasons.

</details>

**2. Occupancy fell from 60 %<!-- given --> to 25 %<!-- given --> after a change and the kernel became faster. How?**

<details><summary>Answer</summary>

Larger tiles: more registers and shared memory for each block, hence fewer warps, but each byte is used more often. Occupancy is a means.

</details>

**3. L2 hit rate is a third for a kernel that reads each number once and writes a result half as large. Is something reused?**

<details><summary>Answer</summary>

No. The stores hit: they go to L2 first. Two reads and one write give one hit in three lookups.

</details>

**4. No Eligible is 90 %<!-- given -->. What do you look at before the stalls?**

<details><summary>Answer</summary>

Speed of light. If DRAM or a pipe is near its limit, schedulers have nothing to issue because the limit is reached, and stalls are its shadow.

</details>

## What to remember

- Speed of light first, then the section it points to. Both low: warp states.
- SM Busy is the larger of issue slots and the busiest pipe.
- A hit rate counts stores too, and shared memory is not L1 hits.
- A measured roof can be passed by a few percent; ncu's clock keeps kernels below it.
- ncu's rules know counters, not your program.

**Further**: [NVIDIA's profiling guide](https://docs.nvidia.com/nsight-compute/ProfilingGuide/). Next: [Nsight Systems](04-nsight-systems.ipynb).
"""
