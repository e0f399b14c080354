# %% [markdown]
"""
# 2. PyTorch Profiler

*最后验证：2026-11-15，CPU 上用 torch 2.13，NVIDIA H200 上用 torch 2.11。*

`torch.profiler` 随 PyTorch 一起装好，专门回答"这一步为什么慢"的第一个问题：**是哪些算子，又是谁在等？** 它不需要别的工具，CPU 上也能用。这一篇录下一个小卷积网络，用五种方式分析，找出瓶颈、改掉、量出收益，最后再看一份差分隐私训练的录制。

**读完之后你能够**

- 配置一次录制，并选定录哪几步；
- 读懂按时间、形状、内存排列的算子表，知道哪一列靠得住；
- 找到一个瓶颈，改掉它，并用不带分析器的计时证明收益；
- 在 Perfetto 里打开 trace，认出等待、空隙和拷贝。

启动、等待和正确计时见第 1 篇。
"""

# %%
import os
import sys
import tempfile
import warnings
from pathlib import Path

os.environ |= {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # the profiler is talkative
warnings.filterwarnings("ignore", message=".*clears events at the end of each cycle")

TUTORIALS = next(p for p in [Path.cwd(), *Path.cwd().parents, Path.cwd() / "tutorials"] if (p / "programs").is_dir())
sys.path.insert(0, str(TUTORIALS / "programs"))

import pictures
import recorded
import torch
from practice import device_here
from torch import nn

device = device_here()
torch.manual_seed(0)
workplace = Path(tempfile.mkdtemp())
print(f"torch {torch.__version__}, measuring on: {device}")

# %% [markdown]
"""
## 2.1 先要有个可看的东西

一个处理图像的小网络、一个优化器、一步训练。这一步先对批次做归一化，写法像刚上手第一天那样：一张图一张图地来。
"""

# %%
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(8, 16, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(16, 10),
).to(device)
optimizer = torch.optim.Adam(model.parameters())
images = torch.rand(128, 3, 12, 12, device=device)
labels = torch.randint(10, (128,), device=device)


def normalise_one_by_one(batch):
    return torch.stack([(image - image.mean()) / image.std() for image in batch])


def make_step(normalise):
    def step():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(normalise(images)), labels).backward()
        optimizer.step()

    return step


step = make_step(normalise_one_by_one)

# %% [markdown]
"""
## 2.2 一次录制，以及各项设置

| `torch.profiler.profile` 的参数 | 作用 | 代价 |
| --- | --- | --- |
| `activities=[CPU, CUDA]` | 主机算子；kernel 和拷贝 | 没有 GPU 的机器上去掉 `CUDA` |
| `schedule=…` | 录哪几步（2.3 节） | 没有 |
| `on_trace_ready=…` | 每轮结束时调用，用来保存 | 写文件的时间 |
| `record_shapes=True` | 输入形状：好区分不同的 `mm` | 每个算子多花一点时间 |
| `profile_memory=True` | 每次分配和释放，以及是哪个算子 | 每次分配多花一点时间 |
| `with_stack=True` | Python 代码行 | 很费时间，文件很大 |
| `with_flops=True` | 根据形状算出矩阵乘和卷积的运算量 | 很小 |
| `with_modules=True` | 模块名，只对 TorchScript 有效；请用 `dpscope trace --modules` | |
| `acc_events=True` | 保留所有轮的事件；否则每轮从空开始 | 内存 |

每项设置都会让这一步变慢。**分析器底下的一步，不是真正的一步**：**比例**看分析器，**时间**看不带分析器的运行。另外别忘了每步末尾调用 `profiler.step()`，否则 schedule 永远不会往前走。
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
## 2.3 录哪几步？schedule

训练的头几步和后面的不一样：要分配显存，要挑选 kernel，缓存还没热。schedule 规定开头跳过几步（`skip_first`），然后每一轮里等几步（`wait`）、预热几步（`warmup`，录了就扔，因为分析器启动本身会干扰）、正式录几步（`active`），一共几轮（`repeat`）。三种就能应付大多数情况：

| schedule | 看什么 | 回答的问题 |
| --- | --- | --- |
| `early_training` | 最开始几步 | 为什么起步慢？ |
| `steady_state` | 五十步之后的十步，共两次 | 一步到底花多少？ |
| `periodic` | 每隔一段录三步，反复多次 | 训练过程中一步会变吗？ |
"""

# %%
from dpscope.instruments.trace import early_training
from dpscope.vocabulary.schedules import SCHEDULES

pictures.show(
    pictures.draw_schedules({name: SCHEDULES[name] for name in ("early_training", "steady_state", "periodic")}),
    "which steps three schedules record",
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
## 2.4 看一份录制的五种方式

dpscope 把录制变成数据表。每个函数都接受 profiler 对象、读进来的 trace，或 trace 文件的路径。

**基础分析**：按时间、按内存排的算子。`cpu_ms` 包含它调用的其他算子，`self_cpu_ms` 不包含。想知道时间花在**哪里**，按前者排；想知道是**谁**在干活，按后者排。有 GPU 时还有 `device_ms` 几列，那才是该用来排序的：异步算子的主机时间只是启动它的时间。
"""

# %%
from dpscope.instruments.trace import (
    advanced_analysis,
    basic_analysis,
    detect_bottlenecks,
    generate_performance_report,
    memory_analysis,
)

basic_analysis(profiler, limit=8)["by CPU time"]

# %% [markdown]
"""
**进阶分析**：同一个算子，输入形状不同，就是不同的活。这里对单张图像的 `aten::std` 和 `aten::mean` 很显眼：每一步、每张图各调用一次。
"""

# %%
advanced = advanced_analysis(profiler, limit=8)
print(advanced.totals)
advanced["by input shape"]

# %% [markdown]
"""
**内存分析**：谁在分配，任一时刻有多少还活着。
"""

# %%
memory = memory_analysis(profiler, limit=5)
print(memory.totals)
memory["by cpu memory"]

# %% [markdown]
"""
**报告**：把上面这些合成一份文本，和实验结果放在一起。
"""

# %%
report = generate_performance_report(profiler, "the CNN", limit=5)
print("\n".join(report.splitlines()[:14]), "\n…")

# %% [markdown]
"""
**瓶颈检测**：整个录制里超过阈值的算子，从慢到快，附上出现过的输入形状。
"""

# %%
for found in detect_bottlenecks(profiler, threshold_ms=2.0)[:6]:
    print(f"{found.name:45} {found.cpu_ms:8.1f} ms host {found.device_ms:8.1f} ms GPU {found.count:5} calls")

# %% [markdown]
"""
> **旧名字。** 2024 年以前的脚本会对 `key_averages()` 的行取 `cuda_time_total`，如今会抛 AttributeError，新名字是 `device_time_total`。`torch.profiler.ProfilerMetrics` 并不存在。`export_memory_timeline` 已弃用。
"""

# %% [markdown]
"""
## 2.5 改掉一个瓶颈

网络里只有两个卷积，可录制里大多数算子都不是它们的：`normalise_one_by_one` 对批次里每张图都要调用好几个算子。哪个都不慢，只是太多。这就是第 1 篇里启动受限的循环在现实中的样子，对策也一样：所有图像一个算子做完。
"""

# %%
from dpscope.instruments.timing import time_steps


def normalise_at_once(batch):
    mean = batch.mean(dim=(1, 2, 3), keepdim=True)
    return (batch - mean) / batch.std(dim=(1, 2, 3), keepdim=True)


torch.testing.assert_close(normalise_at_once(images), normalise_one_by_one(images))  # first: is it the same?

before = time_steps(make_step(normalise_one_by_one), device=device, warmup=3, steps=15)
after = time_steps(make_step(normalise_at_once), device=device, warmup=3, steps=15)
print(
    f"a step before {before.median_ms:.2f} ms, after {after.median_ms:.2f} ms: {before.median_ms / after.median_ms:.2f}× faster"
)

with profile(activities=activities, record_shapes=True) as mended:
    for _ in range(3):
        make_step(normalise_at_once)()
calls = {
    name: basic_analysis(p, limit=10_000)["by CPU time"]["calls"].sum()
    for name, p in (("before", profiler), ("after", mended))
}
print(f"operators called in three steps: {calls['before']} before, {calls['after']} after")

# %% [markdown]
"""
三件事让它成为证明，而不是故事：先核对两种写法结果相同；收益是**不带分析器**的中位数之比；分析器再确认了原因，也就是算子数目变少了。在 GPU 上收益应当更大（这里没有测）：卷积在那里快得多，启动却没有变快。
"""

# %% [markdown]
"""
## 2.6 在 Perfetto 里看 trace

表格里没有**何时**。把录制存成 trace，在 <https://ui.perfetto.dev>（文件不会离开你的浏览器）或 `chrome://tracing` 里打开：
"""

# %%
from dpscope.instruments.trace import export_trace, read_trace, summarise

path = export_trace(profiler, workplace / "cnn.json.gz")
print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")

# %% [markdown]
"""
- **W**、**S** 缩放，**A**、**D** 平移；点一个事件可以看它的参数：形状，kernel 还有网格和占用率。
- 主机的每个线程占一行；反向传播跑在 autograd 自己的线程上。下面是 GPU 的各条流。
- 箭头从启动指向它的 kernel。kernel 在启动右边很远的地方，说明主机跑在前面：好事。
- GPU 那一行里的空隙就是空闲。如果下一个 kernel 的启动发生在空隙开始**之后**，就是 GPU 在等主机。
- 很长的 `cudaStreamSynchronize` 是等待。往上看是哪个算子：`aten::item` 就是 `.item()`、`float()` 或 `if 张量:`。

dpscope 能读任何这样的 trace，并用文字说出这些结论。下面是 `programs/hidden_sync.py` 在 H200 上录下的 trace；如果没有，就现录一份：
"""

# %%
from hidden_sync import PROGRAM as hidden_sync

trace = recorded.trace_of("hidden_sync", "norms_read_at_once")
where = "H200, recorded" if trace else "here"
trace = trace or hidden_sync.record("norms_read_at_once", workplace)
seen = summarise([read_trace(trace)])
print(f"hidden_sync, {where}: {seen['step_ms']:.2f} ms a traced step")
if "gpu" in seen:
    gpu = seen["gpu"]
    print(
        f"GPU busy {gpu['busy_ms']:.2f} ms, idle {gpu['idle_ms']:.2f} ms, of it waiting for the host {gpu['idle_waiting_for_host_ms']:.2f} ms"
    )
for wait in seen["synchronisations"]:
    print(f"  {wait['count']:4.0f} × {wait['call']} by {wait['operator']} ({wait['phase']}): {wait['ms']:.2f} ms")

# %% [markdown]
"""
一步里等待三十二次，每个参数一次：`hidden_sync.py` 就是为了让人发现这一点而写的。CPU 的 trace 里不存在等待；dpscope 数的是那些放到 GPU 上**就会**等待的地方。
"""

# %% [markdown]
"""
## 2.7 内存

`memory_analysis` 还给出已分配字节数随时间的变化，能回答峰值出现在**什么时候**。至于峰值**由什么组成**（参数、激活、逐样本梯度），要用 `dpscope memory`，第 5 篇会细讲。
"""

# %%
over_time = memory["over time"]
peak = over_time.loc[over_time["total_bytes"].idxmax()]
print(
    f"highest {peak['total_bytes'] / 2**20:.2f} MiB above the start, {peak['time_ms']:.2f} ms in, at {peak['operator']}"
)
over_time.sort_values("bytes", ascending=False).head(5)

# %% [markdown]
"""
## 2.8 差分隐私训练多做了什么

`dpscope trace` 把每种方法和普通训练放在一起录，各在独立的进程里，带分析器一次，不带一次：

```bash
dpscope trace --methods standard,flat,ghost,flash --model 1b --dtype bf16 --batch-size 8 \
    --seq-len 1024
```

下面是它在 H200 上的结果，由录下的文件画出。看**阶段**，flat 的 `clip` 和 ghost 那段很长的 `backward` 最显眼：
"""

# %%
from dpscope.reports.trace.figures import draw_differences, draw_phases

rows = recorded.sweep("traces").rows
pictures.show(draw_phases(rows), "time of a step by phase for four methods on an H200")

# %% [markdown]
"""
**差异**图说明是哪些算子让一种方法比普通训练慢。它们加起来正好等于两步之差：
"""

# %%
pictures.show(draw_differences(rows), "what each method adds to an ordinary step, by operator")

# %% [markdown]
"""
flat 裁剪的一步启动 5,151 个 kernel<!-- = traced("traces", "flat")["gpu"]["kernels"] -->，普通训练是 1,651<!-- = traced("traces", "standard")["gpu"]["kernels"] -->。录制的一步里，它的 GPU 忙 235.8 ms<!-- = traced("traces", "flat")["gpu"]["busy_ms"] -->，普通训练忙 121.1 ms<!-- = traced("traces", "standard")["gpu"]["busy_ms"] -->；另有 63.9 ms<!-- = traced("traces", "flat")["gpu"]["idle_ms"] --> 闲着，因为**在分析器底下**主机启动得不够快。ghost 每步要等 GPU 16 次<!-- = sum(w["count"] for w in traced("traces", "ghost")["synchronisations"]) -->（`aten::unique_dim`：结果多大取决于数据）。

那么 `flat` 是启动受限吗？不是：分析器拖慢的是主机，对 kernel 几乎没有影响，所以应当用忙碌时间除以**不带分析器**的一步：262.4 ms<!-- = ms("traces", "flat") --> 里忙 235.8 ms<!-- = traced("traces", "flat")["gpu"]["busy_ms"] -->，占 90 %<!-- = 100 * traced("traces", "flat")["gpu"]["busy_ms"] / ms("traces", "flat") -->。
"""

# %% [markdown]
"""
## 2.9 那 TensorBoard 呢？

它的 profiler 插件（torch-tb-profiler）已经没人维护：那个标签页要从互联网取脚本，对现在的 trace 也显示不出 GPU 时间。所以 `dpscope trace` 写的是 TensorBoard 普通标签页离线就能显示的标量、表格和图片：

```bash
tensorboard --logdir runs
```

## 练习

1. 第一份录制里，哪个算子被调用得最多？其中有多少属于网络本身？
2. 用缩短到两轮的 `periodic` 录改好之后的一步，打印保存了几轮。
3. 阈值设为零时 `detect_bottlenecks` 会列出全部算子。`self_cpu_ms` 里卷积（正向加反向）占多少？假如卷积不花时间，一步最多能快多少？
"""

# %%
# Solution 1
table = advanced_analysis(profiler, limit=10_000)["by operator"].sort_values("calls", ascending=False)
print(table[["operator", "calls"]].head(5).to_string(index=False))
fewer = advanced_analysis(mended, limit=10_000)["by operator"].set_index("operator")["calls"]
name = table.iloc[0]["operator"]
print(f"{name}: {table.iloc[0]['calls']} calls, of which {fewer.get(name, 0)} remain without the loop over images")

# %%
# Solution 2
from dataclasses import replace

shorter = replace(SCHEDULES["periodic"], skip_first=2, wait=1, warmup=1, active=2, repeat=2)
saved = []
with profile(
    activities=activities, schedule=shorter.to_torch(), on_trace_ready=lambda p: saved.append(p.step_num)
) as p:
    for _ in range(shorter.steps):
        make_step(normalise_at_once)()
        p.step()
print(f"{len(saved)} cycles were saved, after steps {saved}")
assert len(saved) == 2

# %%
# Solution 3
table = advanced_analysis(profiler, limit=10_000)["by operator"]
column = "self_device_ms" if "self_device_ms" in table else "self_cpu_ms"
convolution = table[table["operator"].str.contains("conv")][column].sum()
share = convolution / table[column].sum()
print(f"convolution is {share:.0%} of the work; without it the step could be at most {1 / (1 - share):.1f}× as fast")

# %% [markdown]
"""
最后一行就是阿姆达尔定律，也是"先看再改"的理由：只占十分之一时间的算子，最多也只能还你十分之一。

## 小测验

**1. `aten::mm` 的 `cpu_ms` 很大，`self_cpu_ms` 很小，说明什么？**

<details><summary>答案</summary>

它的主机时间大部分花在它调用的东西上。有 GPU 时这两列都不是乘法本身的时间：要看 `self_device_ms`。

</details>

**2. 在分析器底下，GPU 有三分之一时间闲着。程序是启动受限吗？**

<details><summary>答案</summary>

还不能这么说。分析器让主机的每个算子多花几微秒，空闲就是这么来的。用 GPU 忙碌时间除以**不带分析器**的一步：明显小于一才算。dpscope 以 80 %<!-- given: dpscope's threshold --> 为界。

</details>

**3. schedule 里的预热为什么要录了再扔，而不是干脆跳过？**

<details><summary>答案</summary>

录制的第一步里有分析器自己的启动（在 GPU 上是 CUPTI）。如果从第一个 active 步才开始录，这些就会混进你的数字。

</details>

**4. 每轮都存了 trace，可最后 `key_averages()` 只显示最后一轮。为什么？**

<details><summary>答案</summary>

每轮开始时事件会清空。要么在 `on_trace_ready` 里分析，要么读存下的 trace，要么传 `acc_events=True`。

</details>

## 要记住的

- 先预热，少录几步；比例看分析器，时间看不带分析器的运行。
- 找位置按**总时间**排，找元凶按**自身时间**排；有 GPU 就按设备时间。
- 大量小算子是单独哪一行都看不出来的瓶颈：要看次数。
- 每次等待都有对应的算子。`aten::item` 几乎总是你自己写的。
- 证明改好了，要三样东西：结果相同、不带分析器的中位数、以及显示原因已消失的录制。

**延伸阅读**：[PyTorch 官方教程](https://docs.pytorch.org/tutorials/recipes/recipes/profiler_recipe.html)、[Perfetto](https://perfetto.dev/docs/)、[dpscope 的 trace](../../docs/traces.md)。下一篇：[Nsight Compute](03-nsight-compute.ipynb)。
"""
