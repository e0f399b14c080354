# %% [markdown]
"""
# 3a. 运行 Nsight Compute

*最后验证：2026-11-16，NVIDIA H200 上的 ncu 2025.3.1。*

**难度**：实践。**预备知识**：[第 1 课](01-how-a-gpu-step-works.ipynb)。**时间**：阅读约 15 分钟，练习另需 30 分钟左右。

PyTorch Profiler 告诉你**哪个** kernel 慢，Nsight Compute（`ncu`）告诉你**为什么**：搬运了多少字节，哪个单元到了上限，warp 在等什么。它一次读取一个 kernel 的硬件计数器。这一课讲怎么运行它，[第 3b 课](03b-read-a-report.ipynb)讲怎么读它的报告。

**读完之后你能够**

- 安装 `ncu` 和 `nsys`，弄清计数器为什么被拒绝；
- 让 `ncu` 只看该看的 kernel，几秒钟就结束；
- 用现在的名字查询需要的指标，即使论文里写的是 nvprof 的名字；
- 统计整个训练步搬运的字节，无论是否差分隐私。

下面的命令由 `programs/run_on_gpu.sh` 在 H200 上运行过，输出取自它的记录。答案：[solutions/lesson_3.py](../solutions/lesson_3.py)。
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
from checks import check

print(recorded.output("ncu-version", last=3))

# %% [markdown]
"""
## 3.1 安装，以及它对程序做了什么

| 来源 | Nsight Compute（`ncu`） | Nsight Systems（`nsys`） |
| --- | --- | --- |
| CUDA toolkit | 自带：`/usr/local/cuda/bin/ncu` | 多数版本自带：`/usr/local/cuda/bin/nsys` |
| NVIDIA 软件源 | `apt install nsight-compute-2025.3.1` | `apt install nsight-systems-cli`（不含图形界面） |
| NVIDIA 网站 | [developer.nvidia.com/nsight-compute](https://developer.nvidia.com/nsight-compute) | [developer.nvidia.com/nsight-systems](https://developer.nvidia.com/nsight-systems) |
| 自己的电脑，用来打开报告（不需要 GPU） | 同一个安装包，含 `ncu-ui`，支持 Linux、Windows、macOS | 同上，含 `nsys-ui` |

PyTorch 的容器镜像里往往两者都没有，需要在镜像里安装 toolkit 的软件包。`dpscope doctor` 会说明找到了什么，缺的该怎么装：

```bash
dpscope doctor
```

还需要读取计数器的权限。租用的机器常常没有（`ERR_NVGPUCTRPERM`）。如果机器是你的，用 `NVreg_RestrictProfilingToAdminUsers=0` 加载驱动，或者以 root 运行；容器需要 `--cap-add=SYS_ADMIN`。如果不是，请联系服务商，或者使用第 2、4 课的工具，它们不需要计数器。

**它做了什么。** `ncu` 启动你的程序，并在其中注入一个库，能看到每次 kernel 启动。对要测的启动，它先等 GPU 空下来，设置计数器，运行 kernel，再读取计数器。计数器太多，一次读不完，所以 kernel 要**重放**：保存它的内存，每一遍（pass）再运行一次。因此一切都变慢，kernel 单独运行，**ncu 下的时间不是程序的时间**。只对少数 kernel 使用它，从中取字节数、比率和原因。

**练习 3.1。** 下面哪些可以从 ncu 报告里引用，作为程序的性质？填 `True` 或 `False`。
"""

# %%
may_quote = {"bytes": ..., "step time": ..., "hit rate": ...}

# %%
check("3.1", may_quote)

# %% [markdown]
"""
## 3.2 第一条命令

```bash
ncu --profile-from-start off --set basic --launch-count 1 python programs/case_1.py --steps 1
```

从后往前读。`python programs/case_1.py --steps 1` 就是平时启动程序的命令。`--launch-count 1`：一个 kernel 就够。`--set basic`：采集哪些小节。`--profile-from-start off`：在程序调用 `torch.cuda.profiler.start()` 之前不采集，case 在预热之后才调用它；没有这个选项，测到的就是张量的初始化。输出：
"""

# %%
print(recorded.output("ncu-basic", last=40))

# %% [markdown]
"""
**练习 3.2。** 写出对 `programs/case_5.py` 做同样事情的命令。
"""

# %%
command = ...

# %%
check("3.2", command)

# %% [markdown]
"""
## 3.3 set

**小节**（section）是报告的一页及其指标，**set** 是一组小节。

```bash
ncu --list-sets
```
"""

# %%
print(recorded.output("ncu-sets"))

# %% [markdown]
"""
| set | 用途 | 代价 |
| --- | --- | --- |
| `basic`（旧指南里叫 `default`） | 初步了解：Speed of Light、启动参数、占用率 | 几遍 |
| `detailed` | 另加内存和计算负载、源码计数器 | 更多 |
| `full` | 以上全部，另加 warp 状态、内存表格、各种 roofline | 几十遍 |
| `roofline` | 各种数值格式的 roofline 图 | 指标几乎和 `full` 一样多 |
| 不用 set，用 `--metrics a,b` | 只要你指定的计数器 | 常常只要一遍 |

先用 `basic`；`full` 只用于**一个 kernel 的一次启动**。*Estimated Metrics* 一列反映代价：`basic` 213 个，`roofline` 6649 个，`full` 7794 个<!-- holds: all(n in output("ncu-sets") for n in ("213", "6649", "7794")) -->。

**练习 3.3。** 哪些 set 含有 warp 状态的小节 `WarpStateStats`？给出名字的列表。
"""

# %%
sets_with_warp_states = ...

# %%
check("3.3", sets_with_warp_states)

# %% [markdown]
"""
## 3.4 指标和它们的名字

指标名分几段：`dram__bytes_read.sum.per_second` 里，`dram` 是单元，`bytes_read` 是物理量，`.sum`（或 `.avg`、`.max`）是各实例的合并方式，最后是再加工（没有、`.per_second`、`.pct_of_peak_sustained_elapsed`）。可以查询有哪些指标；加上 `--chips` 就不需要 GPU：

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
Hopper 上常用的指标：

| 问题 | 指标 |
| --- | --- |
| 读写 DRAM 的字节 | `dram__bytes_read.sum`、`dram__bytes_write.sum` |
| kernel 的运行时间 | `gpu__time_duration.sum` |
| SM 有多忙 | `sm__cycles_active.avg.pct_of_peak_sustained_elapsed` |
| SM 上的 warp | `sm__warps_active.avg.pct_of_peak_sustained_active` |
| 读写单元（LSU）的读写 | `l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum`、`…_op_st.sum` |
| float32 加法 | `smsp__sass_thread_inst_executed_op_fadd_pred_on.sum` |
| bfloat16 张量核心运算 | `sm__ops_path_tensor_src_bf16_dst_fp32.sum` |

`smsp` 就是 1.7 节讲的 SM 子分区：每个 SM 四个，各有调度器。H200 上 `smsp__….sum` 是 528 个子分区之和。

**旧名字。** 论文和脚本里还常见 nvprof 的名字，`ncu` 不接受：

```bash
ncu --profile-from-start off --metrics dram_read_throughput \
    python programs/case_1.py --steps 1
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

在 Hopper 上 `gld` 是个陷阱：矩阵 kernel 通过拷贝引擎（TMA）取数，绕过了读写单元，所以矩阵乘的 `gld` 几乎为零。dpscope 接受旧名字（`dpscope ncu --metrics dram_read_throughput`），也会计入 TMA。

**练习 3.4。** 把指标名拆开：返回单元、物理量、合并方式和再加工（没有则为空字符串）。
"""


# %%
def parts(name): ...


# %%
check("3.4", parts)

# %% [markdown]
"""
## 3.5 过滤：少看一些

一个训练步要启动几千个 kernel。四种过滤方式，可以单独用也可以一起用：

| 过滤 | 例子 |
| --- | --- |
| 程序的一段 | `--profile-from-start off` 和 `torch.cuda.profiler.start()` … `stop()` |
| 按 kernel 名字 | `--kernel-name regex:elementwise` |
| 按次数 | `--launch-skip 10 --launch-count 2`（只数匹配的） |
| 按 NVTX 区间 | `--nvtx --nvtx-include "step/"` |

```bash
ncu --profile-from-start off --kernel-name regex:elementwise --launch-skip 10 --launch-count 2 \
    --metrics gpu__time_duration.sum \
    python programs/case_2.py --steps 1
ncu --nvtx --nvtx-include "step/" --nvtx-push-pop-scope process --launch-count 3 --metrics \
    gpu__time_duration.sum \
    python programs/case_7.py --steps 1
```

怎么知道 kernel 的名字？不加过滤、用 `--set basic` 运行一次，或者从 trace 里读（第 2 课）。反向传播由 autograd 自己的线程启动，那里没有你的 NVTX 区间：`--nvtx-push-pop-scope process` 让区间对所有线程生效。同一个 kernel 匹配多次，**每次启动**给出一个结果，ncu 不取平均。
"""

# %%
print(recorded.output("ncu-name-filter", first=0, last=24))

# %% [markdown]
"""
**练习 3.5。** 用哪些选项可以只分析名字含 `gemm` 的第 11 和第 12 个 kernel？
"""

# %%
flags = ...

# %%
check("3.5", flags)

# %% [markdown]
"""
## 3.6 重放模式

| 模式 | 重复什么 | 用于 PyTorch |
| --- | --- | --- |
| `kernel`（默认） | 每个 kernel，恢复它的内存 | 可用；几千个就很慢 |
| `application` | 整个程序，每遍一次 | 要求每次启动的顺序相同 |
| `range` | 一段，录制 API 调用 | 用于 PyTorch 会失败 |
| `app-range` | 整个程序；对整段计数 | 可用：**整个训练步得到一行结果** |

```bash
ncu --replay-mode app-range --metrics dram__bytes_read.sum,dram__bytes_write.sum \
    python programs/case_7.py --steps 1
```

最后一种回答“一步搬运多少字节”，`dpscope ncu` 用的就是它。
"""

# %%
print(recorded.output("ncu-app-range", last=20))

# %% [markdown]
"""
**练习 3.6。** 哪个问题用哪种模式？
"""

# %%
mode = {"why is this kernel slow": ..., "bytes of a whole step": ...}

# %%
check("3.6", mode)

# %% [markdown]
"""
## 3.7 输出

| 想要 | 命令 |
| --- | --- |
| 给图形界面（`ncu-ui`）的报告 | `-o NAME` 写出 `NAME.ncu-rep`；`-f` 覆盖 |
| 报告的文本 | `ncu --import NAME.ncu-rep --page details` |
| 报告的数值 | `ncu --import NAME.ncu-rep --page raw --csv --print-units base` |
| 直接输出 CSV | `--csv --log-file NAME.csv`，**不要**加 `-o` |
| 源码视图 | 编译时加 `-lineinfo`，运行时加 `--import-source yes`；再用 `--page source`（第 3b 课） |

旧指南里的 `--csv -o report.csv` 得到的是名为 `report.csv.ncu-rep` 的二进制报告。raw CSV 的第一行是名字，第二行是单位，数字带千位分隔符。Details 页上每个值自己选单位（有的 `us`，有的 `ms`），要看清楚。`--import-sass no` 可以减小报告。

```bash
ncu --profile-from-start off --csv --log-file live.csv --metrics gpu__time_duration.sum \
    --launch-count 2 \
    python programs/case_1.py --steps 1
ncu --import addition.ncu-rep --page details
```

对 Python 程序：`python` 和脚本写在最后；子进程会被跟踪（`--target-processes all`，`torchrun` 下也一样）；在 `profiler.start()` 之前预热，否则测到的是 Triton 的编译和 cuDNN 的搜索。

**练习 3.7。** 读 raw CSV：返回第一个 kernel 的“指标 → 数值”，跳过不是数字的列。
"""


# %%
def read_raw(text): ...


# %%
check("3.7", read_raw)

# %% [markdown]
"""
## 3.8 整个训练步，有无差分隐私

对 DP-SGD 来说，问题不在一个 kernel，而在一步搬运的字节。`dpscope ncu` 用 app-range 模式统计字节，时间取自不带 ncu 的运行：

```bash
dpscope ncu --model 1b --dtype bf16 --batch-size 8,16 --seq-len 256,1024 --out traffic
dpscope ncu --methods standard,flat --print-command
```

批次 8、序列 256 时，flat 裁剪搬运 320 GB<!-- = dram_gb("traffic", "flat", 8, 256) -->，普通训练搬运 80 GB<!-- = dram_gb("traffic", "standard", 8, 256) -->：是 3.99×<!-- = dram_times("traffic", "flat", 8, 256) -->。它为每个样本写出梯度，再读回来求范数和求和。ghost 裁剪是 2.26×<!-- = dram_times("traffic", "ghost", 8, 256) -->，flash 裁剪是 0.97×<!-- = dram_times("traffic", "flash", 8, 256) -->（2026-11-15）。
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
**什么不能算证据**：更高的 `dram_read_throughput`。两倍的字节花两倍的时间，吞吐量是一样的。要在相同的模型、批次、序列、数值格式和优化器下比较**字节**。[指南](../../docs/ncu-guide.md)讲了怎样在界面里比较两份报告。

**练习 3.8。** 批次 8、序列 256 时，一种方法搬运的字节是普通训练的几倍？数据在 `recorded.dram_gb("traffic", method, 8, 256)` 里。
"""


# %%
def bytes_ratio(method): ...


# %%
check("3.8", bytes_ratio)

# %% [markdown]
"""
## 小测验

**1. 在 ncu 下一步慢了七倍。ncu 对这一段给出的带宽是错的吗？**

<details><summary>答案</summary>

字节数是对的，时间是分析器的。用字节数除以不带分析器的时间；不要用整段的 `.per_second`。

</details>

**2. H200 上矩阵乘的 `gld` 几乎为零，怎么回事？**

<details><summary>答案</summary>

数据块是通过 TMA 取来的，读写单元的计数器看不到。要在交叉开关处统计（`dpscope ncu` 的 *L2 to SM*），或者看 DRAM。

</details>

**3. `ncu` 在你的训练脚本上跑了好几分钟还没结束。先改什么？**

<details><summary>答案</summary>

它从一开始就分析每个 kernel。加上 `--profile-from-start off`，在脚本里调用 `torch.cuda.profiler.start()`，再加 `--kernel-name`、`--launch-count` 和更小的 set。

</details>

## 要记住的

- 预热之后只看一个 kernel 的一次启动：`--profile-from-start off --launch-count 1`。
- 先用 `basic`，单个 kernel 用 `full`，具体问题用 `--metrics`。
- 字节是事实；分析器下的速率和时间不是。
- nvprof 的名字已经不用了；`gld` 看不到 TMA。
- 整个训练步用 app-range，或者 `dpscope ncu`。

**延伸阅读**：[NVIDIA 的 profiling 指南](https://docs.nvidia.com/nsight-compute/ProfilingGuide/)、[dpscope 的数据搬运指南](../../docs/ncu-guide.md)。下一课：[读一份报告](03b-read-a-report.ipynb)。
"""
