# %% [markdown]
"""
# 3. Nsight Compute

*最后验证：2026-11-15，NVIDIA H200，ncu 2025.3.1。*

PyTorch Profiler 告诉你**哪个** kernel 慢，Nsight Compute（`ncu`）告诉你**为什么**：搬了多少字节，哪个部件到了极限，线程束在等什么。它读的是 GPU 自己的计数器，一次看一个 kernel。

**读完之后你能够**

- 用 `ncu` 分析 Python 程序，只看该看的 kernel，几秒钟出结果；
- 用今天的名字要到你需要的指标，哪怕论文里写的还是 nvprof 的旧名；
- 逐节读懂一份报告，说出 kernel 受什么限制、怎么改才有用；
- 数清一整步训练（加不加隐私都行）搬了多少字节，并据此比较两种方法。

下面的命令都由 `programs/run_on_gpu.sh` 在 H200 上跑过，显示的输出取自当时的记录。读报告不需要 GPU。
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
## 3.1 它对你的程序做了什么

`ncu` 启动你的程序，往里塞一个库，看得见每一次 kernel 启动。轮到要测的 kernel，它先等 GPU 空下来，设好计数器，跑 kernel，再读数。计数器太多，一次读不完，所以 kernel 会被**重放（replay）**：先保存它用到的显存，每一**趟（pass）**重跑一次。

因此一切都变慢，kernel 都是单独跑的，**ncu 底下的时间不是你程序的时间**。只拿它看少数几个 kernel，要的是字节数、比例和原因。

读计数器需要权限，租来的机器上往往没有（`ERR_NVGPUCTRPERM`）。`dpscope doctor` 会告诉你有没有，没有的话怎么解决：

```bash
dpscope doctor
```
"""

# %% [markdown]
"""
## 3.2 第一条命令

```bash
ncu --profile-from-start off --set basic --launch-count 1 python programs/memory_bound.py --steps 1
```

从后往前读。`python programs/memory_bound.py --steps 1` 就是平时启动程序的写法。`--launch-count 1`：一个 kernel 就够了。`--set basic`：收集哪些部分。`--profile-from-start off`：在程序调用 `torch.cuda.profiler.start()` 之前什么都不测，`memory_bound.py` 在预热之后才调用它；不加这一项，测到的就是张量初始化。它会打印：
"""

# %%
print(recorded.output("ncu-basic", last=40))

# %% [markdown]
"""
## 3.3 set

报告的一页连同它的指标叫一个 **section**，一组 section 叫一个 **set**。

```bash
ncu --list-sets
```
"""

# %%
print(recorded.output("ncu-sets"))

# %% [markdown]
"""
| set | 什么时候用 | 代价 |
| --- | --- | --- |
| `basic`（老资料里叫 `default`） | 先看一眼：Speed of Light、启动参数、占用率 | 几趟 |
| `detailed` | 再加上访存和计算分析 | 多一些 |
| `full` | 几乎全部：线程束状态、访存表、roofline | 几十趟 |
| `roofline` | roofline 图 | 几趟 |
| 不用 set，改用 `--metrics a,b` | 只要你点名的计数器 | 往往一趟 |

先用 `basic`；`full` 只用在**一个 kernel** 的**一次启动**上。
"""

# %% [markdown]
"""
## 3.4 指标和它们的名字

指标名是拼出来的：`dram__bytes_read.sum.per_second` 依次是部件（`dram`）、量（`bytes_read`）、多个实例怎么合并（`.sum`、`.avg`、`.max`）、再换算成什么（不换算、`.per_second`、`.pct_of_peak_sustained_elapsed`）。有哪些可以查；加上 `--chips` 连 GPU 都不需要：

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
Hopper 上常用的：

| 想知道 | 指标 |
| --- | --- |
| 读写显存的字节数 | `dram__bytes_read.sum`、`dram__bytes_write.sum` |
| kernel 跑了多久 | `gpu__time_duration.sum` |
| SM 有多忙 | `sm__cycles_active.avg.pct_of_peak_sustained_elapsed` |
| SM 上驻留的线程束 | `sm__warps_active.avg.pct_of_peak_sustained_active` |
| 访存单元（LSU）的读和写 | `l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum`、`…_op_st.sum` |
| float32 加法次数 | `smsp__sass_thread_inst_executed_op_fadd_pred_on.sum` |
| 张量核的 bfloat16 运算次数 | `sm__ops_path_tensor_src_bf16_dst_fp32.sum` |

**旧名字。** 论文和脚本里还常见 nvprof 的名字，`ncu` 一概拒绝：

```bash
ncu --profile-from-start off --metrics dram_read_throughput \
    python programs/memory_bound.py --steps 1
```
"""

# %%
print(recorded.output("ncu-old-name", last=6))

# %% [markdown]
"""
| nvprof | 现在 |
| --- | --- |
| `dram_read_throughput`、`dram_write_throughput` | `dram__bytes_read.sum`、`dram__bytes_write.sum`（单个 kernel 可加 `.per_second`） |
| `l2_read_throughput`、`l2_write_throughput` | 32 字节 × `lts__t_sectors_op_read.sum`（`_write`），再加原子和归约 |
| `gld_throughput`、`gst_throughput` | `l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum`、`…_op_st.sum` |
| `achieved_occupancy` | `sm__warps_active.avg.pct_of_peak_sustained_active` |

在 Hopper 上 `gld` 是个陷阱：矩阵乘 kernel 用拷贝引擎（TMA）取数，绕开了访存单元，所以 `gld` 几乎看不到矩阵乘的读取。dpscope 接受旧名字（`dpscope ncu --metrics dram_read_throughput`），并且把 TMA 也算进去。
"""

# %%
from dpscope.instruments.ncu.metrics import METRIC_ALIASES

for old, new in METRIC_ALIASES.items():
    if old.endswith("throughput"):
        print(f"{old:24} {', '.join(new)}")

# %% [markdown]
"""
## 3.5 过滤：少看一点

一步训练要启动几千个 kernel。四种过滤可以单用，也可以合用：

| 过滤方式 | 例子 |
| --- | --- |
| 程序的一段 | `--profile-from-start off` 加 `torch.cuda.profiler.start()` … `stop()` |
| 按 kernel 名 | `--kernel-name regex:elementwise` |
| 按次数 | `--launch-skip 10 --launch-count 2`（只数匹配上的） |
| 按 NVTX 区间 | `--nvtx --nvtx-include "step/"` |

```bash
ncu --profile-from-start off --kernel-name regex:elementwise --launch-skip 10 --launch-count 2 \
    --metrics gpu__time_duration.sum \
    python programs/launch_bound.py --steps 1
ncu --nvtx --nvtx-include "step/" --nvtx-push-pop-scope process --launch-count 3 --metrics \
    gpu__time_duration.sum \
    python programs/hidden_sync.py --steps 1
```

kernel 的名字从哪来？先不加过滤、用 `--set basic` 跑一遍，或者从 trace（第 2 篇）里看。反向传播由 autograd 自己的线程启动，那些线程上没有你的 NVTX 区间；`--nvtx-push-pop-scope process` 让区间对所有线程生效。同一个 kernel 匹配多次，就有多条结果，**每次启动一条**，ncu 不做平均。
"""

# %%
print(recorded.output("ncu-name-filter", first=0, last=24))

# %% [markdown]
"""
## 3.6 重放模式

| 模式 | 重复什么 | 配合 PyTorch |
| --- | --- | --- |
| `kernel`（默认） | 每个 kernel，显存恢复原样 | 可用；几千个就慢 |
| `application` | 整个程序，每趟一次 | 要求每次启动的内容和顺序都相同 |
| `range` | 一个区间，靠录下 API 调用 | 与 PyTorch 配合会失败 |
| `app-range` | 整个程序，计数覆盖一整个区间 | 可用：**一整步只有一行结果** |

```bash
ncu --replay-mode app-range --metrics dram__bytes_read.sum,dram__bytes_write.sum \
    python programs/hidden_sync.py --steps 1
```

最后一种回答的是"一步搬多少字节"，`dpscope ncu` 用的就是它。
"""

# %%
print(recorded.output("ncu-app-range", last=20))

# %% [markdown]
"""
## 3.7 输出

| 想要 | 命令 |
| --- | --- |
| 给窗口程序（`ncu-ui`）看的报告 | `-o NAME` 写出 `NAME.ncu-rep`；`-f` 覆盖 |
| 报告的文字 | `ncu --import NAME.ncu-rep --page details` |
| 报告的数字 | `ncu --import NAME.ncu-rep --page raw --csv --print-units base` |
| 直接要 CSV | `--csv --log-file NAME.csv`，**不要**加 `-o` |

老资料里的 `--csv -o report.csv` 得到的是名叫 `report.csv.ncu-rep` 的二进制报告。raw 的 CSV 第一行是名字，第二行是单位，数字带千位分隔符。Details 页上每个值自选单位（这里 `us`，那里 `ms`），看的时候要留意。`--import-sass no` 能让报告小很多。

```bash
ncu --profile-from-start off --csv --log-file live.csv --metrics gpu__time_duration.sum \
    --launch-count 2 \
    python programs/memory_bound.py --steps 1
ncu --import memory_bound.ncu-rep --page details
```

分析 Python 程序时：把 `python` 和脚本放在命令最后；子进程会跟踪（`--target-processes all`）；`profiler.start()` 之前要预热，不然测到的是 Triton 的编译和 cuDNN 的搜索。
"""

# %% [markdown]
"""
## 3.8 逐节读一份报告

用 `--set full` 分析了四个 kernel：一个加法（访存受限）、float32 和 bfloat16 的矩阵乘各一个（计算受限），还有 dpscope 自己计算逐样本梯度范数的 `_gram_kernel`：

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

**Summary。** 窗口里的第一页列出所有测到的启动，附时长、吞吐率和预计能快多少。按时长排序，从最上面看起。下面是录下的 CSV 里同样的内容：
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
### Speed of Light

**离硬件极限还有多远？** 先看两个数：**Compute (SM) Throughput** 和 **Memory Throughput**，都是占峰值的百分比。访存高、计算低，就是访存受限；反过来是计算受限。两个都超过 80 %<!-- given: NVIDIA's guidance -->：相当均衡，很难再快。两个都低于 60 %<!-- given: NVIDIA's guidance -->：延迟问题，去看 *Warp State*。

*Memory Throughput* 取 DRAM、L2、L1（共享内存也算在这里）中最大的一个，所以要看究竟是哪个：`DRAM Throughput` 才说明数据是否真的来自显存。
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

同一个问题画成图（第 1 篇 1.9 节）：横轴是每字节显存对应的运算次数，纵轴是每秒运算次数。落在斜线下是访存受限，落在平顶下是计算受限，离得多远就还有多少余地。这里的"屋顶"是 dpscope 在这块 H200 上**实测**的，不是数据手册上的；点是那四个 kernel。它们略低于屋顶，是因为 ncu 把频率锁在基准值（*SM Frequency* 显示 1.48 GHz<!-- = details("memory_bound").number("SM Frequency") -->），好让两次运行可以比较；屋顶则是在频率放开时测的。`--clock-control none` 不锁频，dpscope 用的就是它。
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
### Memory Workload Analysis

**数据从哪来，路走得好不好？** 窗口里的图画出每一级存储和每条箭头上的流量。数字里要看：

- **Mem Busy**：缓存和 DRAM 内部有多忙。**Max Bandwidth**：它们之间的连线有多满。**Mem Pipes Busy**：发出访存指令的流水线有多忙。
- **L1/TEX Hit Rate**、**L2 Hit Rate**：查找的扇区（32 字节）里有多少命中。一条缓存线有四个扇区，只要其中一个就是没用满。
- 下面的表列出读和写：*sectors per request* 远高于数据类型所需，说明地址零散。

流式加法什么也命中不了，也不需要命中；矩阵乘则全靠命中。这里没有列出 ncu 的建议：它对四个 kernel 都推荐 L2 压缩，而这对哪个都不是问题。它的规则懂计数器，不懂你的程序。
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
### Compute Workload Analysis

**是哪条流水线在干活？** **IPC** 是每周期指令数：*executed** 按经过的周期算，**issued* 按活跃周期算。**SM Busy** 是最忙的那条流水线。各条流水线：**FMA**（float32 乘加）、**ALU**（整数、逻辑、比较）、**Tensor**（矩阵指令）、**LSU**（读写）、**TMA**（成块搬运）、**XU**（exp、sin、类型转换）、**FP64**、**Uniform**、**CBU/ADU**（分支、栅栏）、**TEX**。

矩阵乘里张量流水线闲着，就是数值格式没选对：比较 `compute_bound`（float32，FMA）和 `tensor_cores`。后者 IPC 低不是毛病：一条张量指令顶得上几千条别的指令。
"""

# %%
pictures.tell_section("Compute Workload Analysis", *REPORTS)

# %% [markdown]
"""
### Warp State

**线程束在等什么？** 两条指令之间，线程束的周期耗在各种**停顿（stall）**上。主要有：

| 停顿 | 在等 | 什么有帮助 |
| --- | --- | --- |
| long scoreboard | 全局内存、L2 | 更好的局部性、更多线程束、同时发出更多读取 |
| short scoreboard | 共享内存、特殊函数 | 减少 bank 冲突 |
| MIO / LG throttle | 排队的访存指令太多 | 每次读得更宽 |
| barrier | 同一线程块里的其他线程束 | 少同步、分工均匀 |
| math pipe throttle | 算术流水线正忙 | 好消息：已经计算受限 |
| wait、not selected | 没有大碍：固定延迟；调度器选了别的线程束 | |

只有当调度器找**不到**可发射的线程束时（Scheduler Statistics 里的 *No Eligible**），停顿才要紧。**not selected* 多，说明线程束绰绰有余。
"""

# %%
pictures.tell_section("Warp State Statistics", *REPORTS)
pictures.tell_section("Scheduler Statistics", *REPORTS)

# %% [markdown]
"""
### Occupancy

**一个 SM 能驻留多少线程束，实际有多少？** **理论**占用率受寄存器、共享内存和线程块大小限制（看 *Block Limit* 哪一行最小）；**实际**占用率是测出来的。实际远低于理论：分工不均，或网格太小填不满 GPU。高占用率本身不是目标：矩阵乘 kernel 拿着大块数据，线程束少，一样跑得好。
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
**四个 kernel 的结论**，都来自上面读到的数字：

- `memory_bound` 用了 DRAM 的 90.8 %<!-- = details("memory_bound").number("DRAM Throughput") -->、算力的 7.5 %<!-- = details("memory_bound").number("Compute (SM) Throughput") -->；线程束每两条指令之间要等 213 个周期<!-- = details("memory_bound").number("Warp Cycles Per Issued Instruction") -->，几乎全在等显存。除了少搬字节别无他法，关于占用率的建议在这里都说不到点子上。
- `compute_bound` 用了算力的 88.2 %<!-- = details("compute_bound").number("Compute (SM) Throughput") -->、DRAM 的 2.4 %<!-- = details("compute_bound").number("DRAM Throughput") -->，占用率只有 12.5 %<!-- = details("compute_bound").number("Achieved Occupancy") -->：占用率低，速度满。换数值格式，就换到另一个屋顶下面。
- `tensor_cores` 就在那个屋顶上：90.9 %<!-- = details("tensor_cores").number("Compute (SM) Throughput") -->。
- `gram` 在张量核上跑到 54.5 %<!-- = details("gram").number("Compute (SM) Throughput") -->，几乎不碰 DRAM，只有 14.5 %<!-- = details("gram").number("DRAM Throughput") -->。它的网格是 288 个线程块，在 132 个 SM 上只有 2.2 波<!-- = details("gram").number("Waves Per SM") -->，最后一波里大多数 SM 闲着：单独一层对它来说太小了。所以 flash 裁剪把模型的许多层放进一次启动。

还有一条来自我们自己程序的告诫：单看这一层，直接形成梯度（0.13 ms<!-- = program("per_sample_norms", "gradients")["median_ms"] -->）比 Gram kernel（0.42 ms<!-- = program("per_sample_norms", "gram")["median_ms"] -->，其中 kernel 本身 0.10 ms<!-- = details("gram").number("Duration") / 1e3 -->，其余是启动）**更快**。它省的是显存和字节，该看的是一整步（3.9 节）。一个 kernel 的报告只回答一个 kernel 的问题。
"""

# %% [markdown]
"""
## 3.9 一整步，加隐私和不加隐私

对 DP-SGD 来说，问题不在某个 kernel，而在一步搬多少字节。`dpscope ncu` 用 app-range 模式计数，时间则取自不带 ncu 的运行：

```bash
dpscope ncu --model 1b --dtype bf16 --batch-size 8,16 --seq-len 256,1024 --out traffic
dpscope ncu --methods standard,flat --print-command
```

批次 8、序列 256 时，flat 裁剪搬 320 GB<!-- = dram_gb("traffic", "flat", 8, 256) -->，普通训练搬 80 GB<!-- = dram_gb("traffic", "standard", 8, 256) -->，是 3.99×<!-- = dram_times("traffic", "flat", 8, 256) -->。它给每个样本写一份梯度，又读回两次：一次算范数，一次求和。ghost 是 2.26×<!-- = dram_times("traffic", "ghost", 8, 256) -->，flash 是 0.97×<!-- = dram_times("traffic", "flash", 8, 256) -->。
"""

# %%
from dpscope.reports.traffic.figures import draw_roofline, draw_traffic_bytes

rows = recorded.sweep("traffic").rows
pictures.show(draw_traffic_bytes(rows), "DRAM bytes of a step by method and size on an H200")
pictures.show(draw_roofline(rows), "steps of four methods under the roofline of an H200")

# %% [markdown]
"""
**什么不算证据**：`dram_read_throughput` 变高。两倍时间搬两倍字节，吞吐率一样。要比的是**字节数**，而且模型、批次、序列、数值格式、优化器都得相同。怎样在窗口里比较两份报告，见[指南](../../docs/ncu-guide.md)。

## 练习

1. 根据 `memory_bound` 的计数：对 2²⁸ 个数，`t + b` 应当搬多少字节？ncu 数到的差多少？
2. 录下的那组结果里，每种规模下哪种方法**每个 token** 搬的字节最少？
3. 写出一条命令，只数 `hidden_sync.py` 反向传播里前三个 GEMM kernel 的显存字节。
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
第 3 题的答案：`ncu --nvtx --nvtx-include "step/" --nvtx-push-pop-scope process --kernel-name regex:gemm --launch-count 3 --metrics dram__bytes_read.sum,dram__bytes_write.sum python programs/hidden_sync.py --steps 1`，再用 `--launch-skip` 跳过正向的 kernel，每层一个。（在 Hopper 上 cuBLAS 的许多 kernel 叫 `nvjet…`：先看清名字。）

## 小测验

**1. 在 ncu 底下一步要花七倍时间。那 ncu 给出的整段带宽是错的吗？**

<details><summary>答案</summary>

字节数是对的，时间是分析器的。用字节数除以不带分析器的时间；别用区间的 `.per_second`。

</details>

**2. Memory Throughput 90 %<!-- given -->，DRAM Throughput 20 %<!-- given -->。kernel 受什么限制？**

<details><summary>答案</summary>

受某级缓存或共享内存限制：Memory Throughput 取各级最大值。去看 L1 和 L2；常见原因是 bank 冲突和零散的扇区。

</details>

**3. 在 H200 上，矩阵乘的 `gld` 几乎为零。是奇迹吗？**

<details><summary>答案</summary>

不是：数据块经由 TMA 到达，访存单元的计数器看不见。在交叉开关处数（`dpscope ncu` 的 *L2 to SM*），或者数 DRAM。

</details>

**4. 改动之后占用率从 60 %<!-- given --> 掉到 25 %<!-- given -->，kernel 反而快了。怎么会？**

<details><summary>答案</summary>

块变大了：每个线程块用更多寄存器和共享内存，线程束就少了，但每个字节用的次数更多。占用率只是手段。

</details>

## 要记住的

- 预热之后，一个 kernel，一次启动：`--profile-from-start off --launch-count 1`。
- 先看 Speed of Light，再看它指向的那一节。两个都低，看线程束状态。
- 字节数是事实；分析器底下的速率不是。
- nvprof 的名字不能用了；`gld` 看不见 TMA。
- 要看一整步，用 app-range，或者 `dpscope ncu`。

**延伸阅读**：[NVIDIA 的分析指南](https://docs.nvidia.com/nsight-compute/ProfilingGuide/)、[dpscope 的访存指南](../../docs/ncu-guide.md)。下一篇：[Nsight Systems](04-nsight-systems.ipynb)。
"""
