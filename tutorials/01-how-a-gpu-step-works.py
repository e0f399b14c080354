# %% [markdown]
"""
# 1. How a GPU step works

*Last verified: 2026-11-15, torch 2.13 on a CPU, torch 2.11 on an NVIDIA H200.*

A training step looks like five lines of Python. Underneath, one processor writes orders and another carries them out, and
almost every puzzle about speed is a question of who is waiting for whom. This page builds the picture that the other four
tutorials use.

**After it you can**

- say what runs on the host, what runs on the device, and how work and data get from one to the other;
- time a GPU step correctly, and spot a measurement that is not;
- tell a launch-bound, a memory-bound and a compute-bound program apart, and name the remedy of each;
- list the synchronisations that hide in ordinary PyTorch code.

It runs on any machine. Where there is no GPU, the cells measure the CPU and show beside it what was recorded on an NVIDIA
H200; with a GPU they measure yours. Programs to practise on are in `programs/`.
"""

# %%
import sys
from pathlib import Path

TUTORIALS = next(p for p in [Path.cwd(), *Path.cwd().parents, Path.cwd() / "tutorials"] if (p / "programs").is_dir())
sys.path.insert(0, str(TUTORIALS / "programs"))

import pictures
import recorded
import torch
from practice import device_here

device = device_here()
print(f"torch {torch.__version__}, measuring on: {device}")

# %% [markdown]
"""
## 1.1 Two processors

Python never runs on the GPU. `y = torch.relu(x @ w)` is executed by the **host** (the CPU), in layers:

1. your code calls an operator of PyTorch;
2. PyTorch's C++ library (ATen) checks shapes, allocates the result and chooses a **kernel**, a program for the GPU;
3. the CUDA runtime puts the kernel and its arguments into a **queue** of the **device** (the GPU), and returns at once.

The device takes orders out of the queue one after another. The host is usually ahead: it has launched things that the device
has not begun. That is how it should be, for then the device never waits.

Two consequences follow. Every operator costs the host a few microseconds however little it computes, so many tiny operators
are slow on the fastest GPU. And a line of Python that returned has not necessarily *done* anything yet.
"""

# %% [markdown]
"""
## 1.2 Two memories

| | host memory | device memory |
| --- | --- | --- |
| what it is | DDR beside the CPU | HBM beside the GPU |
| size | hundreds of GB | an H200 has 141 GB<!-- given: NVIDIA's data sheet --> |
| bandwidth | some hundred GB/s | 4.26 TB/s<!-- = ceilings()["dram_bytes_per_second"] / 1e12 --> for a large copy on our H200, measured |
| what lives there | the interpreter, the data loader, batches that wait | parameters, activations, gradients, optimizer state, the batch |

Kernels read and write device memory. Data that a kernel needs has to be copied there first, over the link between the two
(PCIe or NVLink), which is far slower than either memory. There are three directions:

| name | from, to | typical | mind that |
| --- | --- | --- | --- |
| **H2D** | host to device | the next batch | it can overlap with computing, if its source is pinned |
| **D2H** | device to host | a loss to print, a checkpoint | reading the value makes the host wait |
| **D2D** | within a device, or between two | a `clone()`; gradients between GPUs | within one it costs DRAM bandwidth twice: read and write |

**Pinned memory.** The operating system may move ordinary ("pageable") host memory at any time, so the copy engine cannot read
it directly: the driver first copies it, piece by piece, to a buffer that stays where it is. Memory that is *pinned* stays, and
the copy engine reads it without the host's help. `DataLoader(pin_memory=True)` and `tensor.pin_memory()` give such memory; it
is taken away from the rest of the system, so pin batches, not datasets. On the H200 a copy from pinned memory reached
55.4 GB/s<!-- = first_look()["copies"]["H2D pinned"] / 1e9 -->, from pageable memory
6.9 GB/s<!-- = first_look()["copies"]["H2D pageable"] / 1e9 -->. (In the picture D2D counts each byte once; it is read and written, so twice as much passes
through DRAM.)
"""

# %%
look = recorded.first_look()
if look:
    for route, rate in look["copies"].items():
        print(f"{route:14} {rate / 1e9:8.1f} GB/s   (recorded on {look['hardware']}, 256 MiB)")
pictures.show(pictures.draw_copies(), "copies by route on an H200")

# %% [markdown]
"""
## 1.3 Streams

A **stream** is one queue of the device. Within a stream, work runs in the order it was launched. Work in different streams may
run at the same time, if there is room. PyTorch launches everything into one *current stream* per device unless told otherwise,
which is why ordinary code is correct without a thought: the kernel that reads `x` comes after the one that writes it.

A second stream is worth having for one thing above all: copying the next batch while this one is computed. Three lines keep
it correct, and forgetting one of them is a race that shows up once a week:

```python
torch.cuda.current_stream().wait_stream(copies)   # compute only when the copy has arrived
batch.record_stream(torch.cuda.current_stream())  # the allocator may not reuse this memory before we are done
with torch.cuda.stream(copies): ...               # launch the next copy here
```

`programs/unpinned_copy.py` does it in three ways: copying from pageable memory, from pinned memory, and from pinned memory on a
stream of its own while the batch before is computed.
"""

# %%
from unpinned_copy import PROGRAM as unpinned_copy

live = [unpinned_copy.measure(way, steps=10) for way in unpinned_copy.ways_on(device)]
pictures.tell(unpinned_copy, live)
pictures.show(pictures.draw_ways(unpinned_copy, live), "three ways to bring batches to the device")

# %% [markdown]
"""
Two steps on the H200: pinning takes the step from 10.6 ms<!-- = program("unpinned_copy", "unpinned")["median_ms"] --> to
3.29 ms<!-- = program("unpinned_copy", "pinned")["median_ms"] -->, and copying beside the computation to
2.07 ms<!-- = program("unpinned_copy", "prefetched")["median_ms"] -->, which is nearly what the computation takes alone.

For computing, a second stream gains only what the first leaves unused. Small products, replayed as a graph so that launching plays no
part, gain a third; a product that fills the GPU by itself would only share it:
"""

# %%
if look:
    two = look["two_streams"]
    print(
        f"recorded on {look['hardware']}: 40 products of {two['side']}×{two['side']}: {two['one_stream_ms']:.3f} ms on one "
        f"stream, {two['two_streams_ms']:.3f} ms on two ({two['one_stream_ms'] / two['two_streams_ms']:.2f}× faster)"
    )
else:
    print(recorded.NOT_RECORDED)

# %% [markdown]
"""
## 1.4 Synchronisation

To **synchronise** is to make the host wait until the device has caught up. You ask for it with

- `torch.cuda.synchronize()`: everything on a device;
- `stream.synchronize()`, `event.synchronize()`: one stream, or one point in it.

And you get it without asking wherever Python needs a *value*:

| code | why it waits |
| --- | --- |
| `loss.item()`, `float(loss)`, `print(loss)` | the number has to be copied to the host |
| `if (x > 0).all():`, `assert` on a tensor | Python must know which way to go |
| `x.cpu()`, `x.numpy()`, `x.tolist()` | the copy must have arrived |
| `x[mask]`, `torch.nonzero(x)`, `torch.unique(x)` | the size of the result depends on the data |
| `x.to("cuda")` from pageable memory | the driver copies through its own buffer |

One wait costs little. A wait in every step, or for every parameter, empties the queue: the device runs dry and then sits idle
until the host has launched again. `programs/hidden_sync.py` writes down each parameter's gradient norm with `float(...)`.
"""

# %%
from hidden_sync import PROGRAM as hidden_sync

live = [hidden_sync.measure(way) for way in hidden_sync.ways_on(device)]
pictures.tell(hidden_sync, live)

# %% [markdown]
"""
On the H200 the waits cost 0.95 ms<!-- = program("hidden_sync", "norms_read_at_once")["median_ms"] - program("hidden_sync", "norms_kept_on_device")["median_ms"] -->
of a step of 4.40 ms<!-- = program("hidden_sync", "norms_read_at_once")["median_ms"] -->. On a CPU nothing is asynchronous, so nothing
waits: what differs there is a few operators, and how busy the machine is (compare the *fastest* steps). It is a problem that a CPU cannot show, which is
why it survives until the first run on a GPU.

`CUDA_LAUNCH_BLOCKING=1` makes *every* launch wait. It is for finding which kernel raised an error, never for measuring: with it
host and device take turns.

**Is asynchrony dangerous?** Not for results: PyTorch keeps the order within a stream and waits where you read a value. It is
dangerous for clocks.
"""

# %% [markdown]
"""
## 1.5 Timing: the wrong way and the right way

```python
began = time.perf_counter()
y = a @ a
print(time.perf_counter() - began)  # wrong: this is how long it took to *order* the product
```

Two right ways: synchronise before both readings of the clock, or let the device's own clock mark **events** in the stream and
read them when everything is over. Events are better for training steps, because the steps follow each other as in training and
nobody waits in between. `dpscope.instruments.timing.time_steps` does that; every time in this course comes from it.
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

# %% [markdown]
"""
On a CPU the three mean the same, and differ only by how busy the machine is. On the H200 the first says
0.27 ms<!-- = first_look()["three_clocks"]["without_waiting_ms"] --> where the product takes
21.5 ms<!-- = first_look()["three_clocks"]["events_ms"] -->. Worse than wrong, it is plausible. **If a time does not grow with the size of the problem, suspect
the clock.**

The other rules of timing are old: warm up first (allocations, the choice of kernels and the clocks settle), take many steps,
give the median and the spread, and never time under a profiler.
"""

# %% [markdown]
"""
## 1.6 Launches

How small may an operator be? Time `x + 1` for larger and larger `x`:
"""

# %%
from first_look import look as take_a_look

here = take_a_look(device)
pictures.show(pictures.draw_time_by_size(here), "time of x + 1 against its size")

# %% [markdown]
"""
Left, the curve is flat: the time is that of launching, whatever the size (and of the events that time it; without them an operator of
the loop below costs 7.0 µs<!-- = program("launch_bound", "loop")["median_ms"] * 1e3 / 400 --> on the H200). Right, it is a line: time grows with
bytes, and its slope is the memory's bandwidth. The bend of the H200 lies near 100 MB<!-- given: read off the picture -->: everything smaller costs the
same. An operator left of the bend is paid for and not used.

A program whose operators all lie left of the bend is **launch-bound**: the device finishes each one before the next arrives.
`programs/launch_bound.py` updates 400 small parameters one by one, then in one call (`torch._foreach_add_`, which is what
PyTorch's optimizers do), then by replaying a recorded CUDA graph.
"""

# %%
from launch_bound import PROGRAM as launch_bound

live = [launch_bound.measure(way) for way in launch_bound.ways_on(device)]
pictures.tell(launch_bound, live)
pictures.show(pictures.draw_ways(launch_bound, live), "an optimizer step in three ways")

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

The device consists of **streaming multiprocessors** (SMs); an H200 has 132. Each holds many warps at once and switches between
them without cost: while one waits for memory, another computes. That is how a GPU hides latency: not with large caches but with
many warps. **Occupancy** is how many warps an SM holds compared with how many it could; registers and shared memory of a block
limit it.

So a kernel needs enough blocks for all SMs, enough warps on each to hide latency, and neighbouring threads that read
neighbouring addresses, for memory comes in whole sectors of 32 bytes whether you use them or not.
"""

# %% [markdown]
"""
## 1.8 Memories within memory

| level | where | size on an H200 | who sees it |
| --- | --- | --- | --- |
| registers | in the SM | 256 KB<!-- given: CUDA programming guide, compute capability 9.0 --> an SM | one thread |
| shared memory and L1 | in the SM | 256 KB<!-- given: CUDA programming guide, compute capability 9.0 --> an SM, together | a block |
| L2 | on the chip | 50 MB<!-- given: NVIDIA's data sheet --> | everyone |
| HBM ("DRAM", "global memory") | beside the chip | 141 GB<!-- given: NVIDIA's data sheet --> | everyone, slowly |
| host memory | across the link | hundreds of GB | by copies |

Each level is larger and slower than the one above. What fits in registers and shared memory is nearly free; what goes to HBM
and comes back is what time is spent on. **Fusion** is the art of doing more before writing back: `2a + b` as two operators
writes a temporary tensor and reads it again, five trips through HBM where three would do.
"""

# %%
from memory_bound import PROGRAM as memory_bound

live = [memory_bound.measure(way) for way in memory_bound.ways_on(device)]
pictures.tell(memory_bound, live)
pictures.show(pictures.draw_ways(memory_bound, live), "2a + b in two operators and in one")

# %% [markdown]
"""
Fewer bytes, less time, although the arithmetic is the same: on the H200 one operator is
1.68×<!-- = program("memory_bound", "two_operators")["median_ms"] / program("memory_bound", "one_operator")["median_ms"] --> as fast as two, and five trips to
three would be 1.67×<!-- given: 5 / 3 -->. (On a CPU the gain can be larger than 5 to 3: the temporary tensor is
also fresh memory that the operating system has to hand over page by page.)
"""

# %% [markdown]
"""
## 1.9 What is it bound by?

Divide the operations of a kernel by the bytes it moves: its **arithmetic intensity**. The machine has such a ratio too. Our
H200 reaches 786 TFLOP/s<!-- = ceilings()["tensor_flops_per_second"] / 1e12 --> on tensor cores in bfloat16 and
4.26 TB/s<!-- = ceilings()["dram_bytes_per_second"] / 1e12 -->, so about
184 operations<!-- = ceilings()["tensor_flops_per_second"] / ceilings()["dram_bytes_per_second"] --> for each byte.

- Below that ratio a kernel is **memory-bound**: it waits for bytes. Additions, norms, softmax, optimizers, copies. Move fewer
  bytes: fuse, use a smaller number format, do not materialise.
- Above it, it is **compute-bound**: large matrix products and convolutions. Use tensor cores (bfloat16, TF32), skip work.
- If neither is near its limit and the device is idle in between, the program is **launch-bound** (1.6), or waits for copies or
  the host. Faster kernels change nothing.
"""

# %%
from compute_bound import PROGRAM as compute_bound

live = [compute_bound.measure(way, steps=10) for way in compute_bound.ways_on(device)]
pictures.tell(compute_bound, live)

# %% [markdown]
"""
The same product, 8192³ on the H200: 51.3 TFLOP/s<!-- = program("compute_bound", "float32")["flops"] / program("compute_bound", "float32")["median_ms"] / 1e9 -->
in float32, 789 TFLOP/s<!-- = program("compute_bound", "bfloat16")["flops"] / program("compute_bound", "bfloat16")["median_ms"] / 1e9 --> in bfloat16. No other
single change to a training script is worth as much.
"""

# %% [markdown]
"""
## 1.10 Common bottlenecks, and what to do

| what you see | where you see it | usual cause | what to do |
| --- | --- | --- | --- |
| GPU idle, host busy | timeline (tutorials 2 and 4) | too many small operators | larger batch, fused operators, `foreach` optimizers, `torch.compile`, CUDA graphs |
| GPU idle after each step | timeline: a wait, then a gap | `.item()`, `print`, `if tensor` | keep values on the device, read them rarely |
| gaps at the start of a step | timeline: the loader's threads | slow loading or preprocessing | more workers, `persistent_workers`, prefetching |
| long H2D copies, nothing beside them | timeline: copy lanes | pageable memory | `pin_memory=True`, `non_blocking=True`, a stream for copies |
| DRAM near its limit, arithmetic low | ncu, speed of light (tutorial 3) | elementwise work, optimizer, norms | fuse, smaller number formats, do not store what can be recomputed |
| arithmetic near its limit | ncu | large products | tensor cores, less work; then it is as fast as it gets |
| both low, warps stalled | ncu, warp states | latency: few warps, scattered reads, barriers | more parallelism, coalesced access |
| tensor cores idle in a product | ncu, compute workload | float32 without TF32, odd shapes | bfloat16, multiples of 8 or 16 |
| out of memory | `dpscope memory` (tutorial 5) | activations, per-sample gradients | smaller batch, checkpointing, another clipping method |
| first steps slow | trace of early steps | allocation, choice of kernels, compiling | warm up before measuring |
"""

# %% [markdown]
"""
## 1.11 The running example: a private step

Differentially private training (DP-SGD) clips the gradient of *every sample* before summing, and adds noise. The three ways to do
so differ in exactly the terms of this page. On an H200, a transformer of 1.17 billion parameters, batch 8, sequence 1024, bf16:

| method | time of a step | × ordinary | what it is bound by |
| --- | --- | --- | --- |
| `standard` (not private) | 126.8 ms<!-- = ms("page", "standard") --> | 1.00×<!-- = times("page", "standard") --> | products and bytes, GPU busy |
| `flat` (Opacus) | 266.5 ms<!-- = ms("page", "flat") --> | 2.10×<!-- = times("page", "flat") --> | writes every sample's gradient to memory and reads it back |
| `ghost` (Opacus) | 345.1 ms<!-- = ms("page", "ghost") --> | 2.72×<!-- = times("page", "ghost") --> | a second backward pass, and host waits |
| `flash` (dpscope) | 137.8 ms<!-- = ms("page", "flash") --> | 1.09×<!-- = times("page", "flash") --> | as ordinary training |

Why, and how one finds out, is the rest of the course. The picture is drawn by dpscope from the recorded results:
"""

# %%
from dpscope.reports.time.figures import draw_tradeoff

pictures.show(draw_tradeoff(recorded.sweep("page").rows), "memory against time of four methods on an H200")

# %% [markdown]
"""
## Exercises

1. Where is the bend of section 1.6 on your machine? Find the smallest size at which twice the bytes take at least 1.7 times as
   long<!-- given -->.
2. Write a function that says whether an operator is memory- or compute-bound on the H200, from its operations and bytes. Try it on
   `x + 1`, on a 4096³ product in bfloat16, and on the product of a 1×4096 vector with a 4096×4096 matrix.
3. How many synchronisations are in `loss = f(x); if loss > best: best = loss.item(); print(best)` on a GPU?

Solutions follow; they run.
"""

# %%
# Solution 1
from itertools import pairwise
from math import log2

bend = None
for a, b in pairwise(here["time_by_size"]):
    doublings = log2(b["bytes"] / a["bytes"])
    growth = (b["median_ms"] / a["median_ms"]) ** (1 / doublings)
    if growth >= 1.7:
        bend = b["bytes"]
        break
print(f"the bend is near {bend / 1024:.0f} KiB" if bend else "no bend: try larger sizes")

# %%
# Solution 2
roof = recorded.ceilings()
balance = roof["tensor_flops_per_second"] / roof["dram_bytes_per_second"]


def bound_by(flops: float, nbytes: float) -> str:
    return f"{flops / nbytes:8.2f} FLOP/byte: {'compute' if flops / nbytes > balance else 'memory'}-bound"


print("x + 1           ", bound_by(1, 8))
print("4096³, bfloat16 ", bound_by(2 * 4096**3, 3 * 2 * 4096**2))
print("vector × matrix ", bound_by(2 * 4096**2, 2 * (4096**2 + 2 * 4096)))

# %% [markdown]
"""
Solution 3: one in every call, two when it is a new best. `if loss > best` needs a truth value; `.item()` needs a number; printing
a Python float costs nothing, but had `best` stayed a tensor, `print` would wait too. Keep `best` on the device
(`torch.minimum`) and print it every hundred steps.

(The vector with the matrix is why generating text one token at a time is memory-bound, while training is not.)
"""

# %%
assert "memory" in bound_by(1, 8) and "compute" in bound_by(2 * 4096**3, 6 * 4096**2)

# %% [markdown]
"""
## Quiz

**1. A loop of tiny operators takes 5 ms<!-- given --> on a GPU that costs ten times as much as the old one, and took 5 ms<!-- given --> there. Why?**

<details><summary>Answer</summary>

It is launch-bound: the time is the host's. A faster device only idles longer. Fewer launches help (fused operators, CUDA graphs),
or a faster CPU.

</details>

**2. `time.perf_counter()` around a step without synchronising shows 3 ms<!-- given -->; with synchronising 120 ms<!-- given -->. Is the first number good for anything?**

<details><summary>Answer</summary>

Yes: it is how long the host needs to launch the step. As long as it is below the second, the host keeps up and the device is never
hungry. It is not the time of the step.

</details>

**3. Why is `non_blocking=True` useless with pageable memory?**

<details><summary>Answer</summary>

The driver has to copy the data to its own pinned buffer first, and the host does that. The call returns when the data has been
taken over, and what runs beside it is little.

</details>

**4. A kernel reads 1 GB<!-- given --> and does 10 GFLOP<!-- given -->. Which limit does it meet first on the H200?**

<details><summary>Answer</summary>

Ten operations a byte are far below the machine's balance of section 1.9: memory. At full bandwidth it takes about a quarter of a
millisecond; the arithmetic alone would take a twentieth of that on tensor cores.

</details>

**5. Occupancy is low. Is the kernel slow?**

<details><summary>Answer</summary>

Not necessarily. Occupancy is a means to hide latency. Matrix kernels keep large tiles in registers and shared memory, run at low
occupancy and reach the arithmetic limit.

</details>

## What to remember

- The host orders, the device works, and a queue lies between them. Speed is a question of who waits.
- A time without synchronisation is the time of ordering. Use events, or `time_steps`.
- Launch-bound: fewer launches. Memory-bound: fewer bytes. Compute-bound: a better format, or less work.
- Values that Python reads are synchronisations. Pinned memory is what makes copies asynchronous.
- Know your machine's ratio of operations to bytes.

**Further**: [CUDA programming guide](https://docs.nvidia.com/cuda/cuda-c-programming-guide/), [GPU glossary](https://modal.com/gpu-glossary),
[How to think about GPUs](https://jax-ml.github.io/scaling-book/gpus/), [our own glossary](glossary.md). Next: [PyTorch Profiler](02-pytorch-profiler.ipynb), which
shows all this for a real model.
"""
