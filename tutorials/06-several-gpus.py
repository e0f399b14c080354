# %% [markdown]
"""
# 6. Several GPUs

*Last verified: 2026-11-16, torch 2.13 on a CPU, torch 2.11 on an NVIDIA H200.*

**Level:** deeper. **Assumes:** lessons [1](01-how-a-gpu-step-works.ipynb), [2](02-pytorch-profiler.ipynb) and [4](04-nsight-systems.ipynb). **Time:** 15 minutes to read, about 25 more for the exercises.

With several GPUs a new question comes up: *how much of the step is spent sending, and does anyone wait for a slower rank?* The tools are the same; what to look for is new.

**What is real here, and what is not.** We have one H200. Everything measured in this lesson runs several *processes* (ranks) with the backend **gloo**: on your CPU, and on the one H200, where both ranks share the card and their gradients
travel through the host. So the *structure* is real (which collectives, where they lie, who waits), and their *speed* is not that of NCCL over NVLink. Each figure says where it comes from. Nothing here was measured on several GPUs.

**After it you can**

- say what all-reduce, reduce-scatter and all-gather do, and what each costs;
- start ranks with `torchrun`, trace each of them, and find the collectives in the traces;
- tell exposed communication from overlapped, and a slow network from a slow rank;
- say what DDP and FSDP2 send, and what a private step sends.

Solutions: [solutions/lesson_6.py](solutions/lesson_6.py).
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
import statistics
import tempfile

import pictures
import rank_traces
import recorded
import windows
from checks import check
from language import say

workplace = Path(tempfile.mkdtemp())

# %% [markdown]
"""
## 6.1 Links and collectives

| link | between | bandwidth, one direction | how to see it |
| --- | --- | --- | --- |
| NVLink 4 through NVSwitch | GPUs of one machine (H100, H200) | 450 GB/s<!-- given: NVIDIA's data sheet --> a GPU | `nvidia-smi topo -m` says `NV18`; `nvidia-smi nvlink --status` |
| PCIe 5, 16 lanes | GPU and host, or GPUs without NVLink | 63 GB/s<!-- given: the standard --> | `topo -m` says `PIX`, `PHB` or `SYS` |
| InfiniBand or Ethernet with RDMA | machines | 50 GB/s<!-- given: 400 Gbit/s --> a card | `NET` in NCCL's log |

```bash
nvidia-smi topo -m
nvidia-smi nvlink --status
```
"""

# %%
print(recorded.output("nvidia-smi-topology", last=12))
print(recorded.output("nvidia-smi-nvlink", last=6) or "(one GPU: no NVLink to another)")

# %% [markdown]
"""
Ranks do not send to each other at will. They call **collectives** together; **NCCL** carries them out on GPUs, gloo on CPUs. Three matter for training:

| collective | before, on two ranks | after | used for |
| --- | --- | --- | --- |
| all-reduce | `[1, 2]` and `[10, 20]` | `[11, 22]` on both | gradients in DDP |
| reduce-scatter | `[1, 2]` and `[10, 20]` | `[11]` and `[22]` | gradients in FSDP |
| all-gather | `[1, 2]` and `[10, 20]` | `[1, 2, 10, 20]` on both | parameters in FSDP |

An all-reduce is a reduce-scatter followed by an all-gather. Every rank must call the same collectives in the same order; if one does not, all hang. `NCCL_DEBUG=INFO` prints what NCCL chose, and `TORCH_NCCL_TRACE_BUFFER_SIZE` keeps a record for hangs.

**Exercise 6.1.** Write the three as functions from a list of lists (one for each rank) to a list of lists.
"""


# %%
def all_reduce(ranks): ...


def reduce_scatter(ranks): ...


def all_gather(ranks): ...


# %%
check("6.1", {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather})

# %% [markdown]
"""
## 6.2 What a collective costs

A ring passes pieces around. For n ranks and N bytes an all-reduce makes each rank send 2 (n − 1) / n · N bytes, so its time is about

> latency of 2 (n − 1) hops + 2 (n − 1) / n · N / bandwidth.

Small messages pay latency, large ones bandwidth: the same bend as for launches in lesson 1.6, and the same remedy, fewer and larger. The next cell starts two ranks on your CPU (`programs/ranks.py --lesson`, 10 to 20 seconds) and runs everything that this lesson shows; first all-reduces of growing size:
"""

# %%
runs = rank_traces.start(workplace)
kept = recorded.rank("ddp")
series = {say("gloo, 2 ranks, this CPU", "gloo，2 个 rank，本机 CPU"): runs["ddp"][0]["all_reduce"]}
if kept:
    series[say("gloo, 2 ranks on one H200, through the host", "gloo，一块 H200 上 2 个 rank，经主机")] = kept[
        "all_reduce"
    ]
pictures.show(
    pictures.draw_collectives(series),
    "Time of all_reduce by size, with gloo. Not NCCL: read the shape of the curve, not its height.",
    "gloo 的 all_reduce 时间与大小的关系。这不是 NCCL：看曲线的形状，不要看高度。",
)

# %% [markdown]
"""
To measure NCCL on your own GPUs: `torchrun --nproc-per-node=N` with a loop over `dist.all_reduce` timed by events, or NVIDIA's nccl-tests. Compare with the formula at the link's bandwidth: well below it means that NCCL fell back to a slower path
(`NCCL_DEBUG=INFO` says which).

**Exercise 6.2.** Return the milliseconds of a ring all-reduce, latency left out.
"""


# %%
def ring_ms(nbytes, ranks, gb_per_second): ...


# %%
check("6.2", ring_ms)

# %% [markdown]
"""
## 6.3 DDP: overlap

`DistributedDataParallel` gives each rank a copy of the model and its own part of the batch, and averages gradients. It does not wait for the end of the backward pass: parameters are grouped into **buckets**, and a bucket is
reduced as soon as its gradients are there, while the backward pass goes on. What lies under the backward pass is free; what sticks out is **exposed**.

```bash
python -m torch.distributed.run --nproc-per-node=2 programs/ranks.py --parallel ddp --device cuda --collectives --out recorded/ranks
```

(`torchrun` is a short name for `python -m torch.distributed.run`.) The trace of rank 0, from the steps that ran here, first with one large bucket, then with small ones:
"""

# %%
for name, zh, folder in (("one large bucket", "一个大桶", "ddp"), ("buckets of 0.3 MB", "每桶 0.3 MB", "small")):
    trace = workplace / folder / "ddp-rank0.trace.json.gz"
    sending, inside = rank_traces.overlapped(trace)
    print(f"{name}: {sending:.2f} ms in collectives, {inside:.2f} ms of it while this rank computes")
    pictures.show(
        windows.draw_perfetto_window(rank_traces.tracks(trace), f"ddp-rank0, {name}"),
        f"DDP on rank 0 of two, {name}; gloo on this CPU. Drawn from the trace as Perfetto lays it out: 2 phases, 3 operators, 4 collectives.",
        f"两个 rank 中 rank 0 的 DDP 一步，{zh}；本机 CPU 上的 gloo。按 Perfetto 的布局绘制：2 为阶段，3 为算子，4 为集合通信。",
    )

# %% [markdown]
"""
With one bucket nothing can be sent before the last gradient is there: the collective lies alone, and `backward` lasts until it ends. With several, the first buckets travel while the rank still computes. Buckets too small pay latency again: DDP's default is 25 MB<!-- given: PyTorch's default bucket_cap_mb -->.

In nsys or Perfetto on real GPUs look for kernels named `ncclDevKernel_AllReduce…` on a stream of their own: beside other kernels they are overlapped, alone they are exposed. They occupy SMs while they wait for other ranks, so a *long*
NCCL kernel does not mean a slow network (6.4).

**Exercise 6.3.** Collectives take `collective` ms and can hide under `backward` ms. How much is exposed?
"""


# %%
def exposed_ms(collective, backward): ...


# %%
check("6.3", exposed_ms)

# %% [markdown]
"""
## 6.4 A slow rank

A collective ends when the last rank has come. If one rank is late, all others wait *inside the collective*, and a profile of any of them says "communication is slow". Compare ranks before you blame the network. Here rank 1 sleeps for 20 ms<!-- given: the
option --slow-ms --> before each step, as if its data came late:
"""

# %%
for rank in (0, 1):
    sending, _ = rank_traces.overlapped(workplace / "late" / f"ddp-rank{rank}.trace.json.gz")
    print(
        f"rank {rank}: step {statistics.median(runs['late'][rank]['step_ms']):.1f} ms, in collectives {sending:.1f} ms of a traced step"
    )
pictures.show(
    windows.draw_perfetto_window(
        rank_traces.tracks(workplace / "late" / "ddp-rank0.trace.json.gz"), "ddp-rank0, rank 1 is late"
    ),
    "The fast rank: its collective lasts as long as it waits for the late one. gloo on this CPU.",
    "快的 rank：它的集合通信一直持续到慢的 rank 到达。本机 CPU 上的 gloo。",
)

# %% [markdown]
"""
The rank with the *long* collective is the fast one. The one with the *short* collective is the one to look at. HolisticTraceAnalysis and `dpscope compare --gpus N` (slowest rank's time) make this comparison for many ranks.

**Exercise 6.4.** `own_ms` is how long each rank computes before the collective. How long does each wait?
"""


# %%
def waits(own_ms): ...


# %%
check("6.4", waits)

# %% [markdown]
"""
## 6.5 FSDP2

`fully_shard` splits parameters, gradients and optimizer state among ranks. Before a block runs, its parameters are **all-gathered**; after it, they are freed. In the backward pass they are gathered again, and gradients are **reduce-scattered**. Memory falls by the number
of ranks, and more is sent.

```bash
python -m torch.distributed.run --nproc-per-node=2 programs/ranks.py --parallel fsdp --device cuda --out recorded/ranks
```
"""

# %%
from collections import Counter

trace = workplace / "fsdp" / "fsdp-rank0.trace.json.gz"
names = Counter(
    event["name"]
    for event in rank_traces.events_of(trace)
    if event["name"].startswith(("c10d::_allgather", "c10d::_reduce_scatter", "c10d::allreduce"))
)
print("collectives that PyTorch called in one step of six blocks:", dict(names))
for how in ("ddp", "fsdp"):
    print(
        f"{how}: {statistics.median(runs[how][0]['step_ms']):.1f} ms a step on this CPU (gloo; speed says nothing about GPUs)"
    )
pictures.show(
    windows.draw_perfetto_window(rank_traces.tracks(trace), "fsdp-rank0"),
    "FSDP2 on rank 0 of two: gathers in forward and backward, reductions in backward. gloo on this CPU.",
    "两个 rank 中 rank 0 的 FSDP2 一步：前向和反向都有 all-gather，反向还有归约。本机 CPU 上的 gloo。",
)

# %% [markdown]
"""
Six blocks: a gather for each in the forward pass, one more in the backward pass, and a reduce-scatter for each. (gloo carries out the reduce-scatter as an all-reduce, so its own name in the trace is `gloo:all_reduce`; NCCL has a kernel for it.)
In a healthy trace the gather of block n + 1 lies under the computation of block n (*prefetching*). If gathers and computation take turns, the blocks are too small, or the network too slow, for the batch.

**Exercise 6.5.** `nbytes` are the bytes of all parameters (gradients have as many). How many bytes does each rank send in a step with `"ddp"` and with `"fsdp"`? Count (n − 1) / n for each gather and each reduce-scatter.
"""


# %%
def sent_bytes(parallel, nbytes, ranks): ...


# %%
check("6.5", sent_bytes)

# %% [markdown]
"""
## 6.6 A private step on several GPUs

Clipping factors need norms over *all* parameters of a sample; where these are sharded, norms have to be summed across ranks. dpscope counts what is sent. **Simulated** on 2026-11-16: one H200 as one rank of eight, Llama 8B, FSDP2, batch 1 a rank, sequence 1024; torch's
fake process group returns from every collective at once, so times contain no sending, and bytes are counted from the calls:
"""

# %%
world = recorded.RESULTS / "2026-11-16-h200-simulated-world.md"
print(
    "\n".join(
        line
        for line in world.read_text(encoding="utf-8").splitlines()
        if line.startswith(("**Simulated", "Per step", "59.83", "| `--batch-size 1`"))
    )
)

# %% [markdown]
"""
Standard and flash send the same bytes; ghost's second backward pass gathers and reduces once more. On your own machine:

```bash
dpscope compare --model tiny --methods standard,flash --gpus 2 --parallel ddp
dpscope compare --model tiny --methods standard,flash --simulate-world 8 --parallel fsdp
```

**Exercise 6.6.** Weights, gradients and Adam's two moments in float32: how many GiB does a rank hold, sharded or not? (Activations left out.)
"""


# %%
def gib_a_rank(parameters, ranks, sharded): ...


# %%
check("6.6", gib_a_rank)

# %% [markdown]
"""
## Quiz

**1. On rank 0 the all-reduce takes 40 ms<!-- given -->, on rank 3 it takes 2 ms<!-- given -->. Which one do you look at?**

<details><summary>Answer</summary>

Rank 3: it came last. Look at what it did before: its data loader, a hotter card, a longer sequence.

</details>

**2. NCCL kernels fill a third of the GPU's time, all beside computation. What can you gain by a faster network?**

<details><summary>Answer</summary>

Little: they are overlapped. They do take SMs and bandwidth from the computation, so a small gain is possible.

</details>

**3. A step hangs for ever, GPUs at 100 %<!-- given --> utilisation. Why 100 %<!-- given -->?**

<details><summary>Answer</summary>

An NCCL kernel spins while it waits. Some rank did not call the same collective: a branch that depends on data, an exception on one rank, an empty batch.

</details>

## What to remember

- A collective ends when the last rank comes. Long on the fast rank, short on the slow one.
- Only exposed communication costs time. Look for NCCL kernels that lie alone.
- Small messages pay latency: buckets.
- FSDP sends 1.5 times<!-- given: 3 / 2 --> as much as DDP and holds a share of the memory.
- One GPU can show structure, not speed. Say which you measured.

**Further**: [DDP](https://docs.pytorch.org/docs/stable/notes/ddp.html), [FSDP2](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html), [NCCL](https://docs.nvidia.com/deeplearning/nccl/), [several GPUs in dpscope](../docs/distributed.md). Next: [Find the bottleneck](07-find-the-bottleneck.ipynb).
"""
