# %% [markdown]
"""
# 6. 多个 GPU

*最后验证：2026-11-16，CPU 上用 torch 2.13，NVIDIA H200 上用 torch 2.11。*

**难度**：进阶。**预备知识**：第 [1](01-how-a-gpu-step-works.ipynb)、[2](02-pytorch-profiler.ipynb)、[4](04-nsight-systems.ipynb) 课。**时间**：阅读约 15 分钟，练习另需 25 分钟左右。

有了多个 GPU，就有了新的问题：**一步里有多少时间花在通信上，有没有人在等更慢的 rank？** 工具还是那些，要看的东西不同。

**什么是真的，什么不是。** 我们只有一块 H200。这一课里测量的内容，都是用 **gloo** 后端运行多个**进程**（rank）：一是在你的 CPU 上，二是在那一块 H200 上，两个 rank 共用一块卡，梯度经主机传输。所以**结构**是真实的（有哪些集合通信、在什么位置、谁在等），而**速度**不是 NCCL 经 NVLink 的速度。每张图都注明来源。这里没有任何数字是在多块 GPU 上测的。

**读完之后你能够**

- 说出 all-reduce、reduce-scatter 和 all-gather 做什么，各要多少代价；
- 用 `torchrun` 启动多个 rank，录下每个 rank 的 trace，在其中找到集合通信；
- 区分暴露的通信和被重叠的通信，区分慢的网络和慢的 rank；
- 说出 DDP、FSDP2 和差分隐私的一步各传输什么。

答案：[solutions/lesson_6.py](../solutions/lesson_6.py)。
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

language.use("zh")

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
## 6.1 链路和集合通信

| 链路 | 连接 | 单向带宽 | 怎么查看 |
| --- | --- | --- | --- |
| NVLink 4，经 NVSwitch | 一台机器内的 GPU（H100、H200） | 每块 GPU 450 GB/s<!-- given: NVIDIA's data sheet --> | `nvidia-smi topo -m` 显示 `NV18`；`nvidia-smi nvlink --status` |
| PCIe 5，16 通道 | GPU 与主机，或没有 NVLink 的 GPU | 63 GB/s<!-- given: the standard --> | `topo -m` 显示 `PIX`、`PHB` 或 `SYS` |
| InfiniBand 或带 RDMA 的以太网 | 机器之间 | 每块网卡 50 GB/s<!-- given: 400 Gbit/s --> | NCCL 日志里的 `NET` |

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
rank 之间不是随意收发，而是一起调用**集合通信**；在 GPU 上由 **NCCL** 执行，在 CPU 上由 gloo 执行。训练中重要的有三种：

| 集合通信 | 之前，两个 rank | 之后 | 用途 |
| --- | --- | --- | --- |
| all-reduce | `[1, 2]` 和 `[10, 20]` | 两边都是 `[11, 22]` | DDP 的梯度 |
| reduce-scatter | `[1, 2]` 和 `[10, 20]` | `[11]` 和 `[22]` | FSDP 的梯度 |
| all-gather | `[1, 2]` 和 `[10, 20]` | 两边都是 `[1, 2, 10, 20]` | FSDP 的参数 |

all-reduce 等于 reduce-scatter 之后再 all-gather。每个 rank 必须以相同的顺序调用相同的集合通信，只要有一个不一致，全部都会卡住。`NCCL_DEBUG=INFO` 会打印 NCCL 的选择，`TORCH_NCCL_TRACE_BUFFER_SIZE` 会留下记录，便于排查卡死。

**练习 6.1。** 把这三种写成函数：输入是列表的列表（每个 rank 一个），输出也是。
"""


# %%
def all_reduce(ranks): ...


def reduce_scatter(ranks): ...


def all_gather(ranks): ...


# %%
check("6.1", {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather})

# %% [markdown]
"""
## 6.2 一次集合通信的代价

环形算法把数据一块块地传一圈。n 个 rank、N 字节的 all-reduce，每个 rank 要发送 2 (n − 1) / n · N 字节，时间大约是

> 2 (n − 1) 跳的延迟 + 2 (n − 1) / n · N / 带宽。

小消息的代价是延迟，大消息的代价是带宽：和 1.6 节的启动一样有拐点，改法也一样，次数少一些、每次大一些。下面的单元在你的 CPU 上启动两个 rank（`programs/ranks.py --lesson`，10 到 20 秒），运行这一课的全部内容；先看大小递增的 all-reduce：
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
要在自己的 GPU 上测 NCCL：用 `torchrun --nproc-per-node=N`，循环调用 `dist.all_reduce` 并用事件计时，或者用 NVIDIA 的 nccl-tests。与公式按链路带宽算出的结果比较：如果差很多，说明 NCCL 退回到了更慢的通路（`NCCL_DEBUG=INFO` 会说明）。

**练习 6.2。** 返回环形 all-reduce 的毫秒数，不计延迟。
"""


# %%
def ring_ms(nbytes, ranks, gb_per_second): ...


# %%
check("6.2", ring_ms)

# %% [markdown]
"""
## 6.3 DDP：重叠

`DistributedDataParallel` 让每个 rank 各有一份模型、各算一部分批次，再对梯度取平均。它不等反向传播结束：参数分成若干**桶（bucket）**，一个桶的梯度齐了就开始归约，反向传播同时继续。被反向传播盖住的通信不花时间，露在外面的叫**暴露**的通信。

```bash
python -m torch.distributed.run --nproc-per-node=2 programs/ranks.py --parallel ddp --device cuda --collectives --out recorded/ranks
```

（`torchrun` 是 `python -m torch.distributed.run` 的简写。）下面是刚才在本机运行的 rank 0 的 trace，先是一个大桶，再是多个小桶：
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
只有一个桶时，要等最后一个梯度算完才能开始传输：集合通信单独出现，`backward` 一直持续到它结束。有多个桶时，先齐的桶在继续计算的同时就传走了。桶太小又会被延迟拖累：DDP 的默认值是 25 MB<!-- given: PyTorch's default bucket_cap_mb -->。

在真实的多 GPU 上，用 nsys 或 Perfetto 找名为 `ncclDevKernel_AllReduce…` 的 kernel，它们有自己的流：旁边有别的 kernel 就是重叠的，单独出现就是暴露的。它们等待其他 rank 时也占用 SM，所以 NCCL kernel **长**不代表网络慢（6.4 节）。

**练习 6.3。** 集合通信共 `collective` 毫秒，可以藏在 `backward` 毫秒之下。暴露多少？
"""


# %%
def exposed_ms(collective, backward): ...


# %%
check("6.3", exposed_ms)

# %% [markdown]
"""
## 6.4 一个慢的 rank

集合通信要等最后一个 rank 到达才结束。如果有一个 rank 迟到，其他 rank 都**在集合通信里**等待，任何一个的 profile 都会显示“通信慢”。先比较各个 rank，再怪网络。这里 rank 1 每步之前睡 20 ms<!-- given: the option --slow-ms -->，就像数据来晚了：
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
集合通信**长**的是快的 rank；集合通信**短**的那个才是要查的。HolisticTraceAnalysis 和 `dpscope compare --gpus N`（给出最慢 rank 的时间）可以对很多 rank 做这样的比较。

**练习 6.4。** `own_ms` 是每个 rank 在集合通信之前计算的时间。各自要等多久？
"""


# %%
def waits(own_ms): ...


# %%
check("6.4", waits)

# %% [markdown]
"""
## 6.5 FSDP2

`fully_shard` 把参数、梯度和优化器状态分给各个 rank。一个模块运行之前，先 **all-gather** 它的参数；运行之后释放。反向传播时再收集一次，梯度做 **reduce-scatter**。显存降到 rank 数分之一，传输的数据更多。

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
六个模块：前向各收集一次，反向再各收集一次，各做一次 reduce-scatter。（gloo 用 all-reduce 来完成 reduce-scatter，所以 trace 里的名字是 `gloo:all_reduce`；NCCL 有专门的 kernel。）健康的 trace 里，模块 n + 1 的收集藏在模块 n 的计算之下（**预取**）。如果收集和计算轮流进行，就是模块太小，或者网络相对于批次太慢。

**练习 6.5。** `nbytes` 是全部参数的字节数（梯度同样多）。`"ddp"` 和 `"fsdp"` 时，每个 rank 一步发送多少字节？每次收集、每次 reduce-scatter 各算 (n − 1) / n。
"""


# %%
def sent_bytes(parallel, nbytes, ranks): ...


# %%
check("6.5", sent_bytes)

# %% [markdown]
"""
## 6.6 多 GPU 上的差分隐私训练步

裁剪系数需要一个样本**全部**参数的范数；参数分片之后，范数要跨 rank 求和。dpscope 会统计传输的字节。**模拟**，2026-11-16：一块 H200 充当八个 rank 之一，Llama 8B，FSDP2，每个 rank 批次 1，序列 1024；torch 的假进程组让每次集合通信立刻返回，所以时间里没有传输，字节数由调用统计得出：
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
standard 和 flash 传输的字节相同；ghost 的第二遍反向传播要再收集、再归约一次。在你自己的机器上：

```bash
dpscope compare --model tiny --methods standard,flash --gpus 2 --parallel ddp
dpscope compare --model tiny --methods standard,flash --simulate-world 8 --parallel fsdp
```

**练习 6.6。** float32 的权重、梯度和 Adam 的两个动量：分片和不分片时，一个 rank 各占多少 GiB？（不计激活。）
"""


# %%
def gib_a_rank(parameters, ranks, sharded): ...


# %%
check("6.6", gib_a_rank)

# %% [markdown]
"""
## 小测验

**1. rank 0 的 all-reduce 用了 40 ms<!-- given -->，rank 3 用了 2 ms<!-- given -->。该查哪一个？**

<details><summary>答案</summary>

rank 3：它最后到。看它之前在做什么：数据加载、更热的卡、更长的序列。

</details>

**2. NCCL kernel 占 GPU 时间的三分之一，全部与计算并行。网络更快能带来多少收益？**

<details><summary>答案</summary>

很少：它们已经重叠了。不过它们占用计算的 SM 和带宽，所以可能有一点收益。

</details>

**3. 一步永远卡住，GPU 利用率 100 %<!-- given -->。为什么是 100 %<!-- given -->？**

<details><summary>答案</summary>

NCCL 的 kernel 在等待时空转。有的 rank 没有调用同样的集合通信：取决于数据的分支、某个 rank 上的异常、空批次。

</details>

## 要记住的

- 集合通信要等最后一个 rank。快的 rank 上长，慢的 rank 上短。
- 只有暴露的通信才花时间。找单独出现的 NCCL kernel。
- 小消息的代价是延迟：用桶。
- FSDP 的传输量是 DDP 的 1.5 倍<!-- given: 3 / 2 -->，显存按 rank 数分摊。
- 一块 GPU 能看结构，看不了速度。说清楚你测的是哪一个。

**延伸阅读**：[DDP](https://docs.pytorch.org/docs/stable/notes/ddp.html)、[FSDP2](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html)、[NCCL](https://docs.nvidia.com/deeplearning/nccl/)、[dpscope 的多 GPU 文档](../../docs/distributed.md)。下一课：[找出瓶颈](07-find-the-bottleneck.ipynb)。
"""
