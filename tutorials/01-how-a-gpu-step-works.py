# %% [markdown]
"""
# 1. How a GPU step works

*Last verified: 2026-11-16, torch 2.13 on a CPU, torch 2.11 on an NVIDIA H200.*

**Level:** start; sections marked *deeper* can wait. **Assumes:** you have trained a model with PyTorch; nothing about GPUs.
**Time:** 30 minutes to read, about 40 more for the exercises.

A training step looks like five lines of Python. Underneath, one processor gives orders and another carries them out. Most
questions about speed come down to one: who waits for whom? This lesson builds the picture that the others use.

**After it you can**

- say what runs on the host, what runs on the device, and how work and data get from one to the other;
- time a GPU step correctly, and spot a measurement that is wrong;
- tell launch-bound, memory-bound and compute-bound programs apart, and name the fix for each;
- list the synchronisations that hide in ordinary PyTorch code.

**How to work through it.** Each section ends with an exercise: a cell with `...` to replace, and a cell that checks your answer and gives a
hint. The lesson runs from top to bottom whether they are done or not. Solutions are in
[solutions/lesson_1.py](solutions/lesson_1.py); look after you have tried.

The lesson runs on any machine. Without a GPU, cells measure the CPU and show what was recorded on an NVIDIA H200; with a GPU they measure
yours. The programs are in [programs](programs): their names do not say what is wrong with them. Guess before you read on.
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
import torch
from checks import check
from practice import device_here

device = device_here()
print(f"torch {torch.__version__}, measuring on: {device}")

# %% [markdown]
"""
## 1.1 Two processors

Python never runs on the GPU. The **host** (the CPU) executes `y = torch.relu(x @ w)` in layers:

1. your code calls a PyTorch operator;
2. PyTorch's C++ library (ATen) checks shapes, allocates the result and chooses a **kernel**, a program for the GPU;
3. the CUDA runtime puts the kernel and its arguments into a **queue** of the **device** (the GPU) and returns at once.

The device takes work from the queue in order. The host is usually ahead: it has launched work that the device has not started. That is
what you want, because then the device never waits.

Two things follow. Every operator costs the host a few microseconds, however little it computes, so many tiny operators are slow on any GPU.
And a line of Python that has returned has not necessarily *done* anything yet.

**Exercise 1.1.** Each of `operators` costs the host `launch_us` and the device `kernel_us`. Both work at the same time. How long does the
step take, roughly?
"""


# %%
def step_us(operators, launch_us, kernel_us): ...  # replace this line


# %%
check("1.1", step_us)

# %% [markdown]
"""
## 1.2 Two memories

| | host memory | device memory |
| --- | --- | --- |
| what it is | DDR next to the CPU | HBM next to the GPU |
| size | hundreds of GB | 141 GB<!-- given: NVIDIA's data sheet --> on an H200 |
| bandwidth | some hundred GB/s | 4.26 TB/s<!-- = ceilings()["dram_bytes_per_second"] / 1e12 --> for a large copy on our H200, measured |
| what lives there | the interpreter, the data loader, batches that wait | parameters, activations, gradients, optimizer state, the batch |

Kernels read and write device memory. Data that a kernel needs has to be copied there first, over the link between the two (PCIe or
NVLink), which is far slower than either memory. There are three directions:

| name | from, to | typical | note |
| --- | --- | --- | --- |
| **H2D** | host to device | the next batch | can overlap with computing if the source is pinned |
| **D2H** | device to host | a loss to print, a checkpoint | reading the value makes the host wait |
| **D2D** | within a device, or between two | `clone()`; gradients between GPUs | within one it uses DRAM bandwidth twice: read and write |

**Pinned memory.** The operating system may move ordinary ("pageable") host memory at any time, so the copy engine cannot read it directly.
The driver first copies it, piece by piece, to a buffer that stays in place. *Pinned* memory stays in place itself, and the copy engine reads it without
the host. `DataLoader(pin_memory=True)` and `tensor.pin_memory()` give you pinned memory. The rest of the system cannot use it, so pin
batches, not datasets. On the H200 a copy from pinned memory reached 55.5 GB/s<!-- = first_look()["copies"]["H2D pinned"] / 1e9 -->, a copy from pageable
memory 9.3 GB/s<!-- = first_look()["copies"]["H2D pageable"] / 1e9 -->. (The picture counts each byte of D2D once. It is read and written, so twice as
many bytes pass through DRAM.)
"""

# %%
look = recorded.first_look()
pictures.show(
    pictures.draw_copies(),
    "Copies of 256 MiB by route on an H200, recorded.",
    "H200 上 256 MiB 数据按不同路径拷贝的速度（录制）。",
)

# %% [markdown]
"""
**Exercise 1.2.** How long does a copy take? Write the function, then compare 256 MiB<!-- given --> from pinned and from pageable memory.
"""


# %%
def copy_ms(nbytes, gb_per_second): ...


# %%
check("1.2", copy_ms)

# %% [markdown]
"""
## 1.3 Streams

A **stream** is one queue of the device. Within a stream, work runs in launch order. Work in different streams may run at the same time if there is
room. PyTorch launches everything into one *current stream* per device unless told otherwise. That is why ordinary code is correct without
thinking about it: the kernel that reads `x` comes after the one that writes it.

The best use of a second stream is to copy the next batch while this one is computed:

```python
torch.cuda.current_stream().wait_stream(copies)   # compute only when the copy has arrived
batch.record_stream(torch.cuda.current_stream())  # the allocator may not reuse this memory before we are done
with torch.cuda.stream(copies): ...               # launch the next copy here
```

The first two lines keep it correct: if you forget either, you have a race that may show up once a week. The third makes it overlap: without it the
copy lands on the current stream, where it is correct and overlaps with nothing.

`programs/case_3.py` brings batches to the device in three ways. Which would you expect to be fastest?
"""

# %%
from case_3 import PROGRAM as case_3

live = [case_3.measure(way, steps=10) for way in case_3.ways_on(device)]
pictures.tell(case_3, live)
pictures.show(
    pictures.draw_ways(case_3, live, ("pageable", "pinned", "pinned, own stream")),
    "Three ways to bring batches to the device: step time. Ways b and c need a GPU.",
    "把批次送到设备的三种方式：一步的时间。方式 b、c 需要 GPU。",
)

# %% [markdown]
"""
On the H200 pinning takes the step from 9.3 ms<!-- = took("case_3", "a") --> to 3.28 ms<!-- = took("case_3", "b") -->, and copying on a stream of
its own to 2.07 ms<!-- = took("case_3", "c") -->, close to what the computation takes alone.

For computing, a second stream gains only what the first leaves unused. Forty small products of 512 × 512, replayed as a graph so that launching does not
count, took 0.49 ms<!-- = first_look()["two_streams"]["one_stream_ms"] --> on one stream and
0.37 ms<!-- = first_look()["two_streams"]["two_streams_ms"] --> on two. A product that fills the GPU by itself gains nothing.

**Exercise 1.3.** Say what happens without each of the three lines: `"race"` (the result can be wrong) or `"slow"` (it is right, and overlaps with
nothing).
"""

# %%
without = {"wait_stream": ..., "record_stream": ..., "torch.cuda.stream": ...}

# %%
check("1.3", without)

# %% [markdown]
"""
## 1.4 Synchronisation

To **synchronise** is to make the host wait until the device has caught up. You ask for it with

- `torch.cuda.synchronize()`: everything on a device;
- `stream.synchronize()`, `event.synchronize()`: one stream, or one point in it.

You also get it without asking wherever Python needs a *value*:

| code | why it waits |
| --- | --- |
| `loss.item()`, `float(loss)`, `print(loss)` | the number has to be copied to the host |
| `if (x > 0).all():`, `assert` on a tensor | Python must know which way to go |
| `x.cpu()`, `x.numpy()`, `x.tolist()` | the copy must have arrived |
| `x[mask]`, `torch.nonzero(x)`, `torch.unique(x)` | the size of the result depends on the data |
| `x.to("cuda")` from pageable memory | the driver copies through its own buffer |

One wait costs little. A wait in every layer empties the queue: the device runs out of work and stays idle until the host has launched again.
`programs/case_4.py` runs 32 layers and looks at the mean of each. What is the difference between its two ways?
"""

# %%
from case_4 import PROGRAM as case_4

live = [case_4.measure(way) for way in case_4.ways_on(device)]
pictures.tell(case_4, live)

# %% [markdown]
"""
Way a reads each mean with `.item()`; way b keeps the means on the device and reads them all once in a hundred steps. On the H200 the waits make the step
1.42×<!-- = took("case_4", "a") / took("case_4", "b") --> as long: 3.77 ms<!-- = took("case_4", "a") --> instead of
2.66 ms<!-- = took("case_4", "b") -->. On a CPU nothing is asynchronous, so nothing waits, and the two take the same time within the noise. A CPU cannot show this
problem, which is why it survives until the first run on a GPU.

`CUDA_LAUNCH_BLOCKING=1` makes *every* launch wait. Use it to find which kernel raised an error, never to measure.

**Is asynchrony dangerous?** Not for results: PyTorch keeps the order within a stream and waits where you read a value. It is dangerous for timing.

**Exercise 1.4.** Which of these lines wait on a GPU? Give their numbers.

```python
loss = criterion(model(x), y)      # 1
if loss > best:                    # 2
    best = loss.item()             # 3
print(best)                        # 4
hard = x[losses > 1.0]             # 5
mean = x.mean(dim=0)               # 6
```
"""

# %%
lines_that_wait = ...  # for example [1, 6]

# %%
check("1.4", lines_that_wait)

# %% [markdown]
"""
## 1.5 Timing: the wrong way and the right way

```python
began = time.perf_counter()
y = a @ a
print(time.perf_counter() - began)  # wrong: this is how long it took to *order* the product
```

There are two right ways. Synchronise before both readings of the clock; or let the device's own clock mark **events** in the stream and read them
when everything is over. Events are better for training steps, because steps follow each other as in training and nobody waits in between.
`dpscope.instruments.timing.time_steps` does that; the times in this course come from it unless a sentence says otherwise.
"""

# %%
from first_look import three_clocks

mine = three_clocks(device, 4096 if device == "cuda" else 512)
for where, clocks in (("here", mine), ("H200, recorded", look["three_clocks"] if look else None)):
    if clocks:
        print(
            f"{where:15} {clocks['side']}³: without waiting {clocks['without_waiting_ms']:8.3f} ms, "
            f"waiting {clocks['waiting_ms']:8.3f} ms, events {clocks['events_ms']:8.3f} ms"
        )
for call in (look or {}).get("ordering", []):
    if call["call"].startswith(("aten::", "cudaLaunch", "cudaFunc")):
        print(
            f"    the host's part of one product on the H200, under the profiler: {call['ms']:.3f} ms in {call['call']}"
        )

# %% [markdown]
"""
On a CPU the three mean the same. On the H200 the first says 0.026 ms<!-- = first_look()["three_clocks"]["without_waiting_ms"] --> where the product takes
21.5 ms<!-- = first_look()["three_clocks"]["events_ms"] -->. It is wrong and looks plausible. **If a time does not grow with the size of the problem, suspect the
clock.**

Ordering this product takes longer than the 7.1 µs<!-- = launch_us() --> of a small addition in the next section: `aten::mm` does more on the host than `aten::add`, as the list above
shows (the profiler makes each call longer). "A launch costs some microseconds" is true of a small elementwise operator in a running loop, and no law: another run of this program on another
day said 0.27 ms<!-- given: the recording of 2026-11-15, replaced since --> for the same line. The host's part varies with the machine and what else it does.

The other rules of timing are old. Warm up first: allocations, the choice of kernels and the clocks settle. Take many steps, and give the median and
the spread. Never time under a profiler.

**Exercise 1.5.** `gpu` has `launch(ms)`, which queues work and returns at once, `synchronize()` and `clock()` in milliseconds. Time the work correctly,
also when something is in the queue already.
"""


# %%
def time_right(gpu, ms): ...


# %%
check("1.5", time_right)

# %% [markdown]
"""
## 1.6 Launches

How small may an operator be? Time `x + 1` for larger and larger `x`:
"""

# %%
from first_look import look as take_a_look

here = take_a_look(device)
pictures.show(
    pictures.draw_time_by_size(here),
    "Time of x + 1 against its size, on logarithmic axes. Timed one at a time, the two events that take the time are part of it; 50 at a time they hardly count.",
    "x + 1 的时间与大小的关系（对数坐标）。每次只计时一个时，两个计时事件也算在内；每次计时 50 个，事件的开销就可以忽略。",
)

# %% [markdown]
"""
Left, the curve is flat: the time is that of launching, whatever the size. Right, it is a line: time grows with bytes, and the slope is the memory's
bandwidth. Where is the bend? Timed one at a time it seems to lie near 100 MB<!-- given: read off the picture -->, but the flat part then contains the two events that take
the time, about 23 µs<!-- = 1e3 * first_look()["time_by_size"][0]["median_ms"] -->. Timed 50 at a time (triangles) an addition costs
7.1 µs<!-- = launch_us() -->, in which the memory moves 30 MB<!-- = bend_bytes() / 1e6 -->. That is the bend: below it, an operator costs the same however small it is.
(Sizes below 62.9 MB<!-- = l2_bytes() / 1e6 --> fit into the L2 cache and can be faster than DRAM allows.)

A program whose operators all lie left of the bend is **launch-bound**: the device finishes each one before the next arrives. `programs/case_2.py` updates
400 small parameters in three ways.
"""

# %%
from case_2 import PROGRAM as case_2

live = [case_2.measure(way) for way in case_2.ways_on(device)]
pictures.tell(case_2, live)
pictures.show(
    pictures.draw_ways(case_2, live, ("one by one", "foreach", "CUDA graph")),
    "An optimizer step for 400 small parameters, in three ways. Way c needs a GPU.",
    "400 个小参数的一次优化器更新，三种方式。方式 c 需要 GPU。",
)

# %% [markdown]
"""
- **a** launches 400 kernels: 3.19 ms<!-- = took("case_2", "a") -->.
- **b**, `torch._foreach_add_`, which PyTorch's own optimizers use, launches a few kernels that each update many parameters: 0.148 ms<!-- = took("case_2", "b") -->.
- **c** replays the loop of a as a **CUDA graph**: 0.471 ms<!-- = took("case_2", "c") -->. The host makes one call, but the device still runs 400 kernels, one after another, about
  1.2 µs<!-- = 1e3 * took("case_2", "c") / 400 --> each. That is why it is slower than b<!-- holds: took("case_2", "c") > took("case_2", "b") -->: a graph removes the host's part of a launch,
  fusion removes the launch.

**Exercise 1.6.** Find the bend: return the `bytes` of the first point that takes at least 1.7 times<!-- given --> as long as the one before. `points` is a list like
`here["time_by_size"]`, each size twice the last.
"""


# %%
def bend(points): ...


# %%
check("1.6", bend)

# %% [markdown]
"""
## 1.7 Threads

A kernel is one function run by very many **threads**. They are grouped:

| group | what it is | what its members share |
| --- | --- | --- |
| thread | one copy of the function; handles one or a few elements | its registers |
| **warp** | 32 threads that execute the same instruction together | the instruction; a branch taken by some makes the others wait |
| **block** | up to 1024 threads, on one multiprocessor | shared memory, barriers |
| **grid** | all blocks of one launch | device memory |

The device consists of **streaming multiprocessors** (SMs); an H200 has 132. Each SM has four **sub-partitions** (SMSPs), each with a scheduler of its own that issues
at most one instruction a cycle. A scheduler holds up to 16 warps and switches between them for free: while one waits for memory, another
computes. A GPU hides latency with many warps, not with large caches. **Occupancy** is how many warps an SM holds compared with how many it
could; a block's registers and shared memory limit it.

So a kernel needs enough blocks for all SMs, enough warps on each to hide latency, and neighbouring threads that read neighbouring addresses, because memory comes
in whole sectors of 32 bytes whether you use them or not.

**Exercise 1.7.** All blocks that fit at once are one *wave*. How many waves does a grid of `blocks` need on 132 SMs, if each SM takes `blocks_per_sm` at a time? (2.2 waves
means: two full ones, and one in which most SMs are idle.)
"""


# %%
def waves(blocks, blocks_per_sm): ...


# %%
check("1.7", waves)

# %% [markdown]
"""
## 1.8 Memories within memory

| level | where | size on an H200 | who sees it |
| --- | --- | --- | --- |
| registers | in the SM | 256 KB<!-- given: CUDA programming guide, compute capability 9.0 --> an SM | one thread |
| shared memory and L1 | in the SM | 256 KB<!-- given: CUDA programming guide, compute capability 9.0 --> an SM, together | a block |
| L2 | on the chip | 62.9 MB<!-- = l2_bytes() / 1e6 --> (60 MiB<!-- = l2_bytes() / 2**20 -->), read from the card by ncu | everyone |
| HBM ("DRAM", "global memory") | next to the chip | 141 GB<!-- given: NVIDIA's data sheet --> | everyone, slowly |
| host memory | across the link | hundreds of GB | by copies |

Each level is larger and slower than the one above. What stays in registers and shared memory is nearly free; trips to HBM are what time is spent on.
**Fusion** means doing more before writing back: `2a + b` as two operators writes a temporary tensor and reads it again, five trips through
HBM where three would do. `programs/case_1.py` does both.
"""

# %%
from case_1 import PROGRAM as case_1

live = [case_1.measure(way) for way in case_1.ways_on(device)]
pictures.tell(case_1, live)
pictures.show(
    pictures.draw_ways(case_1, live, ("a * 2 + b", "torch.add(b, a, alpha=2)")),
    "2a + b in two operators and in one.",
    "2a + b：两个算子与一个算子。",
)

# %% [markdown]
"""
Fewer bytes take less time, although the arithmetic is the same: on the H200 one operator is 1.69×<!-- = took("case_1", "a") / took("case_1", "b") --> as fast as two, and five
trips to three would be 1.67×<!-- given: 5 / 3 -->. (On a CPU the gain can be larger: the temporary tensor is fresh memory that the operating system
hands over page by page.)

**Exercise 1.8.** How many bytes does `2a + b` move for `numbers` float32 numbers, in one operator (`fused`) and in two?
"""


# %%
def bytes_moved(numbers, fused): ...


# %%
check("1.8", bytes_moved)

# %% [markdown]
"""
## 1.9 What is it bound by?

Divide the operations of a kernel by the bytes it moves: its **arithmetic intensity**. The machine has such a ratio too, one for each unit that does arithmetic; it is
called the **ridge**. Our H200 moves 4.26 TB/s<!-- = ceilings()["dram_bytes_per_second"] / 1e12 -->, and reaches

| unit | operations a second | ridge: operations for each byte |
| --- | --- | --- |
| tensor cores, bfloat16 | 786 TFLOP/s<!-- = ceilings()["tensor_flops_per_second"] / 1e12 --> | 184<!-- = ridge() --> |
| float32 (FMA pipe, no TF32) | 51 TFLOP/s<!-- = ceilings()["fp32_flops_per_second"] / 1e12 --> | 12<!-- = ridge("fp32") --> |

- Below the ridge a kernel is **memory-bound**: it waits for bytes. Additions, norms, softmax, optimizers, copies. Move fewer bytes: fuse, use a
  smaller number format, do not write down what you can recompute.
- Above it, it is **compute-bound**: large matrix products and convolutions. Use tensor cores (bfloat16, TF32), or do less.
- If neither is near its limit and the device is idle in between, the program is **launch-bound** (1.6), or waits for copies or the host. Faster kernels change
  nothing.

`programs/case_5.py` multiplies the same matrices in two number formats:
"""

# %%
from case_5 import PROGRAM as case_5

live = [case_5.measure(way, steps=10) for way in case_5.ways_on(device)]
pictures.tell(case_5, live)

# %% [markdown]
"""
The same product, 8192³ on the H200: 51.1 TFLOP/s<!-- = program("case_5", "a")["flops"] / took("case_5", "a") / 1e9 --> in float32,
808 TFLOP/s<!-- = program("case_5", "b")["flops"] / took("case_5", "b") / 1e9 --> in bfloat16. Few single changes to a training script are worth as much.

**Exercise 1.9.** Say what a kernel is bound by on the H200: `"memory"` or `"compute"`. `unit` is `"tensor"` or `"fp32"`; `recorded.ceilings()` has
`tensor_flops_per_second`, `fp32_flops_per_second` and `dram_bytes_per_second`.
"""


# %%
def bound_by(flops, nbytes, unit): ...


# %%
check("1.9", bound_by)

# %% [markdown]
"""
## 1.10 Common bottlenecks, and what to do

| what you see | where you see it | usual cause | what to do |
| --- | --- | --- | --- |
| GPU idle, host busy | timeline (lessons 2 and 4) | too many small operators | larger batch, fused operators, `foreach` optimizers, `torch.compile`, CUDA graphs |
| GPU idle after each step | timeline: a wait, then a gap | `.item()`, `print`, `if tensor` | keep values on the device, read them rarely |
| gaps at the start of a step | timeline: the loader's threads | slow loading or preprocessing | more workers, `persistent_workers`, prefetching |
| long H2D copies, nothing beside them | timeline: copy lanes | pageable memory | `pin_memory=True`, `non_blocking=True`, a stream for copies |
| DRAM near its limit, arithmetic low | ncu, speed of light (lesson 3b) | elementwise work, optimizer, norms | fuse, smaller number formats, recompute |
| arithmetic near its limit | ncu | large products | tensor cores, less work; then it is as fast as it gets |
| both low, warps stalled | ncu, warp states | latency: few warps, scattered reads, barriers | more parallelism, neighbouring addresses |
| tensor cores idle in a product | ncu, compute workload | float32 without TF32, odd shapes | bfloat16, multiples of 8 or 16 |
| out of memory | `dpscope memory` (lesson 5) | activations, per-sample gradients | smaller batch, checkpointing, another clipping method |
| first steps slow | trace of early steps | allocation, choice of kernels, compiling | warm up before measuring |

The same as one page to print: [from symptom to fix](sheets/symptoms-en.pdf); all commands: [cheat sheet](sheets/cheat-sheet-en.pdf).

**Exercise 1.10.** Which tool first? Answer `"timeline"`, `"ncu"` or `"memory"`.
"""

# %%
first_tool = {"idle GPU": ..., "slow kernel": ..., "out of memory": ...}

# %%
check("1.10", first_tool)

# %% [markdown]
"""
## 1.11 The running example: a private step

Differentially private training (DP-SGD) clips the gradient of *every sample* before summing, and adds noise. Three ways to do so differ in the terms of
this lesson. On an H200, a transformer of 1.17 billion parameters, batch 8, sequence 1024, bf16, one run of 2026-11-15:

| method | step time | × ordinary | what it does more |
| --- | --- | --- | --- |
| `standard` (not private) | 126.8 ms<!-- = ms("page", "standard") --> | 1.00×<!-- = times("page", "standard") --> | |
| `flat` (Opacus) | 266.5 ms<!-- = ms("page", "flat") --> | 2.10×<!-- = times("page", "flat") --> | writes every sample's gradient to memory and reads it back |
| `ghost` (Opacus) | 345.1 ms<!-- = ms("page", "ghost") --> | 2.72×<!-- = times("page", "ghost") --> | a second backward pass, and products for the norms |
| `flash` (dpscope) | 137.8 ms<!-- = ms("page", "flash") --> | 1.09×<!-- = times("page", "flash") --> | products for the norms, inside one backward pass |

Flash clipping has become faster since. Lesson 5 comes back to it with all tools.
"""

# %%
from dpscope.reports.time_charts import draw_tradeoff

pictures.show(
    draw_tradeoff(recorded.sweep("page").rows),
    "Memory against time of four methods on an H200, 2026-11-15, as dpscope draws it.",
    "H200 上四种方法的显存与时间（2026-11-15），由 dpscope 绘制。",
)

# %% [markdown]
"""
**Exercise 1.11.** What takes one day without privacy takes how many days with a method? Use `recorded.ms("page", method)`, the step time in milliseconds.
"""


# %%
def days(method): ...


# %%
check("1.11", days)

# %% [markdown]
"""
## Quiz

**1. A loop of tiny operators takes 5 ms<!-- given --> on a GPU that costs ten times as much as the old one, and took 5 ms<!-- given --> there. Why?**

<details><summary>Answer</summary>

It is launch-bound: the time is the host's. A faster device only idles longer. Fewer launches help (fused operators, CUDA graphs), or a faster CPU.

</details>

**2. `time.perf_counter()` around a step without synchronising shows 3 ms<!-- given -->; with synchronising 120 ms<!-- given -->. Is the first number good for anything?**

<details><summary>Answer</summary>

Yes: it is how long the host needs to launch the step. As long as it is below the second, the host keeps up and the device never runs out of work. It is not the step time.

</details>

**3. Why is `non_blocking=True` useless with pageable memory?**

<details><summary>Answer</summary>

The driver has to copy the data to its own pinned buffer first, and the host does that. The call returns when the data has been taken over, so little can run beside it.

</details>

**4. A kernel reads 1 GB<!-- given --> and does 10 GFLOP<!-- given -->. Which limit does it meet first on the H200?**

<details><summary>Answer</summary>

It depends on the unit. Ten operations a byte are far below the ridge of tensor cores (184<!-- = ridge() -->): memory-bound, a quarter of a millisecond, and the arithmetic would take
a twentieth of that. In plain float32 the ridge is 12<!-- = ridge("fp32") -->, so the kernel is nearly balanced: the bytes take
0.23 ms<!-- = 1e12 / ceilings()["dram_bytes_per_second"] -->, the arithmetic 0.20 ms<!-- = 1e13 / ceilings()["fp32_flops_per_second"] -->.

</details>

**5. Occupancy is low. Is the kernel slow?**

<details><summary>Answer</summary>

Not necessarily. Occupancy is a means to hide latency. Matrix kernels keep large tiles in registers and shared memory, run at low occupancy and come near the
arithmetic limit.

</details>

## What to remember

- The host orders, the device works, and a queue lies between them. Ask who waits.
- A time without synchronisation is the time of ordering. Use events, or `time_steps`.
- Launch-bound: fewer launches. Memory-bound: fewer bytes. Compute-bound: a better format, or less work.
- Values that Python reads are synchronisations. Pinned memory makes copies asynchronous.
- Know the ridge of the unit you use.

**Further**: [CUDA programming guide](https://docs.nvidia.com/cuda/cuda-c-programming-guide/), [GPU glossary](https://modal.com/gpu-glossary),
[How to think about GPUs](https://jax-ml.github.io/scaling-book/gpus/), [our own glossary](glossary.md). Next: [PyTorch Profiler](02-pytorch-profiler.ipynb).
"""
