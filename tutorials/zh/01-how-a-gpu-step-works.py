# %% [markdown]
"""
# 1. GPU 上的一步训练是怎么跑的

*最后验证：2026-11-15，CPU 上用 torch 2.13，NVIDIA H200 上用 torch 2.11。*

训练的一步看起来不过五行 Python。底下其实是两个处理器：一个下命令，一个干活。几乎所有"为什么慢"的问题，归根结底都是谁在等谁。这一篇先把这幅图画清楚，后面四篇都建立在它上面。

**读完之后你能够**

- 说清哪些事在主机（host）上做，哪些在设备（device）上做，命令和数据怎样在两边往来；
- 正确地给一步计时，也能一眼看出别人测错了；
- 区分启动受限、访存受限和计算受限的程序，并说出各自的对策；
- 列出普通 PyTorch 代码里那些看不见的同步。

任何机器都能运行。没有 GPU 时，各单元测的是 CPU，旁边给出在 NVIDIA H200 上录下的结果；有 GPU 时测的就是你自己的卡。练习用的小程序在 `programs/` 里。
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
## 1.1 两个处理器

Python 从来不在 GPU 上运行。`y = torch.relu(x @ w)` 由**主机**（CPU）一层层执行：

1. 你的代码调用一个 PyTorch 算子；
2. PyTorch 的 C++ 库（ATen）检查形状、分配结果、挑一个 **kernel**，也就是给 GPU 的小程序；
3. CUDA 运行时把 kernel 和参数放进**设备**（GPU）的一个**队列**，随即返回。

设备按顺序从队列里取命令执行。主机通常跑在前面：它已经下达的命令，设备还没开始做。这正是我们想要的，因为这样设备永远不用等。

由此得到两个结论。第一，每个算子都要花掉主机几微秒，不管它算的东西多小，所以一大堆小算子放在再快的 GPU 上也慢。第二，一行 Python 返回了，不等于事情已经**做完**。
"""

# %% [markdown]
"""
## 1.2 两块内存

| | 主机内存 | 设备内存（显存） |
| --- | --- | --- |
| 是什么 | CPU 旁边的 DDR | GPU 旁边的 HBM |
| 容量 | 几百 GB | H200 有 141 GB<!-- given: NVIDIA's data sheet --> |
| 带宽 | 一百到几百 GB/s | 在我们的 H200 上实测，大块拷贝达到 4.26 TB/s<!-- = ceilings()["dram_bytes_per_second"] / 1e12 --> |
| 放什么 | 解释器、数据加载、等着上卡的批次 | 参数、激活、梯度、优化器状态、当前批次 |

kernel 只读写显存。它要用的数据必须先拷过去，走的是两者之间的链路（PCIe 或 NVLink），比两边的内存都慢得多。拷贝有三个方向：

| 名字 | 从哪到哪 | 典型场景 | 注意 |
| --- | --- | --- | --- |
| **H2D** | 主机到设备 | 下一个批次 | 源内存锁页时，可以和计算重叠 |
| **D2H** | 设备到主机 | 打印损失、存检查点 | 读取数值会让主机等待 |
| **D2D** | 设备内部，或两块卡之间 | `clone()`；卡间同步梯度 | 在同一块卡内要付两份显存带宽：读一次，写一次 |

**锁页内存（pinned memory）。** 普通的（可分页的）主机内存，操作系统随时可能挪动，拷贝引擎不能直接读：驱动得先一块块搬到自己的固定缓冲区。**锁页**的内存不会动，拷贝引擎不靠主机就能读。`DataLoader(pin_memory=True)` 和 `tensor.pin_memory()` 都能得到它。锁住的内存别的程序用不了，所以只锁批次，别锁整个数据集。在 H200 上，从锁页内存拷贝达到 55.4 GB/s<!-- = first_look()["copies"]["H2D pinned"] / 1e9 -->，从普通内存只有 6.9 GB/s<!-- = first_look()["copies"]["H2D pageable"] / 1e9 -->。（图中 D2D 每个字节只算一次；它要读一次、写一次，所以经过显存的是两倍。）
"""

# %%
look = recorded.first_look()
if look:
    for route, rate in look["copies"].items():
        print(f"{route:14} {rate / 1e9:8.1f} GB/s   (recorded on {look['hardware']}, 256 MiB)")
pictures.show(pictures.draw_copies(), "copies by route on an H200")

# %% [markdown]
"""
## 1.3 流（stream）

**流**就是设备的一条队列。同一条流里的工作按下达的顺序执行；不同流里的工作只要有空位就可以同时跑。除非特别指定，PyTorch 把所有东西都放进每块卡的一条**当前流**里，所以平常写代码不用操心先后：读 `x` 的 kernel 总排在写 `x` 的后面。

值得另开一条流的，首先就是一件事：一边算这个批次，一边拷下一个。正确性靠下面三行，漏掉任何一行都是一个每周才出现一次的竞态：

```python
torch.cuda.current_stream().wait_stream(copies)   # 拷到了才能算
batch.record_stream(torch.cuda.current_stream())  # 我们用完之前，分配器不得挪用这块显存
with torch.cuda.stream(copies): ...               # 在这里下达下一次拷贝
```

`programs/unpinned_copy.py` 用三种方式做同一件事：从普通内存拷，从锁页内存拷，以及从锁页内存、在单独的流上、趁上一批还在算的时候拷。
"""

# %%
from unpinned_copy import PROGRAM as unpinned_copy

live = [unpinned_copy.measure(way, steps=10) for way in unpinned_copy.ways_on(device)]
pictures.tell(unpinned_copy, live)
pictures.show(pictures.draw_ways(unpinned_copy, live), "three ways to bring batches to the device")

# %% [markdown]
"""
在 H200 上分两步走：锁页让一步从 10.6 ms<!-- = program("unpinned_copy", "unpinned")["median_ms"] --> 降到 3.29 ms<!-- = program("unpinned_copy", "pinned")["median_ms"] -->，再让拷贝与计算并行，降到 2.07 ms<!-- = program("unpinned_copy", "prefetched")["median_ms"] -->，几乎就是计算本身的时间。

至于计算，第二条流只能用上第一条流剩下的资源。小矩阵乘（录成 CUDA graph 回放，排除启动开销）能快三分之一；要是一个乘法自己就占满了 GPU，两条流也只是分着用：
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
## 1.4 同步

**同步**就是让主机停下来，等设备赶上。显式的写法有：

- `torch.cuda.synchronize()`：等整块卡；
- `stream.synchronize()`、`event.synchronize()`：等一条流，或流里的一个点。

而凡是 Python 需要一个**数值**的地方，同步就不请自来：

| 代码 | 为什么要等 |
| --- | --- |
| `loss.item()`、`float(loss)`、`print(loss)` | 数值要拷回主机 |
| `if (x > 0).all():`、对张量做 `assert` | Python 得知道走哪个分支 |
| `x.cpu()`、`x.numpy()`、`x.tolist()` | 拷贝必须已经到达 |
| `x[mask]`、`torch.nonzero(x)`、`torch.unique(x)` | 结果多大取决于数据 |
| 从普通内存 `x.to("cuda")` | 驱动要经过自己的缓冲区 |

偶尔等一次不要紧。每步都等，甚至每个参数都等，队列就空了：设备没活干，只能闲着，直到主机重新下命令。`programs/hidden_sync.py` 用 `float(...)` 记录每个参数的梯度范数，正是这种情形。
"""

# %%
from hidden_sync import PROGRAM as hidden_sync

live = [hidden_sync.measure(way) for way in hidden_sync.ways_on(device)]
pictures.tell(hidden_sync, live)

# %% [markdown]
"""
在 H200 上，这些等待让一步 4.40 ms<!-- = program("hidden_sync", "norms_read_at_once")["median_ms"] --> 里白白花掉 0.95 ms<!-- = program("hidden_sync", "norms_read_at_once")["median_ms"] - program("hidden_sync", "norms_kept_on_device")["median_ms"] -->。在 CPU 上什么都不是异步的，也就没什么可等：那里的差别只是几个算子，以及机器忙不忙（请比较最快的一步）。这种毛病 CPU 上看不出来，所以总能活到第一次上 GPU。

`CUDA_LAUNCH_BLOCKING=1` 让**每一次**启动都等待。它只用来找出哪个 kernel 报了错，绝不能用来测速：开了它，主机和设备就轮流干活。

**异步会不会算错？** 不会：同一条流里顺序不变，你读数值时 PyTorch 会等。它骗的是钟表。
"""

# %% [markdown]
"""
## 1.5 计时：错的和对的

```python
began = time.perf_counter()
y = a @ a
print(time.perf_counter() - began)  # 错：这是**下命令**花的时间
```

对的办法有两种：看表之前都先同步；或者让设备用自己的时钟在流里打上**事件（event）**，全部跑完再读。给训练步计时，事件更好，因为各步像真实训练那样一步接一步，中间没有人等。`dpscope.instruments.timing.time_steps` 就是这样做的，本教程所有的时间都来自它。
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
在 CPU 上三个数说的是一回事，差别只在机器忙不忙。在 H200 上，第一种说 0.27 ms<!-- = first_look()["three_clocks"]["without_waiting_ms"] -->，而这个乘法其实要 21.5 ms<!-- = first_look()["three_clocks"]["events_ms"] -->。错还不算最糟，糟的是它看上去挺像回事。**如果时间不随问题规模增长，先怀疑钟表。**

计时的其他规矩都是老话：先预热（分配显存、选 kernel、升频都在这时候），多测几步，报中位数和波动范围，绝不在性能分析器底下计时。
"""

# %% [markdown]
"""
## 1.6 启动（launch）

一个算子可以小到什么程度？对越来越大的 `x` 测一下 `x + 1`：
"""

# %%
from first_look import look as take_a_look

here = take_a_look(device)
pictures.show(pictures.draw_time_by_size(here), "time of x + 1 against its size")

# %% [markdown]
"""
左边是平的：时间都花在启动上，与大小无关（其中也有计时事件的开销；不算它，下面那个循环里一个算子在 H200 上花 7.0 µs<!-- = program("launch_bound", "loop")["median_ms"] * 1e3 / 400 -->）。右边是一条斜线：时间随字节数增长，斜率就是显存带宽。H200 的拐点在 100 MB<!-- given: read off the picture --> 左右，比这更小的都一样贵。拐点左边的算子，钱付了，卡却没用上。

如果一个程序的算子全在拐点左边，它就是**启动受限（launch-bound）**的：设备做完一个，下一个还没来。`programs/launch_bound.py` 先逐个更新 400 个小参数，再用一次调用更新全部（`torch._foreach_add_`，PyTorch 自带的优化器就这么做），最后把循环录成 CUDA graph 回放。
"""

# %%
from launch_bound import PROGRAM as launch_bound

live = [launch_bound.measure(way) for way in launch_bound.ways_on(device)]
pictures.tell(launch_bound, live)
pictures.show(pictures.draw_ways(launch_bound, live), "an optimizer step in three ways")

# %% [markdown]
"""
## 1.7 线程

一个 kernel 就是由许许多多**线程**执行的同一个函数。线程分层组织：

| 层次 | 是什么 | 成员共享什么 |
| --- | --- | --- |
| 线程（thread） | 函数的一份执行，处理一个或几个元素 | 自己的寄存器 |
| **线程束（warp）** | 32 个线程，同时执行同一条指令 | 指令；有的线程走了分支，其余的就得等 |
| **线程块（block）** | 最多 1024 个线程，在同一个多处理器上 | 共享内存、栅栏同步 |
| **网格（grid）** | 一次启动的全部线程块 | 显存 |

设备由许多**流式多处理器（SM）**组成，H200 有 132 个。每个 SM 同时驻留许多线程束，切换不花代价：一个在等内存，另一个就去算。GPU 掩盖延迟靠的不是大缓存，而是大量的线程束。**占用率（occupancy）**是 SM 上实际驻留的线程束与最多能驻留的之比，受线程块所用的寄存器和共享内存限制。

所以一个 kernel 需要足够多的线程块喂饱所有 SM，每个 SM 上有足够多的线程束来掩盖延迟，并且相邻的线程读相邻的地址，因为内存总是以 32 字节的扇区（sector）为单位取来的，用不用都得取。
"""

# %% [markdown]
"""
## 1.8 内存里的层次

| 层次 | 在哪 | H200 上的大小 | 谁看得见 |
| --- | --- | --- | --- |
| 寄存器 | SM 里 | 每个 SM 256 KB<!-- given: CUDA programming guide, compute capability 9.0 --> | 一个线程 |
| 共享内存和 L1 | SM 里 | 每个 SM 合计 256 KB<!-- given: CUDA programming guide, compute capability 9.0 --> | 一个线程块 |
| L2 | 芯片上 | 50 MB<!-- given: NVIDIA's data sheet --> | 所有人 |
| HBM（"DRAM""全局内存"） | 芯片旁 | 141 GB<!-- given: NVIDIA's data sheet --> | 所有人，但慢 |
| 主机内存 | 链路另一头 | 几百 GB | 靠拷贝 |

每往下一层都更大、更慢。待在寄存器和共享内存里的几乎不花钱；去一趟 HBM 再回来，时间就花在这上面。**算子融合**的要义，就是写回之前多做点事：`2a + b` 拆成两个算子，要写出一个临时张量再读回来，本来三趟能办完的事跑了五趟。
"""

# %%
from memory_bound import PROGRAM as memory_bound

live = [memory_bound.measure(way) for way in memory_bound.ways_on(device)]
pictures.tell(memory_bound, live)
pictures.show(pictures.draw_ways(memory_bound, live), "2a + b in two operators and in one")

# %% [markdown]
"""
字节少了，时间就少了，尽管算术一样多：在 H200 上一个算子比两个快 1.68×<!-- = program("memory_bound", "two_operators")["median_ms"] / program("memory_bound", "one_operator")["median_ms"] -->，而五趟比三趟正是 1.67×<!-- given: 5 / 3 -->。（在 CPU 上差距可能更大：那个临时张量是新内存，操作系统得一页页地给。）
"""

# %% [markdown]
"""
## 1.9 到底受什么限制？

拿 kernel 的运算次数除以它搬运的字节数，就是它的**算术强度**。机器也有这么一个比值。我们的 H200 用张量核做 bfloat16 能到 786 TFLOP/s<!-- = ceilings()["tensor_flops_per_second"] / 1e12 -->，带宽 4.26 TB/s<!-- = ceilings()["dram_bytes_per_second"] / 1e12 -->，合每字节约 184 次运算<!-- = ceilings()["tensor_flops_per_second"] / ceilings()["dram_bytes_per_second"] -->。

- 低于这个比值，kernel 是**访存受限**的：它在等数据。加法、范数、softmax、优化器、拷贝都是。对策是少搬字节：融合，用更窄的数值格式，不要把中间结果写出来。
- 高于它，就是**计算受限**的：大矩阵乘和卷积。对策是用张量核（bfloat16、TF32），或者少算一点。
- 如果两边都没到头，设备中间还闲着，那程序要么是**启动受限**（1.6 节），要么在等拷贝或主机。kernel 再快也没用。
"""

# %%
from compute_bound import PROGRAM as compute_bound

live = [compute_bound.measure(way, steps=10) for way in compute_bound.ways_on(device)]
pictures.tell(compute_bound, live)

# %% [markdown]
"""
同一个 8192³ 的乘法，在 H200 上 float32 是 51.3 TFLOP/s<!-- = program("compute_bound", "float32")["flops"] / program("compute_bound", "float32")["median_ms"] / 1e9 -->，bfloat16 是 789 TFLOP/s<!-- = program("compute_bound", "bfloat16")["flops"] / program("compute_bound", "bfloat16")["median_ms"] / 1e9 -->。训练脚本里很难再找到一处改动有这么值。
"""

# %% [markdown]
"""
## 1.10 常见瓶颈和对策

| 现象 | 在哪里看 | 常见原因 | 怎么办 |
| --- | --- | --- | --- |
| GPU 闲，主机忙 | 时间线（第 2、4 篇） | 小算子太多 | 加大批次、融合算子、`foreach` 优化器、`torch.compile`、CUDA graph |
| 每步之后 GPU 闲 | 时间线：先一段等待，再一个空隙 | `.item()`、`print`、`if 张量` | 数值留在设备上，少读 |
| 一步开头有空隙 | 时间线：数据加载线程 | 读数据或预处理太慢 | 多开 worker、`persistent_workers`、预取 |
| H2D 拷贝很长，旁边什么都没有 | 时间线：拷贝那几行 | 普通（可分页）内存 | `pin_memory=True`、`non_blocking=True`、单独一条流 |
| 显存带宽到顶，算力很低 | ncu 的 Speed of Light（第 3 篇） | 逐元素运算、优化器、范数 | 融合、更窄的格式、能重算的不存 |
| 算力到顶 | ncu | 大矩阵乘 | 张量核、少算；再往后就没有余地了 |
| 两边都低，线程束停顿 | ncu 的 Warp State | 延迟：线程束少、访问零散、栅栏 | 更多并行、合并访问 |
| 矩阵乘里张量核闲着 | ncu 的 Compute Workload | 没开 TF32 的 float32、形状不齐 | bfloat16、维度取 8 或 16 的倍数 |
| 显存不足 | `dpscope memory`（第 5 篇） | 激活、逐样本梯度 | 减小批次、检查点重算、换一种裁剪方法 |
| 头几步特别慢 | 早期步的 trace | 分配显存、挑选 kernel、编译 | 先预热再测 |
"""

# %% [markdown]
"""
## 1.11 贯穿全书的例子：差分隐私的一步

差分隐私训练（DP-SGD）在求和之前要裁剪**每个样本**的梯度，再加上噪声。三种做法的区别，正好可以用这一篇里的词来说。在 H200 上，11.7 亿参数的 Transformer，批次 8，序列 1024，bf16：

| 方法 | 一步的时间 | 与普通训练之比 | 受什么限制 |
| --- | --- | --- | --- |
| `standard`（不加隐私） | 126.8 ms<!-- = ms("page", "standard") --> | 1.00×<!-- = times("page", "standard") --> | 矩阵乘和字节，GPU 一直忙 |
| `flat`（Opacus） | 266.5 ms<!-- = ms("page", "flat") --> | 2.10×<!-- = times("page", "flat") --> | 把每个样本的梯度写进显存再读回来 |
| `ghost`（Opacus） | 345.1 ms<!-- = ms("page", "ghost") --> | 2.72×<!-- = times("page", "ghost") --> | 多一遍反向，还有主机等待 |
| `flash`（dpscope） | 137.8 ms<!-- = ms("page", "flash") --> | 1.09×<!-- = times("page", "flash") --> | 和普通训练一样 |

为什么会这样，又怎么查出来，就是后面几篇的内容。下图由 dpscope 根据录下的结果画出：
"""

# %%
from dpscope.reports.time.figures import draw_tradeoff

pictures.show(draw_tradeoff(recorded.sweep("page").rows), "memory against time of four methods on an H200")

# %% [markdown]
"""
## 练习

1. 1.6 节的拐点在你的机器上是多大？找出字节数翻一倍、时间至少变成 1.7 倍<!-- given --> 的最小规模。
2. 写一个函数，根据运算次数和字节数判断一个算子在 H200 上是访存受限还是计算受限。拿 `x + 1`、bfloat16 的 4096³ 乘法、1×4096 的向量乘 4096×4096 的矩阵试试。
3. 在 GPU 上，`loss = f(x); if loss > best: best = loss.item(); print(best)` 里有几次同步？

答案紧跟在后面，都能运行。
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
第 3 题的答案：每次调用一次，刷新纪录时两次。`if loss > best` 要一个真假值；`.item()` 要一个数；打印 Python 浮点数不花钱，但如果 `best` 还是张量，`print` 也会等。把 `best` 留在设备上（`torch.minimum`），每一百步打印一次就好。

（向量乘矩阵这一行也解释了，为什么逐个 token 生成文本是访存受限的，而训练不是。）
"""

# %%
assert "memory" in bound_by(1, 8) and "compute" in bound_by(2 * 4096**3, 6 * 4096**2)

# %% [markdown]
"""
## 小测验

**1. 一个全是小算子的循环，在贵十倍的新 GPU 上跑 5 ms<!-- given -->，在旧卡上也是 5 ms<!-- given -->。为什么？**

<details><summary>答案</summary>

它是启动受限的：时间都是主机的。卡越快，闲得越久。减少启动次数（融合、CUDA graph）才有用，或者换个更快的 CPU。

</details>

**2. 不同步时 `time.perf_counter()` 测得一步 3 ms<!-- given -->，同步后是 120 ms<!-- given -->。第一个数有用吗？**

<details><summary>答案</summary>

有用：它是主机下达这一步命令所需的时间。只要它小于第二个数，主机就跟得上，设备就不会挨饿。但它不是一步的时间。

</details>

**3. 为什么对普通内存写 `non_blocking=True` 没什么用？**

<details><summary>答案</summary>

驱动得先把数据搬进自己的锁页缓冲区，这活儿由主机干。数据接收完调用才返回，旁边能并行的很少。

</details>

**4. 一个 kernel 读 1 GB<!-- given -->，做 10 GFLOP<!-- given -->。在 H200 上先碰到哪个上限？**

<details><summary>答案</summary>

每字节十次运算，远低于 1.9 节里机器的比值：显存带宽。全速读完约需四分之一毫秒；单论计算，用张量核只要它的二十分之一。

</details>

**5. 占用率低，kernel 就慢吗？**

<details><summary>答案</summary>

不一定。占用率只是掩盖延迟的手段。矩阵乘 kernel 把大块数据放在寄存器和共享内存里，占用率低，照样跑满算力。

</details>

## 要记住的

- 主机下令，设备干活，中间隔着一个队列。快慢就看谁在等谁。
- 不同步测到的是下命令的时间。用事件，或者用 `time_steps`。
- 启动受限：少启动。访存受限：少搬字节。计算受限：换格式，或者少算。
- Python 读到的每个数值都是一次同步。拷贝要异步，先把内存锁页。
- 记住自己机器上运算与字节的比值。

**延伸阅读**：[CUDA 编程指南](https://docs.nvidia.com/cuda/cuda-c-programming-guide/)、[GPU 术语表](https://modal.com/gpu-glossary)、[How to think about GPUs](https://jax-ml.github.io/scaling-book/gpus/)。下一篇：[PyTorch Profiler](02-pytorch-profiler.ipynb)，在真实的模型上看到这一切。
"""
