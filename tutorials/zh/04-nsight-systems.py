# %% [markdown]
"""
# 4. Nsight Systems 与 NVTX

*最后验证：2026-11-16，NVIDIA H200，Nsight Compute 2025.3.1 自带的 nsys。*

**难度**：实践。**预备知识**：[第 1 课](01-how-a-gpu-step-works.ipynb)；有一道练习要用一点 SQL。**时间**：阅读约 20 分钟，练习另需 30 分钟左右。

Nsight Compute 深入一个 kernel，Nsight Systems（`nsys`）则同时看全局：主机线程、CUDA 调用、拷贝、每条流上的 kernel，都在同一个时间轴上。它的开销很小，看到的接近程序真实的运行。找空隙就用它。（安装方法见[第 3a 课](03a-run-nsight-compute.ipynb)的 3.1 节。）

**读完之后你能够**

- 用命令行，或在程序运行时手动录制你想看的几步，而不是几个 GB 的无关内容；
- 用五种方式给代码打标记，让时间线显示你自己的名字；
- 看懂界面，并在没有 GPU 的机器上用 Python 从 SQLite 导出文件读出五个视角；
- 避开毁掉录制的六个错误，以及一个泄密的错误。

答案：[solutions/lesson_4.py](../solutions/lesson_4.py)。
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

print(recorded.output("nsys-version"))

# %% [markdown]
"""
## 4.1 用 `nsys profile` 录制

工作分三步：在有 GPU 的机器上录制（得到 `.nsys-rep` 文件），把文件拷出来，在自己的电脑上查看（`nsys-ui`，免费）或导出（4.4 节）。一条命令就能录制，随程序结束：

```bash
nsys profile --trace=cuda,nvtx,osrt --sample=none --cpuctxsw=none \
    --capture-range=cudaProfilerApi --capture-range-end=stop --force-overwrite=true \
    --output=case_4 \
    python programs/case_4.py --steps 3
```

| 选项 | 作用 |
| --- | --- |
| `--trace=cuda,nvtx,osrt` | 录什么：CUDA 调用和 kernel、NVTX 区间、操作系统调用；还可以加 `cudnn`、`cublas` |
| `--sample=none --cpuctxsw=none` | 不采样主机线程，不录上下文切换：两者都需要权限，也会拖慢主机 |
| `--capture-range=cudaProfilerApi` | 只录 `torch.cuda.profiler.start()` 和 `stop()` 之间的部分 |
| `--capture-range-end=stop` | 之后停止录制，程序继续运行 |
| `--delay=N --duration=N` | 另一种方式：N 秒后开始，持续 N 秒 |
| `--gpu-metrics-devices=all` | 采样 GPU 各单元的忙碌程度（旧版：`--gpu-metrics-device`）；需要权限 |
| `--cuda-memory-usage=true` | 显存的分配 |
| `--cuda-graph-trace=node` | CUDA graph 里的 kernel，否则只显示为一整块 |
| `--output=NAME --force-overwrite=true` | 输出到哪里 |

不同版本的选项不同，用 `nsys profile --help` 查看。多个 rank 时，把 nsys 放在启动器前面（`nsys profile … torchrun train.py`）：它会跟踪子进程，一台机器上的所有 rank 在同一份报告里。`dpscope nsys` 会按所安装的 nsys 生成这条命令，预热，对每种方法录三步，并读出结果：

```bash
dpscope nsys --methods flat --print-command
```
"""

# %%
print(recorded.output("nsys-profile", last=14))

# %% [markdown]
"""
**练习 4.1。** 写出录制 `programs/case_2.py` 三步的命令。
"""

# %%
command = ...

# %%
check("4.1", command)

# %% [markdown]
"""
## 4.2 用 `nsys launch` 手动录制

有时你想先看到训练正常，**然后**再录。在会话里启动程序，这时还没有录制；从另一个终端可以随时开始、停止，次数不限：

```bash
nsys launch --session-new=lesson --trace=cuda,nvtx python programs/case_2.py --steps 5000
nsys sessions list
nsys start --session=lesson --sample=none --force-overwrite=true --output=by_hand
nsys stop --session=lesson
nsys shutdown --session=lesson --kill=sigkill
```

| | `nsys profile` | `nsys launch` |
| --- | --- | --- |
| 何时开始 | 立刻、延迟之后，或由程序决定 | 由你决定 |
| 次数 | 一次 | 不限 |
| 适合 | 脚本、已知的步 | 长时间运行、“现在变慢了” |

`dpscope nsys --methods flat --launch` 会为 dpscope 的任务打印这几行命令。
"""

# %%
for name in ("nsys-sessions", "nsys-start", "nsys-stop"):
    print(f"$ {name}: {recorded.output(name, last=8)}")

# %% [markdown]
"""
**练习 4.2。** 哪种合适，`"profile"` 还是 `"launch"`？
"""

# %%
way = {"a script in CI": ..., "it became slow after an hour": ...}

# %%
check("4.2", way)

# %% [markdown]
"""
## 4.3 NVTX：让时间线显示你的名字

几千个名为 `vectorized_elementwise_kernel` 的 kernel 说明不了什么。**NVTX** 区间给代码段命名。没有分析器时，一个区间在我们这台 H200 的主机上花 0.36 µs<!-- = first_look()["nvtx_range_us"] -->，所以可以一直留在代码里。五种方式：

| 方式 | 用 PyTorch | 用 `nvtx` 包（`pip install nvtx`） |
| --- | --- | --- |
| 装饰器 | `@nvtx_range("augment")`（dpscope） | `@nvtx.annotate("augment", color="blue")` |
| 上下文 | `with nvtx_range("forward"):`（dpscope）、`torch.cuda.nvtx.range` | `with nvtx.annotate("forward"):` |
| push 和 pop | `torch.cuda.nvtx.range_push("x")`、`range_pop()` | `nvtx.push_range("x")`、`nvtx.pop_range()` |
| start 和 end | `h = torch.cuda.nvtx.range_start("x")`、`range_end(h)` | `h = nvtx.start_range("x")`、`nvtx.end_range(h)` |
| 自动 | `torch.autograd.profiler.emit_nvtx()`；`dpscope nsys --autograd` | `nvtx.Profile()`；`python -m nvtx script.py` 标记每个函数 |

push 和 pop 可以嵌套，属于同一个线程；start 和 end 可以交叠，也可以在另一个线程结束。没有 CUDA 的 PyTorch 里 `torch.cuda.nvtx` 会报错，dpscope 的 `nvtx_range` 则什么也不做，所以同样的代码到处能跑。`programs/annotated.py` 用到了全部方式。这是它在 H200 上的时间线：

```bash
nsys profile --trace=cuda,nvtx --sample=none --cpuctxsw=none --capture-range=cudaProfilerApi \
    --capture-range-end=stop --force-overwrite=true --output=annotated python programs/annotated.py
```
"""

# %%
from dpscope.instruments.nsys import views
from dpscope.reports.trace.figures import draw_capture

annotated = recorded.timeline("annotated")
pictures.show(
    draw_capture(views.lanes(annotated)) if annotated else None,
    "annotated.py on an H200: NVTX ranges on top, CUDA calls of the host below them, then the GPU's stream.",
    "H200 上的 annotated.py：最上面是 NVTX 区间，下面是主机的 CUDA 调用，再下面是 GPU 的流。",
)
if annotated:
    print("ranges:", ", ".join(sorted({r.name for r in annotated.ranges})))

# %% [markdown]
"""
**autograd 的区间。** 用 `emit_nvtx`，前向和反向的每个算子都是一个区间，反向的区间带有对应前向算子的序号，由此可以从一个反向 kernel 找到引起它的代码行。区间很多，主机变慢：用来看，不用来计时。新版 nsys 不改代码也能做到：

```bash
nsys profile --trace=cuda,nvtx --pytorch=autograd-nvtx --sample=none \
    --capture-range=cudaProfilerApi --capture-range-end=stop --force-overwrite=true \
    --output=autograd \
    python programs/case_7.py --steps 1
```
"""

# %%
from collections import Counter

autograd = recorded.timeline("autograd")
if autograd:
    names = Counter(r.name.split(",")[0] for r in autograd.ranges)
    print(f"{len(autograd.ranges)} ranges in one step of case 7 on the H200; the most frequent:")
    for name, count in names.most_common(6):
        print(f"  {count:4} × {name[:90]}")
else:
    print(recorded.NOT_RECORDED)

# %% [markdown]
"""
**练习 4.3。** 给一步打标记：外层区间 `step`，里面是 `forward`、`backward` 和 `optimizer`。参数 `annotate` 的用法与 `nvtx_range` 相同（`with annotate("step"): …`）。用这些名字，`dpscope nsys --read` 就能为你自己的训练循环给出按阶段的表。
"""


# %%
def annotated_step(annotate): ...


# %%
check("4.3", annotated_step)

# %% [markdown]
"""
## 4.4 从报告到数据库

```bash
nsys export --type=sqlite --force-overwrite=true --output=case_4.sqlite case_4.nsys-rep
nsys stats --report cuda_gpu_kern_sum,cuda_gpu_mem_size_sum,cuda_api_sum,nvtx_gpu_proj_sum \
    --force-export=true case_4.nsys-rep
dpscope nsys --read case_4.sqlite
```

`nsys stats` 打印现成的表格。SQLite 文件里每类事件一张表（`CUPTI_ACTIVITY_KIND_KERNEL`、`…_MEMCPY`、`…_RUNTIME`、`NVTX_EVENTS`；名字是 `StringIds` 里的编号；时间单位是纳秒），`correlationId` 把启动和 kernel 对应起来。dpscope 在任何机器上都能读。录下的 case 4 用 `dpscope nsys --read` 读出来是：
"""

# %%
print(recorded.output("nsys-read", last=24))

# %% [markdown]
"""
**练习 4.4。** 写一条 SQL，给出每个 kernel 的短名字和总纳秒数，最长的在前。`CUPTI_ACTIVITY_KIND_KERNEL` 有 `start`、`end` 和 `shortName`，后者是 `StringIds(id, value)` 里的编号。
"""

# %%
query = ...

# %%
check("4.4", query)

# %% [markdown]
"""
## 4.5 界面，以及时间线的五个视角

`nsys-ui NAME.nsys-rep` 打开时间线。每行是一个线程或一条流，时间向右，所有行共用一个时间轴：
"""

# %%
timeline = recorded.timeline("case_4")
pictures.show(
    windows.draw_nsys_window(timeline, "case_4.nsys-rep") if timeline else None,
    "Nsight Systems' timeline, drawn (not a screenshot) from the recorded case 4. 1: the clock; 2: NVTX ranges; 3: CUDA calls of the host, waits in red; 4: the GPU's stream.",
    "Nsight Systems 的时间线，根据录下的 case 4 绘制（不是截图）。1：时间轴；2：NVTX 区间；3：主机的 CUDA 调用，红色为等待；4：GPU 的流。",
)

# %% [markdown]
"""
在界面里：**Ctrl** 加滚轮缩放；拖动选中一段，**Shift+Z** 放大；在一行上点右键选 *Show in Events View*，得到可以排序的表；点击一个 CUDA 调用会高亮它的 kernel。下面的五个视角是同样的内容，以数据的形式给出。

**视角一：GPU 的时间线。** 找流里的空隙；拷贝是在 kernel 旁边还是代替了 kernel；有没有从不重叠的流。
"""

# %%
views.gpu_timeline(timeline).head(4)

# %% [markdown]
"""
GPU 在整段录制中忙碌 49 %<!-- = busy_percent("case_4") -->：每层之后都有一个空隙，因为主机要先等到均值，才启动下一层。

**视角二：主机与 GPU。** 谁在等谁？花在 `…Synchronize` 上的时间是主机在等 GPU，在一步的末尾无害，在中间代价很大。如果空隙之后的 kernel 当时还没有启动，就是 GPU 在等主机。
"""

# %%
views.host_and_gpu(timeline).head(6)

# %% [markdown]
"""
**视角三：从整体到一次启动。** GPU 有多忙；有多少 kernel 比启动本身还短；一次启动要多久；在队列里待多久。从启动到执行的时间长是**好事**：主机领先。
"""

# %%
for what, value in views.levels(timeline).items():
    print(f"{what:50} {value:10.2f}")

# %% [markdown]
"""
**视角四：链路和机器。** 主机和设备之间传了什么，来自哪种内存，速度多少：
"""

# %%
for name in ("case_3", "case_3_c"):
    if seen := recorded.timeline(name):
        print(name, views.link(seen).to_string(index=False), sep="\n")
        pictures.show(
            draw_capture(views.lanes(seen)),
            f"Timeline of {name} on an H200: copies in yellow."
            if name == "case_3"
            else f"Timeline of {name}: copies on a stream of their own.",
            f"H200 上 {name} 的时间线：黄色为拷贝。" if name == "case_3" else f"{name} 的时间线：拷贝在单独的流上。",
        )

# %% [markdown]
"""
从可分页内存（case 3 方式 a）拷贝时，拷贝和 kernel 在同一条流上轮流进行，拷贝只有 10.0 GB/s<!-- = copies_gb_per_second("case_3") -->。预取的方式（c）从锁页内存拷贝，达到 55.4 GB/s<!-- = copies_gb_per_second("case_3_c") -->，有自己的流，与 kernel 并行。在第二张图里，GPU 还没做完第二步，主机早已下达了全部五步：“主机领先”就是这个样子。

**温度、功率、PCIe。** 由驱动提供：

```bash
nvidia-smi --query-gpu=name,temperature.gpu,power.draw,power.limit,clocks.sm,pcie.link.gen.current,pcie.link.width.current --format=csv
```
"""

# %%
print(recorded.output("nvidia-smi-query"))
log = recorded.card_over_time()
pictures.show(
    pictures.draw_card(log) if log else None,
    "Power, temperature and SM clock of the H200 by nvidia-smi, four readings a second: idle, then bf16 products for four seconds, then copies over PCIe.",
    "nvidia-smi 读出的 H200 功率、温度和 SM 时钟，每秒四次：先空闲，再做四秒 bf16 矩阵乘，然后经 PCIe 拷贝。",
)

# %% [markdown]
"""
矩阵乘让功率从 121 W<!-- = coolest("power.draw") --> 升到 694 W<!-- = hottest("power.draw") -->（上限是 700 W<!-- given: the line above -->），温度升到 62 °C<!-- = hottest("temperature.gpu") -->。同时 `clocks.sm` 从 1,980 MHz<!-- = hottest("clocks") --> 降到 1,290 MHz<!-- = coolest("clocks") -->：卡降低时钟，以免超过功率上限<!-- holds: hottest("power.draw") > 650 and coolest("clocks") < 0.8 * hottest("clocks") -->。密集的矩阵乘都会这样，这也是要在同一次运行里比较两个程序的理由：“变慢的程序”可能只是碰上了更热的卡。PCIe 是第 5 代<!-- = hottest("pcie.link.gen.current") -->，宽 16 条<!-- = hottest("pcie.link.width.current") --> 通道；空闲的卡为了省电可能报告更低的代数。

nvidia-smi 的 `utilization.gpu` 是著名的陷阱：它是有**任何** kernel 在运行的时间比例。一个 SM 上跑一个线程，它就是 100 %<!-- given -->。有权限时，`--gpu-metrics-devices=all` 可以把各单元的负载画在时间线上。

**上下文切换。** 如果操作系统把负责启动的线程换下 CPU 核，GPU 就会缺任务。`--cpuctxsw=process-tree` 录下每次切换；这里是 case 4 的 20 步：

```bash
nsys profile --trace=cuda,nvtx --sample=none --cpuctxsw=process-tree \
    --capture-range=cudaProfilerApi --capture-range-end=stop --force-overwrite=true \
    --output=switches \
    python programs/case_4.py --steps 20
python programs/context_switches.py switches.db
```
"""

# %%
print(recorded.output("nsys-switches", last=8))

# %% [markdown]
"""
有一些切换是正常的（等待任务的线程）。如果负责启动的线程切换很多，说明进程比 CPU 核多：减少数据加载的 worker，或者用 `taskset`。

**视角五：库。** kernel 是谁的？cuBLAS 和 cuDNN 只能选择（格式、形状、版本）；PyTorch 的逐元素 kernel 可以融合；自己的可以重写。
"""

# %%
views.libraries(timeline).head(8)

# %% [markdown]
"""
**练习 4.5。** 写一个函数，返回 GPU 最长的空隙有多长，以及结束它的 kernel。`table` 与 `views.gpu_timeline(timeline)` 相同：列为 `start_ms`、`ms`、`what`，按开始时间排列；kernel 可能重叠。
"""


# %%
def longest_gap(table): ...


# %%
if passed("4.5", longest_gap) and timeline:
    print("in case 4:", longest_gap(views.gpu_timeline(timeline)))

# %% [markdown]
"""
## 4.6 时间线上的差分隐私训练步

把一步的各阶段标成 dpscope 的 NVTX 区间，11.7 亿参数，批次 8，序列 1024，bf16，H200（2026-11-15）。kernel 算在它被**启动**时所处的阶段，不管在哪个线程：
"""

# %%
for method in ("standard", "flat", "ghost", "flash"):
    seen = recorded.captured("traces", method)
    phases = ", ".join(f"{p['phase']} {p['gpu_ms']:.1f}" for p in seen["phases"] if p["gpu_ms"] > 0.05)
    print(
        f"{method:9} GPU busy {seen['gpu']['busy_ms']:6.1f} ms, {seen['kernel_total']['calls']:5.0f} kernels; ms by phase: {phases}"
    )

# %% [markdown]
"""
对 flat 裁剪，nsys 说 GPU 每步忙碌 236.2 ms<!-- = captured("traces", "flat")["gpu"]["busy_ms"] -->，torch.profiler 说 235.8 ms<!-- = traced("traces", "flat")["gpu"]["busy_ms"] -->。两者的数据来源相同，都是 NVIDIA 的 CUPTI，所以一致只说明 dpscope 对两者的读取都正确，并不是独立的佐证。

## 4.7 六个注意事项，另加一个

1. **何时。** 固定的 `--delay` 会错过你想看的步，或者录到预热。让程序自己决定（`cudaProfilerApi`）。
2. **多久。** 几秒，不是几分钟。整个程序录了 1.2 GB<!-- given: measured with nsys 2025.3.1, docs/nsys.md's facts -->，而一步不到 0.1 MB<!-- given: the same -->。大报告打开很慢，在小机器上可能打不开。
3. **写到哪里。** nsys 写到当前目录，临时文件放在 `TMPDIR`：两处都要有空间和权限。
4. **谁的。** 在共享存储上，输出名里要带主机名（`%h`），否则机器之间会互相覆盖。
5. **调度系统**如果在一个 worker 结束时杀掉其他 worker，它们的报告就不完整：手动录制（4.2 节）。
6. **权限。** 采样主机要求 `/proc/sys/kernel/perf_event_paranoid` 不大于 2；GPU 指标要求计数器权限。没有权限就都关掉：CUDA 和 NVTX 不需要。

另外：**报告里有你的环境变量**，包括 shell 里导出的所有密钥，其他进程的也在内。用精简的环境启动 nsys（`env -i …`；`dpscope nsys` 就是这样做的），分享清理过的导出文件（`python -m dpscope.instruments.nsys.stripping`），不要分享报告。

有的安装只留下原始的 `.qdstrm`，nsys 旁边的 `QdstrmImporter` 可以把它变成报告；dpscope 会替你完成。

**练习 4.6。** 哪个文件可以附在公开的 issue 里？填 `True` 或 `False`。
"""

# %%
may_share = {"report.nsys-rep": ..., "stripped.sqlite": ...}

# %%
check("4.6", may_share)

# %% [markdown]
"""
## 小测验

**1. 流那一行是满的，一步还是慢。nsys 还有用吗？**

<details><summary>答案</summary>

它能说明是哪些 kernel 占满的（视角五）。一个 kernel 为什么慢，要问 Nsight Compute。

</details>

**2. `cudaStreamSynchronize` 占主机时间的 90 %<!-- given -->。不好吗？**

<details><summary>答案</summary>

看位置。在一步的末尾，说明主机快，在等忙碌的 GPU：好事。在中间，而且之后流里有空隙，就是隐藏的同步。

</details>

**3. 你的区间 `backward` 里没有 kernel，而反向传播明明运行了。为什么？**

<details><summary>答案</summary>

autograd 从自己的线程启动它们，那里看不到你的 push。调用 `backward()` 的线程此时在等待，所以要统计区间时间内**所有**线程的启动（dpscope 就是这样做的），或者用 `emit_nvtx`。

</details>

**4. 用 `--delay=120` 还是 `cudaProfilerApi` 来开始录制更好？**

<details><summary>答案</summary>

后者：它从某一步开始，而不是某个时刻，换到更快的机器上还是同一步。

</details>

## 要记住的

- nsys 看**何时**和**谁在等**，ncu 看一个 kernel **为什么**慢。
- 只录程序自己标出的几步。
- NVTX 区间几乎没有开销：给各阶段命名一次，所有工具都会显示。
- SQLite 导出就是数据：空隙、等待、拷贝和库都可以计算、可以测试。
- 报告里有秘密。分享之前先清理。

**延伸阅读**：[NVIDIA 的用户指南](https://docs.nvidia.com/nsight-systems/UserGuide/)、[dpscope 里的 nsys](../../docs/nsys.md)。下一课：[差分隐私的代价](05-what-privacy-costs.ipynb)。
"""
