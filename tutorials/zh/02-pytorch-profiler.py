# %% [markdown]
"""
# 2. PyTorch Profiler

*最后验证：2026-11-16，CPU 上用 torch 2.13，NVIDIA H200 上用 torch 2.11。*

**难度**：入门。**预备知识**：[第 1 课](01-how-a-gpu-step-works.ipynb)的 1.1 到 1.6 节。**时间**：阅读约 20 分钟，练习另需 40 分钟左右。

`torch.profiler` 随 PyTorch 一起提供，回答关于慢的第一个问题：**是哪些算子，谁在等？** 它不需要别的工具，在 CPU 上也能用。这一课录制一个小网络，用 torch 自带的表格和 dpscope 的工具来读，找到一个瓶颈，改好它，再测量收益。

**读完之后你能够**

- 配置一次录制，选择看哪些步；
- 按时间、形状和内存读 torch 的表格，知道该信哪一列；
- 找到瓶颈、改好它，并用不带分析器的计时证明收益；
- 在 Perfetto 里打开 trace，认出等待、空隙和拷贝。

练习的答案：[solutions/lesson_2.py](../solutions/lesson_2.py)。
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
import inspect
import os
import warnings

os.environ |= {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # the profiler is talkative
warnings.filterwarnings("ignore", message=".*clears events at the end of each cycle")

import cnn
import pictures
import recorded
import torch
import windows
from checks import check
from practice import device_here

device = device_here()
print(f"torch {torch.__version__}, measuring on: {device}")

# %% [markdown]
"""
## 2.1 观察对象

一个处理图像的小网络（`programs/cnn.py`）、一个优化器和一步训练。这一步先对批次做归一化，写法是初学者常用的：一张一张地来。
"""

# %%
print(inspect.getsource(cnn.normalise_one_by_one))
print(inspect.getsource(cnn.network))
step = cnn.make_step(cnn.normalise_one_by_one, device)

# %% [markdown]
"""
**练习 2.1。** 对一张图像，`(image - image.mean()) / image.std()` 直接调用了几个 PyTorch 算子？（一个批次有 128 张。）
"""

# %%
operators_per_image = ...

# %%
check("2.1", operators_per_image)

# %% [markdown]
"""
## 2.2 一次录制及其设置

| `torch.profiler.profile` 的参数 | 作用 | 代价 |
| --- | --- | --- |
| `activities=[CPU, CUDA]` | 主机上的算子；kernel 和拷贝 | 没有 GPU 的机器去掉 `CUDA` |
| `schedule=…` | 录制哪些步（2.3 节） | 无 |
| `on_trace_ready=…` | 每个周期结束时调用，用来保存 | 写文件的时间 |
| `record_shapes=True` | 输入的形状：区分不同的 `mm` | 每个算子多一点时间 |
| `profile_memory=True` | 每次分配和释放，以及所属算子 | 每次分配多一点时间 |
| `with_stack=True` | Python 的代码行 | 很慢，文件很大 |
| `with_flops=True` | 由形状算出的乘法和卷积的运算量 | 很小 |
| `with_modules=True` | 模块名，只对 TorchScript 有效；请用 `dpscope trace --modules` | |
| `acc_events=True` | 保留所有周期的事件；否则每个周期清空 | 内存 |

每项设置都会让一步变慢。**分析器下的一步不是真正的一步**：从分析器里取**比例**，从不带分析器的运行里取**时间**。使用 schedule 时，每步结束要调用 `profiler.step()`，否则 schedule 不会前进。
"""

# %%
from torch.profiler import ProfilerActivity, profile

activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
for _ in range(3):
    step()  # warm up

with profile(activities=activities, record_shapes=True, profile_memory=True) as profiler:
    for _ in range(3):
        step()
print(f"{len(profiler.events())} events in three steps")

# %% [markdown]
"""
**练习 2.2。** 需要这些信息，分别用哪个参数？
"""

# %%
argument = {"shapes": ..., "lines of Python": ..., "allocations": ...}

# %%
check("2.2", argument)

# %% [markdown]
"""
## 2.3 录制哪些步：schedule

一次运行的头几步与后面不同：要分配显存、选择 kernel、填充缓存。schedule 规定开头跳过多少步（`skip_first`），之后每个周期等待（`wait`）、预热（`warmup`，录了再丢掉，因为分析器自身的启动有干扰）、录制（`active`）各多少步，以及重复（`repeat`）多少次。三种就够用：

| schedule | 看什么 | 回答的问题 |
| --- | --- | --- |
| `early_training` | 头几步 | 为什么开始得慢？ |
| `steady_state` | 五十步之后的十步，两次 | 一步要花多少时间？ |
| `periodic` | 每隔一段录三步 | 一步在运行过程中有没有变化？ |
"""

# %%
from dpscope.instruments.trace import early_training
from dpscope.vocabulary.instruments import SCHEDULES

pictures.show(
    pictures.draw_schedules({name: SCHEDULES[name] for name in ("early_training", "steady_state", "periodic")}),
    "Which steps three schedules record.",
    "三种 schedule 各记录哪些步。",
)
recorded_steps = []
with profile(
    activities=activities, schedule=early_training(), on_trace_ready=lambda p: recorded_steps.append(p.step_num)
) as early:
    for _ in range(8):
        step()
        early.step()
print(f"early_training was ready after step {recorded_steps}")

# %% [markdown]
"""
**练习 2.3。** 用 `torch.profiler.schedule(...)` 做一个 schedule，录制第 10、11、12 步和第 20、21、22 步（从第 0 步数起），每次之前预热一步。
"""

# %%
my_schedule = ...

# %%
check("2.3", my_schedule)

# %% [markdown]
"""
## 2.4 torch 自带的表格

`key_averages()` 按名字汇总事件，`.table()` 打印出来。所有的指南都会展示它，所以要会读：
"""

# %%
print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=8, max_name_column_width=36))

# %% [markdown]
"""
- **Self CPU** 是算子自身的时间，**CPU total** 包含它调用的算子。想知道时间花在**哪里**，按 total 排序；想知道**谁**在干活，按 self 排序。total 加起来不等于总时间：调用者和被调用者都算了一次。
- **Self CPU Mem** 是该算子分配的内存减去释放的内存。
- 在 GPU 上还有 **CUDA** 列，应当按它们排序（`sort_by="self_cuda_time_total"`）：异步算子的 CPU 时间只是启动它的时间。

同一个网络在 H200 上录制三步：
"""

# %%
print(recorded.table("one-by-one-by-device-time"))

# %% [markdown]
"""
先看最下面两行。`Self CUDA time total` 是三步里 GPU 工作的时间，`Self CPU time total` 是主机工作的时间：GPU 只在其中一小部分时间里工作<!-- holds: totals("one-by-one")["self_device_ms"] < 0.5 * totals("one-by-one")["self_cpu_ms"] -->。（算子和它启动的 kernel 各占一行，GPU 时间相同；最下面一行只算一次。）再看 *# of Calls* 和 *CUDA time avg*：`std`、`mean`、`div`、`sub` 各运行 384 次，每次一到三微秒。没有哪次调用慢，只是太多。受启动限制的程序，在这张表里就是这个样子。

这个对象还有三种用法。（`total_average()` 把所有行相加，所以在 GPU 上它的设备时间同时算了算子和 kernel，大约是表格最下面一行的两倍。）
"""

# %%
by_shape = profiler.key_averages(group_by_input_shape=True)
total = profiler.key_averages().total_average()
print(
    f"total_average(): {total.self_cpu_time_total / 1e3:.1f} ms of host time, {total.self_device_time_total / 1e3:.1f} ms of GPU time"
)
print(f"events(): {len(profiler.events())} single events; the first: {profiler.events()[0].name}")
print(by_shape.table(sort_by="self_cpu_time_total", row_limit=5, max_name_column_width=24, max_shapes_column_width=40))

# %% [markdown]
"""
> **旧名字。** 2024 年以前的脚本会用 `cuda_time_total` 读取一行，现在会抛出 AttributeError，新名字是 `device_time_total`（`sort_by` 仍接受旧名字）。`torch.profiler.ProfilerMetrics` 并不存在。`export_memory_timeline` 已弃用。

**练习 2.4。** 写一个函数，返回调用次数最多的算子的名字和次数。
"""


# %%
def most_called(profiler): ...


# %%
check("2.4", most_called)

# %% [markdown]
"""
## 2.5 变成数据

dpscope 把录制结果变成 DataFrame。每个函数都接受一个 profiler、一份读入的 trace，或 trace 的路径：`basic_analysis`（按时间和内存列出算子）、`advanced_analysis`（按算子、按输入形状）、`memory_analysis`、`generate_performance_report`（合成一份文本，随运行保存）和 `detect_bottlenecks`（超过阈值的算子，最慢的在前）。
"""

# %%
from dpscope.instruments.trace import (
    advanced_analysis,
    basic_analysis,
    detect_bottlenecks,
    generate_performance_report,
    memory_analysis,
)

basic_analysis(profiler, limit=6)["by CPU time"]

# %%
operators = advanced_analysis(profiler, limit=10_000)["by operator"].sort_values("calls", ascending=False)
print(operators[["operator", "calls", "self_cpu_ms"]].head(8).to_string(index=False))
for found in detect_bottlenecks(profiler, threshold_ms=2.0)[:4]:
    print(
        f"{found.name:32} {found.cpu_ms:8.1f} ms of host time in {found.count:5} calls, shapes {found.input_shapes}"[
            :110
        ]
    )

# %%
report = generate_performance_report(profiler, "the CNN", limit=3)
print("\n".join(report.splitlines()[:10]), "\n…")

# %% [markdown]
"""
按调用次数排序就很清楚了：排在前面的都由单张图像引起（`mean`、`std` 以及它们调用的算子），各有几百次；卷积只调用了六次。

**练习 2.5。** 名字里含有 `word` 的算子占主机工作的多大比例？用 `profiler.key_averages()`，注意两种时间里哪一种可以相加。
"""


# %%
def share_of(profiler, word): ...


# %%
check("2.5", share_of)

# %% [markdown]
"""
## 2.6 改掉一个瓶颈

网络只有两个卷积，但录制里的大多数算子不属于它们：`normalise_one_by_one` 对批次里的每张图像都要调用几个算子。它们都不慢，只是太多。这就是第 1 课里受启动限制的循环，改法也一样：用一个算子处理所有图像。
"""

# %%
from dpscope.instruments.timing import time_steps

print(inspect.getsource(cnn.normalise_at_once))
images = torch.rand(128, 3, 12, 12, device=device)
torch.testing.assert_close(cnn.normalise_at_once(images), cnn.normalise_one_by_one(images))  # first: is it the same?

before = time_steps(step, device=device, warmup=3, steps=15)
fixed_step = cnn.make_step(cnn.normalise_at_once, device)
after = time_steps(fixed_step, device=device, warmup=3, steps=15)
print(
    f"a step here: before {before.median_ms:.2f} ms, after {after.median_ms:.2f} ms: {before.median_ms / after.median_ms:.2f}× as fast"
)

with profile(activities=activities, record_shapes=True) as fixed:
    for _ in range(3):
        fixed_step()
for name, p in (("before", profiler), ("after", fixed)):
    print(f"operators called in three steps, {name}: {sum(row.count for row in p.key_averages())}")

# %% [markdown]
"""
在 H200 上，这个改动让一步从 9.3 ms<!-- = totals("one-by-one")["median_ms"] --> 降到 1.7 ms<!-- = totals("at-once")["median_ms"] -->，速度是原来的 5.3×<!-- = totals("one-by-one")["median_ms"] / totals("at-once")["median_ms"] -->。收益比 CPU 上大，因为 GPU 做卷积很快，而启动的开销不变。

三件事让它成为证据：先验证两者的结果相同；收益是**不带分析器**的中位数之比；分析器确认了原因，即算子的数量。要证明改对了，就要证明结果相同。

**练习 2.6。** 如果一个算子占一步的 `share`，改好之后完全不花时间，一步最多能快到原来的几倍？（这就是阿姆达尔定律，也是先看再优化的理由。）
"""


# %%
def at_most(share): ...


# %%
check("2.6", at_most)

# %% [markdown]
"""
## 2.7 在 Perfetto 里看 trace

表格丢掉了**时间先后**。把录制结果保存成 trace，在 <https://ui.perfetto.dev>（文件不会离开你的浏览器）或 `chrome://tracing` 里打开：
"""

# %%
folder = Path("traces-of-lesson-2")
folder.mkdir(exist_ok=True)
profiler.export_chrome_trace(str(folder / "cnn.json.gz"))
print(
    f"{folder / 'cnn.json.gz'}: {(folder / 'cnn.json.gz').stat().st_size / 1024:.0f} KiB, in the folder you started from"
)

# %% [markdown]
"""
没有 GPU 也可以试的文件：[H200 上 case 4 的 trace](../../benchmarks/results/2026-11-16-h200-tutorials/recorded/traces/case_4-a/trace.json.gz)；更多文件见[可下载的 trace](traces.md)，每个都附有一个问题。你会看到这样的窗口，它是根据这个文件画的：
"""

# %%
trace = recorded.trace_of("case_4", "a")
pictures.show(
    windows.draw_perfetto_window(windows.tracks_of(trace), "case_4-a/trace.json.gz") if trace else None,
    "Perfetto's window, drawn (not a screenshot) from the H200 trace of case 4, way a. 1: the clock; 2: the host's operators; 3: CUDA calls, waits in red; 4: the GPU's stream; 5: details of what you click.",
    "Perfetto 的窗口，根据 H200 上 case 4 方式 a 的 trace 绘制（不是截图）。1：时间轴；2：主机上的算子；3：CUDA 调用，红色为等待；4：GPU 的流；5：点击后显示的详情。",
)

# %% [markdown]
"""
- **W**、**S** 缩放，**A**、**D** 移动；点击一个事件可以看到它的参数：形状，kernel 还有网格和占用率。
- 主机的每个线程有一行；autograd 在自己的线程上执行反向传播。下面是 GPU 的各条流。
- 箭头从启动指向 kernel。kernel 离启动很远，说明主机领先，这是好事。
- GPU 那一行的空隙就是空闲。如果下一个 kernel 的启动发生在空隙开始**之后**，就是 GPU 在等主机。
- 很长的 `cudaStreamSynchronize` 是等待。看它上面的算子：`aten::item` 就是 `.item()`、`float()` 或 `if tensor:`。

dpscope 能读取这样的 trace，并用文字说出来：
"""

# %%
from dpscope.instruments.trace import read_trace, summarise

for way in "ab":
    if not recorded.trace_of("case_4", way):
        continue
    seen = summarise([read_trace(recorded.trace_of("case_4", way))])
    gpu = seen["gpu"]
    print(
        f"case_4 {way}, H200: traced step {seen['step_ms']:.2f} ms; GPU busy {gpu['busy_ms']:.2f} ms, waits for the host {gpu['idle_waiting_for_host_ms']:.2f} ms"
    )
    for wait in seen["synchronisations"]:
        print(f"    {wait['count']:4.0f} × {wait['call']} by {wait['operator']}: {wait['ms']:.2f} ms")

# %% [markdown]
"""
方式 a 每步等待 32 次<!-- = sum(w["count"] for w in trace_summary("case_4", "a")["synchronisations"] if w["operator"] == "aten::item") -->，每层一次，每次等待之后 GPU 都空闲一段。比较两行：GPU 的工作量相同，空闲时间不同。不要直接把等待的时长当作代价：主机在 GPU 忙的时候等待，什么也没损失。等待的代价是它**之后**的空闲时间。CPU 上没有等待；dpscope 会数出如果张量在 GPU 上**将会**发生的等待。

**练习 2.7。** 写一个函数，数出 trace 文件（gzip 压缩的 JSON，里面有列表 `traceEvents`）里有多少个 `aten::item` 事件。
"""


# %%
def reads(path): ...


# %%
check("2.7", reads)

# %% [markdown]
"""
## 2.8 内存

`memory_analysis` 给出已分配字节随时间的变化，回答峰值出现在**什么时候**。想知道峰值由**什么**组成（参数、激活、逐样本梯度），用 `dpscope memory`，第 5 课会讲。
"""

# %%
over_time = memory_analysis(profiler, limit=5)["over time"]
peak_row = over_time.loc[over_time["total_bytes"].idxmax()]
print(
    f"highest {peak_row['total_bytes'] / 2**20:.2f} MiB above the start, {peak_row['time_ms']:.2f} ms in, at {peak_row['operator']}"
)
print(recorded.table("one-by-one-by-memory"))

# %% [markdown]
"""
这张表是 torch 在 H200 上打印的，按 `self_device_memory_usage` 排序。

**练习 2.8。** `changes` 是按顺序排列的分配（正数）和释放（负数）。返回活跃内存的峰值。
"""


# %%
def peak(changes): ...


# %%
check("2.8", peak)

# %% [markdown]
"""
## 2.9 差分隐私训练多了什么

`dpscope trace` 把每种方法与普通训练放在一起录制，各用一个独立的进程，带分析器和不带分析器各一次：

```bash
dpscope trace --methods standard,flat,ghost,flash --model 1b --dtype bf16 --batch-size 8 \
    --seq-len 1024
```

下面是它在 H200 上的结果（2026-11-15），根据录下的文件绘制。从**阶段**看，flat 的 `clip` 和 ghost 很长的 `backward` 最突出；从**差异**看，是哪些算子让一种方法比普通训练慢，它们加起来就是两步之差：
"""

# %%
from dpscope.reports.trace.figures import draw_differences, draw_phases

rows = recorded.sweep("traces").rows
pictures.show(
    draw_phases(rows),
    "Time of a step by phase for four methods on an H200.",
    "H200 上四种方法一步的时间，按阶段划分。",
)
pictures.show(
    draw_differences(rows),
    "What each method adds to an ordinary step, by operator.",
    "每种方法比普通训练的一步多出的时间，按算子划分。",
)

# %% [markdown]
"""
flat 裁剪的一步有 5,151 个 kernel<!-- = traced("traces", "flat")["gpu"]["kernels"] -->，普通训练有 1,651<!-- = traced("traces", "standard")["gpu"]["kernels"] --> 个。在录制的一步里，它的 GPU 忙碌 235.8 ms<!-- = traced("traces", "flat")["gpu"]["busy_ms"] -->，空闲 63.9 ms<!-- = traced("traces", "flat")["gpu"]["idle_ms"] -->。ghost 裁剪每步等待 GPU 16 次<!-- = sum(w["count"] for w in traced("traces", "ghost")["synchronisations"]) -->（`aten::unique_dim`：结果的大小取决于数据）。

那么 `flat` 受启动限制吗？分析器对主机的拖慢远大于对 kernel 的，所以要用忙碌时间除以**不带分析器**的一步：262.4 ms<!-- = ms("traces", "flat") --> 中的 235.8 ms<!-- = traced("traces", "flat")["gpu"]["busy_ms"] -->，即 90 %<!-- = 100 * traced("traces", "flat")["gpu"]["busy_ms"] / ms("traces", "flat") -->：不受启动限制。

**练习 2.9。** 把它写成方法名的函数：`recorded.traced("traces", method)["gpu"]["busy_ms"]` 除以一步的时间 `recorded.ms("traces", method)`。
"""


# %%
def busy_share(method): ...


# %%
check("2.9", busy_share)

# %% [markdown]
"""
## 2.10 TensorBoard 呢？

它的 profiler 插件（torch-tb-profiler）已经没有人维护：页面需要从网上加载脚本，对新的 trace 也不显示 GPU 时间。`dpscope trace` 会写出标量、表格和图片，TensorBoard 的普通页面可以离线显示：

```bash
tensorboard --logdir runs
```

## 小测验

**1. `aten::mm` 的 `cpu_ms` 很大，`self_cpu_ms` 很小，说明什么？**

<details><summary>答案</summary>

它的主机时间大多花在它调用的算子里。在 GPU 上，这两列都不是乘法本身的时间：要看 `self_device_ms`。

</details>

**2. 在分析器下，GPU 有三分之一的时间空闲。程序受启动限制吗？**

<details><summary>答案</summary>

还不能下结论。分析器让主机在每个算子上多花几微秒，这会造成空闲。用 GPU 的忙碌时间除以**不带分析器**的一步：如果明显小于一，才是受启动限制。dpscope 的阈值是 80 %<!-- given: dpscope's threshold -->。

</details>

**3. schedule 的预热步为什么要录了再丢，而不是直接跳过？**

<details><summary>答案</summary>

录制的第一步包含分析器自身的启动（在 GPU 上是 CUPTI）。如果从第一个有效步才开始录，这部分就会混进你的数据。

</details>

**4. 每个周期都保存了 trace，但最后 `key_averages()` 只显示最后一个周期。为什么？**

<details><summary>答案</summary>

每个周期开始时事件会被清空。在 `on_trace_ready` 里分析，读取保存的 trace，或者传入 `acc_events=True`。

</details>

## 要记住的

- 先预热，只录几步；比例取自分析器，时间取自不带分析器的运行。
- 按 total 排序找位置，按 self 排序找算子；在 GPU 上按设备时间排序。
- 大量小算子的调用是任何一行都显示不出来的瓶颈：看次数。
- 等待的代价是它之后的空闲。`aten::item` 几乎总是你自己的代码。
- 证明改对了：结果相同、不带分析器的中位数、录制显示原因已经消失。

**延伸阅读**：[PyTorch 官方教程](https://docs.pytorch.org/tutorials/recipes/recipes/profiler_recipe.html)、[Perfetto](https://perfetto.dev/docs/)、[dpscope 的 trace](../../docs/traces.md)。下一课：[运行 Nsight Compute](03a-run-nsight-compute.ipynb)。
"""
