# %% [markdown]
"""
# 3b. 读一份 Nsight Compute 报告

*最后验证：2026-11-16，NVIDIA H200 上的 ncu 2025.3.1。*

**难度**：实践；3.15 和 3.16 为进阶。**预备知识**：第 [1](01-how-a-gpu-step-works.ipynb)、[3a](03a-run-nsight-compute.ipynb) 课。**时间**：阅读约 20 分钟，练习另需 40 分钟左右。

在 H200 上用 `--set full` 分析了四个 kernel，这一课逐节阅读它们的报告。阅读不需要 GPU。

| 报告 | 是什么 |
| --- | --- |
| `addition` | case 1 方式 a 的后一半：2²⁸ 个 float32 数的 `t + b` |
| `product` | case 5 方式 a：float32 的 4096³ 矩阵乘 |
| `tensor_cores` | case 5 方式 b：同样的乘法，bfloat16 |
| `gram` | dpscope 计算一层逐样本梯度范数的 kernel |

**读完之后你能够**

- 在 Nsight Compute 的界面里找到方向：Summary、Details、Source、Raw；
- 用八个数说出一个 kernel 受什么限制、怎样改进；
- 分辨 ncu 的建议里哪些对你的 kernel 有意义。

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

关于这些 kernel 的说法，都有测试与录下的报告核对。答案：[solutions/lesson_3.py](../solutions/lesson_3.py)。
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
## 3.9 界面：Summary

用 `ncu-ui NAME.ncu-rep` 打开报告，或者把文件拖进窗口。第一页是 **Summary**，每次启动一行。下面画的是第 2 课的网络（批次 4096）的前十二个 kernel：
"""

# %%
pictures.show(
    windows.draw_ncu_summary("cnn"),
    "Nsight Compute's Summary page, drawn (not a screenshot) from a recorded report. 1: what ncu's rules think can be gained; 2: the kernel; 3: its duration; 4: throughputs in percent of the peak; 5: the other pages.",
    "Nsight Compute 的 Summary 页，根据录下的报告绘制（不是截图）。1：ncu 的规则估计能提升多少；2：kernel；3：耗时；4：吞吐量占峰值的百分比；5：其他页面。",
)

# %% [markdown]
"""
按耗时排序，从最上面开始看。*Estimated speedup* 是某条规则认为改好它指出的问题之后，这一次启动最多能快多少。它是一条规则对一个 kernel 给出的上限，不是承诺：乘以耗时，才知道值不值得。

**练习 3.9。** `launches` 是 `(duration_us, estimated_speedup_percent)` 的列表。返回最多能省下时间的那次启动的下标。
"""


# %%
def first_to_look(launches): ...


# %%
check("3.9", first_to_look)

# %% [markdown]
"""
## 3.10 Details 的第一节：Speed of Light

双击一行打开 **Details**。每个小节有一行数字，下面的框里是 ncu 规则的建议：
"""

# %%
pictures.show(
    windows.draw_ncu_details("addition"),
    "Nsight Compute's Details page, drawn (not a screenshot) from the report of the addition. 1: kernel, grid and block; 2: a section; 3: percent of the peak; 4: what a rule says; 5: the next sections, folded.",
    "Nsight Compute 的 Details 页，根据加法的报告绘制（不是截图）。1：kernel、网格和线程块；2：一个小节；3：占峰值的百分比；4：规则的建议；5：后面折叠的小节。",
)

# %% [markdown]
"""
**kernel 离硬件的极限有多近？** 先看两个数：**Compute (SM) Throughput** 和 **Memory Throughput**，都是占峰值的百分比。

- 内存高、计算低：受访存限制。反过来：受计算限制。
- **任意一个**超过 80 %<!-- given: the text of ncu's rule -->：ncu 认为设备利用得不错，要再快就得把工作转移到别的单元。
- **两者都**低于 60 %<!-- given: the text of ncu's rule -->：延迟问题，去看 *Warp State*。

*Memory Throughput* 是 DRAM、L2、L1（包括共享内存）某些部分的最大值，所以要看清是哪一层：`DRAM Throughput` 才说明字节是否真的来自显存。它不等于下面几行的最大值，因为那几行还算了别的部分：加法的 *L2 Cache Throughput* 是 93.8 %<!-- = metric("addition", "L2 Cache Throughput") -->，而 *Memory Throughput* 是 91.3 %<!-- = metric("addition", "Memory Throughput") --><!-- holds: metric("addition", "L2 Cache Throughput") > metric("addition", "Memory Throughput") == metric("addition", "DRAM Throughput") -->。
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
**练习 3.10。** 写出判断：两者都低于 60 返回 `"latency"`，否则返回较大者的名字，`"compute"` 或 `"memory"`。
"""


# %%
def verdict(compute, memory): ...


# %%
check("3.10", verdict)

# %% [markdown]
"""
## 3.11 Roofline（屋顶线）

同一个问题画成图（1.9 节）：横轴是每个 DRAM 字节的运算次数，纵轴是每秒的运算次数。在斜线下的 kernel 受访存限制，在平顶下的受计算限制，到屋顶的距离就是余地。屋顶是 dpscope 在 H200 上**实测**的，不是规格书上的；点是这四个 kernel。
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
有两点需要解释。

- 两个矩阵乘位于屋顶的 77 %<!-- = 100 * of_roof("product") --> 和 80 %<!-- = 100 * of_roof("tensor_cores") -->，而 ncu 报告的是峰值的 88 %<!-- = metric("product", "Compute (SM) Throughput") --> 和 91 %<!-- = metric("tensor_cores", "Compute (SM) Throughput") -->。占峰值的百分比，是指那次运行的时钟下的峰值；ncu 为了让两次运行可比，把 SM 时钟降到基础频率：*SM Frequency* 分别是 1.50 GHz<!-- = metric("product", "SM Frequency") --> 和 1.27 GHz<!-- = metric("tensor_cores", "SM Frequency") -->，不受限的卡可达 1.98 GHz<!-- = hottest("clocks") / 1e3 -->。屋顶是在时钟不受限时测的。`--clock-control none` 不改变时钟，dpscope 用的就是它。
- `addition` 位于屋顶**之上**，103 %<!-- = 100 * of_roof("addition") --><!-- holds: of_roof("addition") > 1 -->。实测的屋顶是某个程序的速率：我们用的是拷贝，读一个字节写一个字节。加法每写一个字节要读两个，读写的比例不同。规格书给出的是谁也超不过、谁也达不到的上限；实测的屋顶可能被超过百分之几。

**练习 3.11。** 返回一个 float32 kernel 的速率占屋顶的比例。`recorded.ceilings()` 里有 `dram_bytes_per_second` 和 `fp32_flops_per_second`。
"""


# %%
def of_roof(flops, nbytes, seconds): ...


# %%
check("3.11", of_roof)

# %% [markdown]
"""
## 3.12 Memory Workload Analysis

**字节从哪里来，通路用得好不好？** 界面里的图画出每一层，箭头上是流量。用数字表示：

- **Mem Busy**：缓存和 DRAM 内部有多忙。**Max Bandwidth**：它们之间的连接有多满。**Mem Pipes Busy**：发射访存指令的流水线有多忙。
- **L1/TEX Hit Rate**、**L2 Hit Rate**：查询的扇区（32 字节）中有多少命中。一行有四个扇区，只要其中一个就是部分利用。
- 下面是读写的表格：*sectors per request* 明显高于数据类型所需，说明地址分散。
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
- 加法对每个数只读一次，所以**读取**不可能命中缓存：L1 命中率 0 %<!-- = metric("addition", "L1/TEX Hit Rate") -->。L2 仍有 34 %<!-- = metric("addition", "L2 Hit Rate") -->，原始计数器说明了原因：读取的命中率是 0 %<!-- = counter("addition", "lts__t_sector_op_read_hit_rate.pct") -->，写入的命中率是 100 %<!-- = counter("addition", "lts__t_sector_op_write_hit_rate.pct") -->，因为 L2 接收写入时不需要找旧数据，而三个扇区里有一个是写<!-- holds: 30 < metric("addition", "L2 Hit Rate") < 38 and counter("addition", "lts__t_sector_op_read_hit_rate.pct") < 1 -->。命中率本身不能衡量复用。
- 矩阵乘的每个数要用几千次，L1 命中率却是 0 %<!-- = metric("product", "L1/TEX Hit Rate") -->：数据块绕过 L1 缓存进入**共享内存**，在那里复用。L2 命中的 90 %<!-- = metric("product", "L2 Hit Rate") --><!-- holds: metric("product", "L2 Hit Rate") > 80 and metric("product", "L1/TEX Hit Rate") < 1 --> 来自线程块之间的共享。
- 这里略去了 ncu 的建议：它对四个 kernel 都推荐 L2 压缩，而这对哪个都不重要。规则只认识计数器，不认识你的程序。

**练习 3.12。** 对 2²⁸ 个 float32 数，`t + b` 应当读多少字节、写多少字节？检查会核对你的数字；通过之后会与 ncu 的计数比较。
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
## 3.13 Compute Workload Analysis

**是哪条流水线在干活？** **IPC** 是每周期的指令数：*executed* 按经过的周期算，*issued* 按活跃的周期算。**SM Busy** 是两者中较大的一个：调度器发射的忙碌程度（*Issue Slots Busy*），以及最忙的流水线。流水线有：

| 流水线 | 做什么 |
| --- | --- |
| FMA | float32 乘加、整数乘法 |
| ALU | 整数、逻辑、比较 |
| Tensor | 矩阵指令 |
| LSU | 读写、共享内存 |
| TMA | 成块拷贝（Hopper） |
| XU | exp、sin、平方根、类型转换 |
| FP64 | float64 |
| Uniform | 一个 warp 的线程共用的标量 |
| ADU、CBU | 分支和常量的地址；分支和栅栏 |
| TEX | 纹理 |
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
- `product`：SM Busy 等于 Issue Slots Busy<!-- holds: metric("product", "SM Busy") == metric("product", "Issue Slots Busy") -->，因为调度器几乎每个周期都在发射；最忙的是 FMA 流水线，80 %<!-- = pipes("product")["FMA"] -->。
- `tensor_cores`：发射槽只有 11 %<!-- = metric("tensor_cores", "Issue Slots Busy") --> 忙，张量流水线有 95 %<!-- = pipes("tensor_cores")["Tensor"] --><!-- holds: max(pipes("tensor_cores"), key=pipes("tensor_cores").get) == "Tensor" -->。这里 IPC 低不是毛病：一条张量指令抵得上几千条其他指令。
- 如果矩阵乘的张量流水线空闲，就是数值格式选错了：比较这两个。

**练习 3.13。** 由 Issue Slots Busy 和各流水线（字典，占**经过**周期的百分比）计算 SM Busy。
"""


# %%
def sm_busy(issue_slots, pipes): ...


# %%
check("3.13", sm_busy)

# %% [markdown]
"""
## 3.14 warp 状态和调度器

**warp 在等什么？** 两条指令之间，warp 的周期花在**停顿**（stall）上。主要的有：

| 停顿 | 等什么 | 怎么改 |
| --- | --- | --- |
| long scoreboard | 全局内存、L2 | 更好的局部性、更多 warp、更多在途的读取 |
| short scoreboard | 共享内存、特殊函数 | 减少 bank 冲突 |
| MIO / LG throttle | 排队的访存指令太多 | 更宽的读写 |
| drain | kernel 结束时的写入 | 更少或更宽的写入 |
| barrier | 线程块里的其他 warp | 减少同步、均衡工作 |
| gmma | 自行执行的张量核心指令 | 不用改：张量流水线在工作 |
| math pipe throttle | 繁忙的算术流水线 | 不用改：受计算限制 |
| wait、selected、not selected | 没有问题：固定延迟；正在发射；选中了别的 warp | |
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
- `addition`：两条指令之间 warp 等待 217 个周期<!-- = metric("addition", "Warp Cycles Per Issued Instruction") -->，其中 72 %<!-- = stall_percent("addition", "long_scoreboard") --> 等读取（long scoreboard），12 %<!-- = stall_percent("addition", "drain") --> 等写入排空。
- *No Eligible* 是调度器找不到可发射 warp 的周期比例。只有在没有单元到达上限时，才值得据此去看停顿：`tensor_cores` 有 88 %<!-- = metric("tensor_cores", "No Eligible") -->，利用率却是 91 %<!-- = metric("tensor_cores", "Compute (SM) Throughput") --><!-- holds: metric("tensor_cores", "No Eligible") > 80 and metric("tensor_cores", "Compute (SM) Throughput") > 85 -->，因为少量指令就能让流水线满载；`addition` 有 94 %<!-- = metric("addition", "No Eligible") -->，而 DRAM 已满。
- *not selected* 很多，说明 warp 绰绰有余。

**练习 3.14。** 某个原因占 warp 周期的百分之几？`stalls` 是像 `recorded.stalls("addition")` 那样的字典。
"""


# %%
def share(stalls, reason): ...


# %%
check("3.14", share)

# %% [markdown]
"""
## 3.15 占用率（进阶）

**SM 能容纳多少 warp，实际有多少？** **理论**占用率受寄存器、共享内存和线程块大小限制（*Block Limit* 各行里最小的就是限制）；**实际**占用率是测得的。远低于理论值，说明工作不均衡，或者网格太小。占用率高本身不是目的：矩阵 kernel 占用大块数据，用很少的 warp 也跑得很好。
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
**练习 3.15。** 一个 SM 有 65,536 个寄存器，最多容纳 64 个 warp（2048 个线程）。每线程 `registers` 个寄存器、每块 `threads` 个线程时，占用率是百分之几？只能放整块。
"""


# %%
def occupancy(registers, threads): ...


# %%
check("3.15", occupancy)

# %% [markdown]
"""
## 3.16 源码视图（进阶）

是**哪一行**？CUDA C++ 编译时加 `-lineinfo`，它只加入行号，不会让代码变慢（`-G` 会）。Triton 的 kernel 自带行号。

```bash
nvcc -lineinfo -arch=sm_90 -o strided programs/strided.cu
ncu --set full --import-source yes -f -o strided ./strided
```

界面的 **Source** 页把代码和机器指令（SASS）并排显示，每一行都有停顿的采样和访存流量。下面是记录里访问全局内存的指令的计数：
"""

# %%
print((TUTORIALS / "programs" / "strided.cu").read_text(encoding="utf-8").split("int main")[0])
print(recorded.source_table())

# %% [markdown]
"""
`neighbours` 和 `strided` 搬运同样的数。前者相邻的线程读相邻的地址，后者读的地址相距很远，所以一个 warp 的每次请求要触及 32 个扇区<!-- = sectors_a_request("strided") --> 而不是 4 个<!-- = sectors_a_request("neighbours") -->，耗时是 2.5×<!-- = strided_times() -->。界面里，多余的扇区显示在源码行旁边；文本里 ncu 按指令给出：`LDG` 是读取，`STG` 是写入。

**练习 3.16。** `strided.cu` 的哪一行读取了分散的数？（第一行为 1。）
"""

# %%
scattered_line = ...

# %%
check("3.16", scattered_line)

# %% [markdown]
"""
## 3.17 四个 kernel 的结论

- `addition` 用了 DRAM 的 91.3 %<!-- = metric("addition", "DRAM Throughput") -->、算力的 7.5 %<!-- = metric("addition", "Compute (SM) Throughput") -->。只有少搬字节才有用，关于占用率的建议无关紧要。
- `product` 用了算力的 87.8 %<!-- = metric("product", "Compute (SM) Throughput") -->、DRAM 的 2.4 %<!-- = metric("product", "DRAM Throughput") -->，占用率 12.5 %<!-- = metric("product", "Achieved Occupancy") -->：占用率低，速度满。换一种数值格式，就换了一个屋顶。
- `tensor_cores` 就在那个屋顶上：90.7 %<!-- = metric("tensor_cores", "Compute (SM) Throughput") -->。
- `gram` 使用张量核心，53.6 %<!-- = metric("gram", "Compute (SM) Throughput") -->，几乎不碰 DRAM，14.8 %<!-- = metric("gram", "DRAM Throughput") -->。它的网格在 132 个 SM 上是 2.2 波<!-- = metric("gram", "Waves Per SM") -->，最后一波里大多数 SM 空闲：单独一层太小。flash 裁剪把模型的各层放进一次启动。

还有一个来自我们自己程序的提醒：对这一层，直接算出梯度需要 0.13 ms<!-- = took("per_sample_norms", "gradients") -->，Gram 的方式需要 0.25 ms<!-- = took("per_sample_norms", "gram") -->，其中 kernel 本身是 0.10 ms<!-- = metric("gram", "Duration") / 1e3 -->。其余是什么，这份报告说不出来，因为它只看到一个 kernel；看这次调用的 trace（第 2 课）才知道。Gram kernel 省下的是显存和字节，重要的是整个训练步（3.8 节）。kernel 的报告只回答 kernel 的问题。

## 小测验

**1. Memory Throughput 90 %<!-- given -->，DRAM Throughput 20 %<!-- given -->。kernel 受什么限制？**

<details><summary>答案</summary>

受某级缓存或共享内存限制：Memory Throughput 是各层某些部分的最大值。看 L1 和 L2，常见原因是 bank 冲突和分散的扇区。

</details>

**2. 改动之后占用率从 60 %<!-- given --> 降到 25 %<!-- given -->，kernel 反而更快。为什么？**

<details><summary>答案</summary>

数据块更大：每个线程块用更多的寄存器和共享内存，warp 就更少，但每个字节用得更多。占用率只是手段。

</details>

**3. 一个 kernel 每个数只读一次，写出的结果是读入的一半，L2 命中率是三分之一。有复用吗？**

<details><summary>答案</summary>

没有。命中的是写入：它们先到 L2。两读一写，三次查询里有一次命中。

</details>

**4. No Eligible 是 90 %<!-- given -->。看停顿之前先看什么？**

<details><summary>答案</summary>

先看 Speed of Light。如果 DRAM 或某条流水线接近上限，调度器没有可发射的指令正是因为到了上限，停顿只是它的影子。

</details>

## 要记住的

- 先看 Speed of Light，再看它指向的小节。两者都低：看 warp 状态。
- SM Busy 是发射槽和最忙流水线中较大的一个。
- 命中率也计入写入；共享内存不算 L1 命中。
- 实测的屋顶可能被超过百分之几；ncu 固定的时钟让 kernel 位于屋顶之下。
- ncu 的规则认识计数器，不认识你的程序。

**延伸阅读**：[NVIDIA 的 profiling 指南](https://docs.nvidia.com/nsight-compute/ProfilingGuide/)。下一课：[Nsight Systems](04-nsight-systems.ipynb)。
"""
