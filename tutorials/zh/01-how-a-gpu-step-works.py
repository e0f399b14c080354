# %% [markdown]
"""
# 1. GPU 上的一步训练是怎么跑的

*最后验证：2026-11-16，CPU 上用 torch 2.13，NVIDIA H200 上用 torch 2.11。*

**难度**：入门；标有“进阶”的小节可以以后再看。**预备知识**：用 PyTorch 训练过模型，不需要了解 GPU。**时间**：阅读约 25 分钟，练习另需 40 分钟左右。

训练的一步看起来不过五行 Python，底下其实是两个处理器：一个下命令，一个执行。关于速度的问题，多半可以归结为一句话：谁在等谁？这一课先把这幅图画清楚，后面几课都会用到。

**读完之后你能够**

- 说清哪些事在主机（host）上做，哪些在设备（device）上做，命令和数据怎样往来；
- 正确地给 GPU 上的一步计时，也能看出测错了的结果；
- 区分受启动限制、受访存限制和受计算限制的程序，并说出各自的改法；
- 列出普通 PyTorch 代码里隐藏的同步。

**怎么学**。每一节末尾都有练习：一个单元里有待填的 `...`，下一个单元检查你的答案并给出提示。做没做练习，整课都能从头运行到尾。答案在 [solutions/lesson_1.py](../solutions/lesson_1.py)，请先自己试。

任何机器都能运行。没有 GPU 时测 CPU，并给出在 NVIDIA H200 上录下的结果；有 GPU 时测你自己的卡。程序在 [programs](../programs) 里，文件名不会透露毛病在哪，先猜再往下读。
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
import pictures
import recorded
import torch
from checks import check
from practice import device_here

device = device_here()
print(f"torch {torch.__version__}, measuring on: {device}")

# %% [markdown]
"""
## 1.1 两个处理器

Python 从不在 GPU 上运行。`y = torch.relu(x @ w)` 由**主机**（CPU）分层执行：

1. 你的代码调用一个 PyTorch 算子；
2. PyTorch 的 C++ 库（ATen）检查形状、分配结果、选择一个 **kernel**，也就是在 GPU 上运行的程序；
3. CUDA 运行时把 kernel 和参数放进**设备**（GPU）的**队列**，立刻返回。

设备按顺序从队列里取任务执行。主机通常领先：它已经下达的任务，设备还没开始。这正是我们想要的，因为设备不用等。

由此有两个结论。每个算子都要花主机几微秒，不管它算得多少，所以大量的小算子在任何 GPU 上都慢。另外，一行 Python 返回了，不代表事情已经**做完**。

**练习 1.1。** 一共 `operators` 个算子，每个占用主机 `launch_us`、占用设备 `kernel_us`，两边同时工作。一步大约要多久？
"""


# %%
def step_us(operators, launch_us, kernel_us): ...  # replace this line


# %%
check("1.1", step_us)

# %% [markdown]
"""
## 1.2 两种内存

| | 主机内存 | 设备内存（显存） |
| --- | --- | --- |
| 是什么 | CPU 旁边的 DDR | GPU 旁边的 HBM |
| 容量 | 几百 GB | H200 有 141 GB<!-- given: NVIDIA's data sheet --> |
| 带宽 | 几百 GB/s | 在我们的 H200 上实测，大块拷贝为 4.26 TB/s<!-- = ceilings()["dram_bytes_per_second"] / 1e12 --> |
| 放什么 | 解释器、数据加载、排队的批次 | 参数、激活、梯度、优化器状态、当前批次 |

kernel 读写的是显存。它要用的数据必须先经过两者之间的链路（PCIe 或 NVLink）拷过去，而链路比两边的内存都慢得多。拷贝有三个方向：

| 名字 | 方向 | 典型场景 | 注意 |
| --- | --- | --- | --- |
| **H2D** | 主机到设备 | 下一个批次 | 源内存锁页时可以与计算重叠 |
| **D2H** | 设备到主机 | 打印损失、保存检查点 | 读取数值会让主机等待 |
| **D2D** | 设备内部，或两块卡之间 | `clone()`；卡间传梯度 | 在同一块卡内占用两份显存带宽：一读一写 |

**锁页内存（pinned memory）。** 操作系统随时可能移动普通的（可分页的）主机内存，所以拷贝引擎不能直接读取，驱动要先把它分块复制到一个固定的缓冲区。**锁页**内存不会被移动，拷贝引擎可以不经主机直接读取。`DataLoader(pin_memory=True)` 和 `tensor.pin_memory()` 都能得到锁页内存。锁页之后其他程序就用不了这部分内存，所以只锁批次，不要锁整个数据集。在 H200 上，从锁页内存拷贝达到 55.5 GB/s<!-- = first_look()["copies"]["H2D pinned"] / 1e9 -->，从可分页内存只有 9.3 GB/s<!-- = first_look()["copies"]["H2D pageable"] / 1e9 -->。（图中 D2D 的每个字节只算一次，实际一读一写，经过显存的字节是两倍。）
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
**练习 1.2。** 一次拷贝要多久？写出函数，再比较 256 MiB<!-- given --> 从锁页内存和从可分页内存拷贝的时间。
"""


# %%
def copy_ms(nbytes, gb_per_second): ...


# %%
check("1.2", copy_ms)

# %% [markdown]
"""
## 1.3 流（stream）

**流**就是设备的一条队列。同一条流里的任务按启动的顺序执行；不同流里的任务，只要有空闲资源就可以同时执行。除非另外指定，PyTorch 把所有任务都放进每块卡的一条**当前流**，所以普通代码不用操心顺序：读 `x` 的 kernel 总在写 `x` 的之后。

第二条流最大的用处，是一边计算当前批次，一边拷贝下一个批次：

```python
torch.cuda.current_stream().wait_stream(copies)   # 拷贝到达之后才开始计算
batch.record_stream(torch.cuda.current_stream())  # 用完之前，分配器不能重用这块显存
with torch.cuda.stream(copies): ...               # 在这里启动下一次拷贝
```

前两行保证正确：漏掉任何一行都会造成竞态，可能一周才出现一次。第三行带来重叠：没有它，拷贝就落在当前流上，结果仍然正确，只是没有任何重叠。

`programs/case_3.py` 用三种方式把批次送到设备。你觉得哪种最快？
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
在 H200 上，锁页让一步从 9.3 ms<!-- = took("case_3", "a") --> 降到 3.28 ms<!-- = took("case_3", "b") -->，在单独的流上拷贝再降到 2.07 ms<!-- = took("case_3", "c") -->，接近纯计算的时间。

对计算来说，第二条流只能利用第一条流剩下的资源。四十个 512 × 512 的小矩阵乘，用 CUDA graph 重放以排除启动开销，一条流需要 0.49 ms<!-- = first_look()["two_streams"]["one_stream_ms"] -->，两条流需要 0.37 ms<!-- = first_look()["two_streams"]["two_streams_ms"] -->。如果一个乘法就能占满 GPU，两条流没有好处。

**练习 1.3。** 少了这三行中的每一行会怎样？填 `"race"`（结果可能出错）或 `"slow"`（结果正确，但没有重叠）。
"""

# %%
without = {"wait_stream": ..., "record_stream": ..., "torch.cuda.stream": ...}

# %%
check("1.3", without)

# %% [markdown]
"""
## 1.4 同步

**同步**就是让主机等待，直到设备赶上来。显式的写法：

- `torch.cuda.synchronize()`：等整块卡；
- `stream.synchronize()`、`event.synchronize()`：等一条流，或流中的一个点。

凡是 Python 需要一个**数值**的地方，也会隐式地同步：

| 代码 | 为什么要等 |
| --- | --- |
| `loss.item()`、`float(loss)`、`print(loss)` | 数值要拷回主机 |
| `if (x > 0).all():`、对张量做 `assert` | Python 要知道走哪个分支 |
| `x.cpu()`、`x.numpy()`、`x.tolist()` | 拷贝必须已经完成 |
| `x[mask]`、`torch.nonzero(x)`、`torch.unique(x)` | 结果的大小取决于数据 |
| 从可分页内存 `x.to("cuda")` | 驱动要经过自己的缓冲区 |

等一次代价不大。每一层都等，队列就会被清空：设备没有任务，只能空闲，直到主机再次启动。`programs/case_4.py` 跑 32 层，并查看每一层的均值。它的两种方式有什么不同？
"""

# %%
from case_4 import PROGRAM as case_4

live = [case_4.measure(way) for way in case_4.ways_on(device)]
pictures.tell(case_4, live)

# %% [markdown]
"""
方式 a 用 `.item()` 读取每个均值；方式 b 把均值留在设备上，每一百步统一读取一次。在 H200 上，这些等待让一步变成 1.42×<!-- = took("case_4", "a") / took("case_4", "b") -->：3.77 ms<!-- = took("case_4", "a") -->，而不是 2.66 ms<!-- = took("case_4", "b") -->。CPU 上没有异步，也就没有等待，两者在误差范围内一样快。这种问题在 CPU 上看不到，所以往往要到第一次上 GPU 才暴露。

`CUDA_LAUNCH_BLOCKING=1` 让**每次**启动都等待。它用来定位是哪个 kernel 报错，绝不要用来测速。

**异步危险吗？** 对结果不危险：同一条流内顺序不变，你读取数值时 PyTorch 会等待。危险的是计时。

**练习 1.4。** 下面哪几行在 GPU 上会等待？给出行号。

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
## 1.5 计时：错误的方法和正确的方法

```python
began = time.perf_counter()
y = a @ a
print(time.perf_counter() - began)  # 错：这只是**下命令**花的时间
```

正确的方法有两种：每次看表之前先同步；或者让设备用自己的时钟在流里记录**事件（event）**，全部结束后再读取。给训练步计时用事件更好，因为各步像真实训练那样首尾相接，中间没有人等待。`dpscope.instruments.timing.time_steps` 就是这样做的；除非另有说明，本教程的时间都来自它。
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
在 CPU 上三个数含义相同。在 H200 上，第一种方法得到 0.026 ms<!-- = first_look()["three_clocks"]["without_waiting_ms"] -->，而这个乘法实际要 21.5 ms<!-- = first_look()["three_clocks"]["events_ms"] -->。它错了，却看起来合理。**如果时间不随问题规模增长，先怀疑计时方法。**

给这个乘法下命令，比下一节里一次小加法的 7.1 µs<!-- = launch_us() --> 要长：`aten::mm` 在主机上做的事比 `aten::add` 多，见上面的列表（分析器会让每个调用变长）。“一次启动几微秒”只适用于循环中的小型逐元素算子，并不是定律：另一天运行同一个程序，同一行是 0.27 ms<!-- given: the recording of 2026-11-15, replaced since -->。主机的部分因机器和当时的负载而异。

计时的其他规则大家都知道：先预热，让显存分配、kernel 选择和时钟频率稳定下来；多测几步，给出中位数和波动范围；不要在性能分析器下计时。

**练习 1.5。** `gpu` 有三个方法：`launch(ms)` 把任务放进队列并立刻返回，`synchronize()`，以及以毫秒为单位的 `clock()`。请正确地计时，即使队列里已经有别的任务。
"""


# %%
def time_right(gpu, ms): ...


# %%
check("1.5", time_right)

# %% [markdown]
"""
## 1.6 启动（launch）

一个算子可以小到什么程度？对越来越大的 `x` 测量 `x + 1`：
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
左边是平的：无论大小，时间都是启动的时间。右边是一条直线：时间随字节数增长，斜率就是显存带宽。拐点在哪里？每次只计时一个时，它看上去在 100 MB<!-- given: read off the picture --> 附近，但平的部分包含了两个计时事件，约 23 µs<!-- = 1e3 * first_look()["time_by_size"][0]["median_ms"] -->。每次计时 50 个（三角形），一次加法花 7.1 µs<!-- = launch_us() -->，这段时间显存能搬 30 MB<!-- = bend_bytes() / 1e6 -->，这才是拐点：比它小的算子，再小也是同样的代价。（小于 62.9 MB<!-- = l2_bytes() / 1e6 --> 的数据能放进 L2 缓存，可以比 DRAM 带宽更快。）

如果一个程序的算子都在拐点左边，它就是**受启动限制**（launch-bound）的：设备做完一个，下一个还没到。`programs/case_2.py` 用三种方式更新 400 个小参数。
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
- **a** 启动 400 个 kernel：3.19 ms<!-- = took("case_2", "a") -->。
- **b** 用 `torch._foreach_add_`（PyTorch 自带的优化器也用它），只启动几个 kernel，每个更新许多参数：0.148 ms<!-- = took("case_2", "b") -->。
- **c** 把 a 的循环录成 **CUDA graph** 重放：0.471 ms<!-- = took("case_2", "c") -->。主机只调用一次，但设备仍要依次执行 400 个 kernel，每个约 1.2 µs<!-- = 1e3 * took("case_2", "c") / 400 -->，所以比 b 慢<!-- holds: took("case_2", "c") > took("case_2", "b") -->：graph 省掉的是启动在主机上的开销，融合省掉的是启动本身。

**练习 1.6。** 找出拐点：返回第一个耗时至少是前一个点 1.7 倍<!-- given --> 的点的 `bytes`。`points` 是像 `here["time_by_size"]` 那样的列表，每个点的大小是前一个的两倍。
"""


# %%
def bend(points): ...


# %%
check("1.6", bend)

# %% [markdown]
"""
## 1.7 线程

一个 kernel 是由大量**线程**执行的同一个函数。线程分组如下：

| 分组 | 是什么 | 成员共享什么 |
| --- | --- | --- |
| 线程（thread） | 函数的一份执行，处理一个或几个元素 | 自己的寄存器 |
| **warp** | 32 个线程，同时执行同一条指令 | 指令；部分线程走了分支，其余的就要等待 |
| **线程块（block）** | 最多 1024 个线程，在同一个多处理器上 | 共享内存、栅栏 |
| **网格（grid）** | 一次启动的全部线程块 | 显存 |

设备由许多**流式多处理器**（SM）组成，H200 有 132 个。每个 SM 有四个**子分区（SMSP）**，各有自己的调度器，每个周期最多发射一条指令。一个调度器最多容纳 16 个 warp，在它们之间切换没有代价：一个在等内存，另一个就计算。GPU 靠大量的 warp 掩盖延迟，而不是靠大缓存。**占用率**（occupancy）是 SM 上实际驻留的 warp 数与上限之比，受线程块所用的寄存器和共享内存限制。

所以一个 kernel 需要足够多的线程块分给所有 SM，每个 SM 上有足够多的 warp 来掩盖延迟，相邻的线程读取相邻的地址，因为内存总是以 32 字节的扇区（sector）为单位读取，用不用都要读。

**练习 1.7。** 能同时容纳的全部线程块称为一**波（wave）**。如果每个 SM 同时容纳 `blocks_per_sm` 个线程块，132 个 SM 跑完 `blocks` 个线程块需要几波？（2.2 波的意思是：两波是满的，最后一波里大多数 SM 空闲。）
"""


# %%
def waves(blocks, blocks_per_sm): ...


# %%
check("1.7", waves)

# %% [markdown]
"""
## 1.8 内存的层次

| 层次 | 位置 | H200 上的大小 | 谁能访问 |
| --- | --- | --- | --- |
| 寄存器 | SM 内 | 每个 SM 256 KB<!-- given: CUDA programming guide, compute capability 9.0 --> | 一个线程 |
| 共享内存和 L1 | SM 内 | 每个 SM 合计 256 KB<!-- given: CUDA programming guide, compute capability 9.0 --> | 一个线程块 |
| L2 | 芯片上 | 62.9 MB<!-- = l2_bytes() / 1e6 -->（60 MiB<!-- = l2_bytes() / 2**20 -->），由 ncu 从卡上读出 | 所有线程 |
| HBM（“DRAM”、“全局内存”） | 芯片旁 | 141 GB<!-- given: NVIDIA's data sheet --> | 所有线程，但慢 |
| 主机内存 | 链路另一端 | 几百 GB | 通过拷贝 |

越往下越大，也越慢。留在寄存器和共享内存里的数据几乎没有代价，时间都花在往返 HBM 上。**融合**就是在写回之前多做一些事：把 `2a + b` 拆成两个算子，要写出一个临时张量再读回来，往返 HBM 五次，而三次就够。`programs/case_1.py` 两种都做。
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
字节少了，时间就少了，尽管算术一样多：在 H200 上，一个算子的速度是两个的 1.69×<!-- = took("case_1", "a") / took("case_1", "b") -->，而五次比三次是 1.67×<!-- given: 5 / 3 -->。（在 CPU 上差距可能更大：临时张量是新内存，操作系统要一页一页地分配。）

**练习 1.8。** 对 `numbers` 个 float32 数，`2a + b` 用一个算子（`fused`）和用两个算子各搬运多少字节？
"""


# %%
def bytes_moved(numbers, fused): ...


# %%
check("1.8", bytes_moved)

# %% [markdown]
"""
## 1.9 受什么限制？

用 kernel 的运算次数除以搬运的字节数，得到它的**算术强度**。机器也有这样的比值，每种计算单元各有一个，称为**拐点（ridge）**。我们的 H200 每秒搬运 4.26 TB/s<!-- = ceilings()["dram_bytes_per_second"] / 1e12 -->，各单元达到

| 单元 | 每秒运算 | 拐点：每字节的运算次数 |
| --- | --- | --- |
| 张量核心，bfloat16 | 786 TFLOP/s<!-- = ceilings()["tensor_flops_per_second"] / 1e12 --> | 184<!-- = ridge() --> |
| float32（FMA 流水线，不用 TF32） | 51 TFLOP/s<!-- = ceilings()["fp32_flops_per_second"] / 1e12 --> | 12<!-- = ridge("fp32") --> |

- 低于拐点，kernel **受访存限制（memory-bound）**：它在等数据。加法、范数、softmax、优化器、拷贝都是。改法是少搬字节：融合，用更小的数值格式，能重算的不写出来。
- 高于拐点，kernel **受计算限制（compute-bound）**：大矩阵乘和卷积。改法是用张量核心（bfloat16、TF32），或者少算一些。
- 如果两者都远没到上限，设备中间又有空闲，程序就是**受启动限制**（1.6 节），或者在等拷贝、等主机。这时 kernel 再快也没有用。

`programs/case_5.py` 用两种数值格式做同一个矩阵乘：
"""

# %%
from case_5 import PROGRAM as case_5

live = [case_5.measure(way, steps=10) for way in case_5.ways_on(device)]
pictures.tell(case_5, live)

# %% [markdown]
"""
同一个 8192³ 的乘法，在 H200 上 float32 是 51.1 TFLOP/s<!-- = program("case_5", "a")["flops"] / took("case_5", "a") / 1e9 -->，bfloat16 是 808 TFLOP/s<!-- = program("case_5", "b")["flops"] / took("case_5", "b") / 1e9 -->。训练脚本里很少有别的改动能带来这么大的收益。

**练习 1.9。** 判断一个 kernel 在 H200 上受什么限制，返回 `"memory"` 或 `"compute"`。`unit` 为 `"tensor"` 或 `"fp32"`；`recorded.ceilings()` 里有 `tensor_flops_per_second`、`fp32_flops_per_second` 和 `dram_bytes_per_second`。
"""


# %%
def bound_by(flops, nbytes, unit): ...


# %%
check("1.9", bound_by)

# %% [markdown]
"""
## 1.10 常见瓶颈和改法

| 现象 | 在哪里看 | 常见原因 | 怎么改 |
| --- | --- | --- | --- |
| GPU 空闲，主机忙 | 时间线（第 2、4 课） | 小算子太多 | 加大批次、融合算子、`foreach` 优化器、`torch.compile`、CUDA graph |
| 每步之后 GPU 空闲 | 时间线：一段等待，然后一个空隙 | `.item()`、`print`、`if tensor` | 数值留在设备上，少读 |
| 一步开头有空隙 | 时间线：数据加载线程 | 读取或预处理太慢 | 增加 worker、`persistent_workers`、预取 |
| H2D 拷贝很长，没有重叠 | 时间线：拷贝那几行 | 可分页内存 | `pin_memory=True`、`non_blocking=True`、单独的流 |
| DRAM 接近上限，算力低 | ncu，Speed of Light（第 3b 课） | 逐元素运算、优化器、范数 | 融合、更小的格式、重算 |
| 算力接近上限 | ncu | 大矩阵乘 | 张量核心、少算；之后就没有余地了 |
| 两者都低，warp 停顿 | ncu，Warp State | 延迟：warp 太少、访问分散、栅栏 | 增加并行、访问相邻地址 |
| 矩阵乘中张量核心空闲 | ncu，Compute Workload | 没开 TF32 的 float32、形状不规则 | bfloat16、维度取 8 或 16 的倍数 |
| 显存不足 | `dpscope memory`（第 5 课） | 激活、逐样本梯度 | 减小批次、检查点重算、换裁剪方法 |
| 头几步慢 | 早期步的 trace | 分配显存、选择 kernel、编译 | 先预热再测 |

可以打印的一页：[从现象到改法](../sheets/symptoms-zh.pdf)；所有命令：[速查表](../sheets/cheat-sheet-zh.pdf)。

**练习 1.10。** 先用哪个工具？填 `"timeline"`、`"ncu"` 或 `"memory"`。
"""

# %%
first_tool = {"idle GPU": ..., "slow kernel": ..., "out of memory": ...}

# %%
check("1.10", first_tool)

# %% [markdown]
"""
## 1.11 贯穿全程的例子：差分隐私训练的一步

差分隐私训练（DP-SGD）在求和之前裁剪**每个样本**的梯度，再加上噪声。三种做法的区别，正好可以用这一课的概念来说明。H200，11.7 亿参数的 Transformer，批次 8，序列 1024，bf16，2026-11-15 的一次运行：

| 方法 | 一步的时间 | 与普通训练之比 | 多做了什么 |
| --- | --- | --- | --- |
| `standard`（无差分隐私） | 126.8 ms<!-- = ms("page", "standard") --> | 1.00×<!-- = times("page", "standard") --> | |
| `flat`（Opacus） | 266.5 ms<!-- = ms("page", "flat") --> | 2.10×<!-- = times("page", "flat") --> | 把每个样本的梯度写入显存再读回 |
| `ghost`（Opacus） | 345.1 ms<!-- = ms("page", "ghost") --> | 2.72×<!-- = times("page", "ghost") --> | 第二遍反向传播，以及计算范数的矩阵乘 |
| `flash`（dpscope） | 137.8 ms<!-- = ms("page", "flash") --> | 1.09×<!-- = times("page", "flash") --> | 在同一遍反向传播里计算范数的矩阵乘 |

flash 裁剪此后又变快了。第 5 课会用全部工具再来看它。
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
**练习 1.11。** 普通训练一天完成的工作，用某种方法要多少天？`recorded.ms("page", method)` 是一步的毫秒数。
"""


# %%
def days(method): ...


# %%
check("1.11", days)

# %% [markdown]
"""
## 小测验

**1. 一个全是小算子的循环，在贵十倍的新 GPU 上跑 5 ms<!-- given -->，在旧卡上也是 5 ms<!-- given -->。为什么？**

<details><summary>答案</summary>

它受启动限制：时间花在主机上。设备更快，只是空闲得更久。减少启动次数（融合、CUDA graph）有用，或者换更快的 CPU。

</details>

**2. 不同步时 `time.perf_counter()` 测得一步 3 ms<!-- given -->，同步后是 120 ms<!-- given -->。第一个数有用吗？**

<details><summary>答案</summary>

有用：它是主机启动这一步所需的时间。只要它小于第二个数，主机就跟得上，设备不会缺任务。但它不是一步的时间。

</details>

**3. 为什么对可分页内存用 `non_blocking=True` 没有用？**

<details><summary>答案</summary>

驱动要先把数据复制到自己的锁页缓冲区，这由主机完成。数据接收完调用才返回，所以几乎没有可以重叠的部分。

</details>

**4. 一个 kernel 读 1 GB<!-- given -->，做 10 GFLOP<!-- given -->。在 H200 上先遇到哪个上限？**

<details><summary>答案</summary>

取决于用哪个单元。每字节十次运算，远低于张量核心的拐点（184<!-- = ridge() -->）：受访存限制，约四分之一毫秒，计算只需要它的二十分之一。用普通的 float32，拐点是 12<!-- = ridge("fp32") -->，几乎是平衡的：搬字节需要 0.23 ms<!-- = 1e12 / ceilings()["dram_bytes_per_second"] -->，计算需要 0.20 ms<!-- = 1e13 / ceilings()["fp32_flops_per_second"] -->。

</details>

**5. 占用率低，kernel 就慢吗？**

<details><summary>答案</summary>

不一定。占用率只是掩盖延迟的手段。矩阵乘的 kernel 把大块数据放在寄存器和共享内存里，占用率低，却接近算力上限。

</details>

## 要记住的

- 主机下命令，设备执行，中间是一个队列。先问谁在等谁。
- 不同步测到的是下命令的时间。用事件，或者用 `time_steps`。
- 受启动限制：减少启动。受访存限制：少搬字节。受计算限制：换格式，或者少算。
- Python 每读一个数值就是一次同步。锁页内存才能让拷贝异步。
- 记住你所用单元的拐点。

**延伸阅读**：[CUDA 编程指南](https://docs.nvidia.com/cuda/cuda-c-programming-guide/)、[GPU 术语表](https://modal.com/gpu-glossary)、[How to think about GPUs](https://jax-ml.github.io/scaling-book/gpus/)、[本教程的术语表](glossary.md)。下一课：[PyTorch Profiler](02-pytorch-profiler.ipynb)。
"""
