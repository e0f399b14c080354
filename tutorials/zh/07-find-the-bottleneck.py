# %% [markdown]
"""
# 7. 找出瓶颈

*最后验证：2026-11-16，CPU 上用 torch 2.13，NVIDIA H200 上用 torch 2.11。*

**难度**：实践。**预备知识**：第 [1](01-how-a-gpu-step-works.ipynb)、[2](02-pytorch-profiler.ipynb) 课；学过 [3b](03b-read-a-report.ipynb) 和 [4](04-nsight-systems.ipynb) 更好。**时间**：阅读约 10 分钟，找瓶颈另需 60 分钟左右。

五个程序，`case_6` 到 `case_10`。每个都能运行，每个都以一种方式浪费了时间或显存。文件名和第一行都不会透露。你得到的证据和实际工作中一样：一份 trace、一张表、一条曲线。找出原因，再改好其中三个。

**规则。** 先看证据，再打开程序，然后作答。看提示不扣分。每个 case 的完整说明在 [solutions/cases.md](../solutions/cases.md)。

| 字母 | 原因 |
| --- | --- |
| a | 小算子太多：受启动限制 |
| b | 主机在准备数据，GPU 没有事做 |
| c | 隐藏的同步 |
| d | 从可分页内存拷贝，没有重叠 |
| e | 每一步都把数据拷贝成另一种布局 |
| f | 很大的中间结果写入显存又读回 |
| g | 用慢的数值格式做计算 |
| h | 从不释放的显存 |

**读完之后你能够**

- 看两三眼，就从“它很慢”走到一个具体的原因；
- 说出是哪个工具揭示的，并证明改对了。
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
import os

os.environ |= {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}

import evidence
import pictures
import recorded
import torch
import windows
from case_6 import PROGRAM as case_6_program
from case_7 import PROGRAM as case_7_program
from case_8 import PROGRAM as case_8_program
from case_9 import PROGRAM as case_9_program
from case_10 import PROGRAM as case_10_program
from checks import check
from language import say
from practice import device_here

device = device_here()
print(f"torch {torch.__version__}, measuring on: {device}")


def picture(program, way="a"):
    trace, where = evidence.trace_of(program, way)
    pictures.show(
        windows.draw_perfetto_window(windows.tracks_of(trace), f"{program.name}-{way}"),
        f"{program.name}, way {way}: one step, drawn from the trace ({where}).",
        f"{program.name}，方式 {way}：一步，根据 trace 绘制（{where}）。",
    )


# %% [markdown]
"""
## 7.1 Case 6：图像分类器

所有 case 的 trace 都可以[下载](traces.md)，在 Perfetto 里打开。
"""

# %%
evidence.show(case_6_program)
picture(case_6_program)

# %%
case_6 = ...  # one letter

# %%
check("7.1", case_6)

# %% [markdown]
"""
## 7.2 Case 7：token 分类器

有些位置没有标签。不要停在最先看到的东西上：它的时长能解释这一步吗？不带分析器的一步是 3.1 ms<!-- = took("case_7", "a") -->。
"""

# %%
evidence.show(case_7_program)
picture(case_7_program)

# %%
case_7 = ...

# %%
check("7.2", case_7)

# %% [markdown]
"""
## 7.3 Case 8：推荐系统

每一步用一批用户与一张不变的物品表打分。
"""

# %%
evidence.show(case_8_program)
picture(case_8_program)

# %%
case_8 = ...

# %%
check("7.3", case_8)

# %% [markdown]
"""
## 7.4 Case 9：注意力

两个长 4096 的序列，16 个头。比较两种方式：b 少了哪些 kernel，各需要多少显存？
"""

# %%
for way in "ab":
    evidence.show(case_9_program, way)
    if kept := recorded.program("case_9", way):
        print(f"  H200: {kept['median_ms']:.2f} ms a step, peak memory {kept['peak_bytes'] / 2**30:.2f} GiB")

# %%
case_9 = ...

# %%
check("7.4", case_9)

# %% [markdown]
"""
## 7.5 Case 10：验证循环

每一步都很快。一小时之后，运行以“显存不足”告终。
"""


# %%
def tensors_behind(total):
    """Count the saved steps that hang behind a tensor: nodes of its graph that add one more loss."""
    count, node = 0, total.grad_fn
    while node is not None and node.next_functions:
        count, node = count + 1, node.next_functions[0][0]
    return count


step = case_10_program.ways["a"]("cpu", 8)
print("graph behind the total after each of five steps:", [tensors_behind(step()) for _ in range(5)])
try:
    live = {way: [n / 2**30 for n in recorded.live_bytes(way)] for way in "ab"}
except LookupError:
    live = {}
pictures.show(
    pictures.draw_lines(live, say("step", "步"), say("live memory, GiB", "活跃显存，GiB")) if live else None,
    "Live memory after each step of case 10 on an H200, ways a and b.",
    "H200 上 case 10 每一步之后的活跃显存，方式 a 和 b。",
)

# %%
case_10 = ...

# %%
check("7.5", case_10)

# %% [markdown]
"""
## 7.6 改好其中三个

要证明改对了，就要证明结果相同，而且原因已经消失。检查两样都做。

**练习 7.6（case 7）。** 为 CUDA graph 做好准备：求有标签的位置上的损失（其余标签为 -100），不使用结果大小取决于数据的算子。
"""


# %%
def loss(logits, labels): ...


# %%
check("7.6", loss)

# %% [markdown]
"""
**练习 7.7（case 8）。** `table` 的形状是 (width, items)，`users` 是 (batch, width)。返回一个做一步的函数，即 `users @ table`，不在每一步拷贝整张表。
"""


# %%
def make_scores(table, users): ...


# %%
check("7.7", make_scores)

# %% [markdown]
"""
**练习 7.8（case 10）。** 返回一个函数：把 `(model(batch) - 1).square().mean()` 加到累计值上并返回累计值，不保留之前各步的任何东西。
"""


# %%
def make_validation(model, batch): ...


# %%
check("7.8", make_validation)

# %% [markdown]
"""
## 7.7 各值多少

两种方式在 H200 上和在本机的步时间：
"""

# %%
for program in (case_6_program, case_7_program, case_8_program, case_9_program, case_10_program):
    live = [program.measure(way, steps=5) for way in program.ways_on(device)]
    here = live[0]["median_ms"] / live[1]["median_ms"]
    kept = [recorded.program(program.name, way) for way in program.ways]
    there = (
        f"{kept[0]['median_ms']:8.2f} → {kept[1]['median_ms']:7.2f} ms, {kept[0]['median_ms'] / kept[1]['median_ms']:5.2f}×"
        if all(kept)
        else recorded.NOT_RECORDED
    )
    print(f"{program.name:8} H200: {there}; here: {here:.2f}×")

# %% [markdown]
"""
改动的收益并不一样大。GPU 要等的主机工作，几乎就是 case 6 的全部时间；显存的毛病在运行崩溃之前不花时间（case 10）。最先看到的也不一定是原因：case 7 的方式 b 去掉了等待，却没有收益<!-- holds: took("case_7", "b") > 0.95 * took("case_7", "a") -->，因为 GPU 只在 40 %<!-- = 100 * trace_summary("case_7", "a")["gpu"]["busy_ms"] / took("case_7", "a") --> 的时间里工作，其余时间在等启动。方式 b 的好处是大小不再取决于数据，而这正是 CUDA graph 和整图编译所需要的。改动前后都要测，并说清楚收益。

## 要记住的

- 先看**谁在等**（时间线），再看**哪个 kernel**（表格），再看**为什么**（ncu）。
- 不做运算的 kernel（拷贝、类型转换、转置），要问的是程序，不是 kernel。
- 显存每步增加同样多，就是计算图或列表没有释放。
- 结果相同、不带分析器的中位数、原因消失：这才算改好。

放在屏幕旁边的一页：[从现象到改法](../sheets/symptoms-zh.pdf)。回到[概览](README.md)。
"""
