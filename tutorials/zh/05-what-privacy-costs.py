# %% [markdown]
"""
# 5. 隐私的代价

*最后验证：2026-11-15，CPU 上用 torch 2.13 和 Opacus 1.6，NVIDIA H200 上用 torch 2.11。*

现在把前面学的全用在一个问题上：**同一个模型，差分隐私训练比普通训练多花多少，为什么？** 下面所有 H200 的数字，都由代码从随教程一起提交的结果里读出。最后对你自己的模型做同样的事。

**读完之后你能够**

- 说出 DP-SGD 比 SGD 多做了什么，每一样体现在哪里：时间、显存、字节；
- 用一条命令测任何模型，读结果时不自欺；
- 在相信一种裁剪方法快之前，先检查它是否做到了它承诺的事；
- 为你的模型在 flat、ghost、flash 之间做选择。
"""

# %%
import sys
import tempfile
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", message="Secure RNG turned off")  # right for a lesson, not for a release

TUTORIALS = next(p for p in [Path.cwd(), *Path.cwd().parents, Path.cwd() / "tutorials"] if (p / "programs").is_dir())
sys.path.insert(0, str(TUTORIALS / "programs"))

import pictures
import recorded
import torch

import dpscope

workplace = Path(tempfile.mkdtemp())
print(f"dpscope {dpscope.__version__}, torch {torch.__version__}")

# %% [markdown]
"""
## 5.1 DP-SGD 多做了什么

普通的一步：正向、反向、更新。加了隐私，就要限制任何**一个样本**能带来的改变，再用噪声盖住剩下的：

1. 对每个样本 b，求它自己的梯度 v_b 的范数，所有参数合在一起算；
2. 系数 c_b = min(1, C / ‖v_b‖)，使任何样本的贡献都不超过 C；
3. 求和 Σ c_b v_b，加上标准差为 σC 的高斯噪声，再除以期望批次大小；
4. 由记账器（accountant）记录 ε。

普通的反向传播直接给出 Σ v_b，从来不单独形成任何一个 v_b。隐私要花钱，就是因为这个；各种方法的区别在于怎样得到范数：

| 方法 | 范数怎么来 | 代价 |
| --- | --- | --- |
| `flat`（Opacus） | 形成每个 v_b | 显存和字节：批次 × 参数量 |
| `ghost`（Opacus） | 由输入和输出梯度算出，再做第二遍反向 | 时间：两遍反向，显存里还有 T × T 的乘积 |
| `flash`（dpscope） | 同样的数学，分块计算，不进显存；只有一遍反向 | 算范数本身的运算 |
"""

# %% [markdown]
"""
## 5.2 一条命令

```bash
dpscope compare --methods standard,flat,ghost,flash --model tiny --batch-size 4 --seq-len 64
dpscope compare --all --model 1b --dtype bf16 --batch-size 8 --seq-len 1024 --out page --resume
```

第一条在笔记本上一分钟跑完，第二条在 GPU 上做出完整的一页报告。每一行结果都在独立的进程里测，互不影响；某一行失败会说明原因，其余照常；机器波动太大、不可靠的数字标上 `?`。在 Python 里就是 `dpscope.compare`，5.9 节会运行它。下面是第二条命令在 H200 上的结果，模型是 11.7 亿参数的 Transformer：
"""

# %%
page = recorded.sweep("page")
print("\n".join(str(page).splitlines()[:14]))

# %% [markdown]
"""
flat 裁剪花 2.10×<!-- = times("page", "flat") --> 的时间、1.42×<!-- = memory_times("page", "flat") --> 的显存；ghost 是 2.72×<!-- = times("page", "ghost") --> 和 1.14×<!-- = memory_times("page", "ghost") -->；flash 是 1.09×<!-- = times("page", "flash") --> 和 0.96×<!-- = memory_times("page", "flash") -->。接下来问三个问题：显存去哪了，时间去哪了，字节去哪了？
"""

# %% [markdown]
"""
## 5.3 显存去哪了

```bash
dpscope memory --model 1b --dtype bf16 --batch-size 8 --seq-len 1024
```

每个活着的字节都恰好归于一个组成部分，加起来与分配器自己的数字一致。
"""

# %%
from dpscope.reports.memory.figures import draw_breakdown, draw_timeline

memory = recorded.sweep("memory/8x1024")
pictures.show(draw_breakdown(memory.rows), "memory by component of four methods on an H200")

# %% [markdown]
"""
flat 的峰值 42.78 GiB<!-- = gib("memory/8x1024", "flat") --> 里，逐样本梯度占 18.9 GiB<!-- = component_gib("per_sample_gradients", "memory/8x1024", "flat") -->。ghost 没有这一项，但到峰值时，第一遍反向的梯度 4.37 GiB<!-- = component_gib("gradients", "memory/8x1024", "ghost") --> 还留着。看峰值**何时**出现，就知道原因：
"""

# %%
pictures.show(draw_timeline(memory.rows), "live memory over one step of four methods")

# %% [markdown]
"""
普通训练的峰值在算损失的时候，那时所有激活都活着。flat 的峰值更晚，在裁剪的时候：激活早已释放，取而代之的东西却更大。flash 自始至终都不超过普通训练。

## 5.4 时间去哪了

看第 2 篇的 trace，逐个阶段比较：ghost 的反向用了 270.3 ms<!-- = next(p["gpu_ms"] for p in traced("traces", "ghost")["phases"] if p["phase"] == "backward") --> 的 GPU 时间，普通训练只要 75.8 ms<!-- = next(p["gpu_ms"] for p in traced("traces", "standard")["phases"] if p["phase"] == "backward") -->：两遍反向，再加上算范数的那些乘积。flash 的范数在 `clip` 里，11.8 ms<!-- = next(p["gpu_ms"] for p in traced("traces", "flash")["phases"] if p["phase"] == "clip") -->；它的权重乘积、噪声和更新合在 `optimizer` 里。
"""

# %%
from dpscope.reports.trace.figures import draw_differences

pictures.show(draw_differences(recorded.sweep("traces").rows), "operators that make a private step longer")

# %% [markdown]
"""
## 5.5 字节去哪了

第 3 篇说过：序列 256 时 token 少而逐样本梯度多，flat 在批次 8 时搬运的字节是普通训练的 3.99×<!-- = dram_times("traffic", "flat", 8, 256) -->，批次 16 时是 4.56×<!-- = dram_times("traffic", "flat", 16, 256) -->；序列 1024 时是 2.37×<!-- = dram_times("traffic", "flat", 8, 1024) -->。flash 在 0.97×<!-- = dram_times("traffic", "flash", 8, 256) --> 到 1.08×<!-- = dram_times("traffic", "flash", 16, 1024) --> 之间。

字节能解释一部分时间，dpscope 会说出是多少：以满带宽搬完 flat 多出的字节要 56 ms<!-- = (dram_gb("traffic", "flat", 8, 256) - dram_gb("traffic", "standard", 8, 256)) * 1e9 / ceilings()["dram_bytes_per_second"] * 1e3 -->，而它总共慢了 169.7 ms<!-- = ms("traffic", "flat", 8, 256) - ms("traffic", "standard", 8, 256) -->。其余的是启动：成千上万个小 kernel，主机跟不上。
"""

# %%
from dpscope.reports.time.figures import draw_tradeoff

pictures.show(draw_tradeoff(page.rows), "memory against time")

# %% [markdown]
"""
## 5.6 它怎样随规模变化

只测一种规模，不过是个例子。下面是录下的一组规模，都是与同一次运行中普通训练之比：
"""

# %%
for folder, batch, seq in (
    ("flash-grid/bf16-256", 16, 256),
    ("flash-grid/bf16-256", 32, 256),
    ("flash-grid/bf16-1024", 8, 1024),
    ("flash-grid/bf16-1024", 16, 1024),
    ("flash-grid/bf16-16384", 1, 16384),
):
    cells = []
    for method in ("flat", "ghost", "flash"):
        time, memory_ratio = (f(folder, method, batch, seq) for f in (recorded.times, recorded.memory_times))
        cells.append(f"{method} {time:.2f}× time {memory_ratio:.2f}× memory")
    print(f"{batch:3} × {seq:5}:  " + "   ".join(cells))

# %% [markdown]
"""
竖着读。样本短而多时 flat 最差（16 × 256 时 3.73×<!-- = times("flash-grid/bf16-256", "flat", 16, 256) -->），因为它的代价按样本算。序列很长时 ghost 最差（1 × 16384 时 4.47×<!-- = times("flash-grid/bf16-16384", "ghost", 1, 16384) -->），因为它的范数要花 T²。flash 始终在一附近。

它也不是处处免费。批次 64 的 ViT-B/16，类别 token 和位置编码是裸参数，flash 花了 1.35×<!-- = times("keep", "flash", 64, None, model="hf:vit") --> 的时间（dpscope 把这个数标为可疑，因为那一行波动很大）。用 LoRA 时逐样本梯度很小，flat 反而更快：1.05×<!-- = times("your-model/first/llama-lora", "flat", 8, 2048, model="hf:llama+lora-r16") -->，flash 是 1.11×<!-- = times("your-model/first/llama-lora", "flash", 8, 2048, model="hf:llama+lora-r16") -->。所以要测**你自己的**模型。

## 5.7 它算得对吗？

靠漏掉一个偏置换来的速度，不是隐私。相信速度之前，先拿最朴素的参照来比：一次一个样本，普通 autograd，float64。

```bash
dpscope check --model tiny --methods flat,flash
```
"""

# %%
from my_model import make

checked = dpscope.check(make(batch_size=4, seq_len=8), ["flat", "flash"], name="my_model", neighbours=False)
print(checked)
assert checked.ok

# %% [markdown]
"""
默认的 `neighbours=True` 还会检验隐私保证所依赖的东西：两个只差一个样本的批次，一步的结果相差不超过 C；噪声确实在，大小正确，从不重复；记账器每步都算。**没查出问题**不等于**证明**，但故意埋下的错误都能查出来（[check](../../docs/check.md) 里有清单）。

## 5.8 用上 flash

只改一行 import，训练循环原样不动：
"""

# %%
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpscope.flash import PrivacyEngine  # instead of: from opacus import PrivacyEngine

torch.manual_seed(0)
x = torch.randn(512, 16)
data = TensorDataset(x, (x @ torch.randn(16, 3)).argmax(1))
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 3))
engine = PrivacyEngine()
model, optimizer, loader = engine.make_private(
    module=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=5e-3),
    data_loader=DataLoader(data, batch_size=64),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)
for inputs, labels in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
share = float((optimizer.engine.norms * optimizer.engine.factors).max())
print(f"largest share of a sample {share:.3f} (at most 1), ε = {engine.get_epsilon(delta=1e-5):.2f} at δ = 1e-5")

# %% [markdown]
"""
## 5.9 你自己的模型

写一个返回 `Workload` 的函数：怎样建模型、怎样取批次、**每个样本一个**损失。`programs/my_model.py` 就是这样一个文件，照着改就行。

```bash
dpscope check --workload programs/my_model.py:make --batch-size 4 --seq-len 8
dpscope compare --workload programs/my_model.py:make --batch-size 16 --seq-len 32
```
"""

# %%
mine = dpscope.compare(
    f"{TUTORIALS / 'programs' / 'my_model.py'}:make",
    methods=["standard", "flash"],
    batch_size=[16],
    seq_len=32,
    instruments=["time"],
    warmup=1,
    steps=3,
    out=workplace / "mine",
)
mine.to_pandas()[["method", "status", "time_median_ms", "time_ratio"]]

# %% [markdown]
"""
（这么小的模型在 CPU 上，时间几乎全花在 Python 里，而 flash 在 Python 里做的事更多：这里的比值说明不了 GPU 上的情形。`print(mine)` 里的 `?` 也是这个意思：三步算不上测量。到了 GPU 上，用你真实的规模，`steps` 保持默认。）

## 5.10 结论

- **显存不够**（短样本很多、模型很大）：flat 出局，用 flash 或 ghost。
- **时间不够**：用 flash；如果逐样本梯度很小（LoRA）、显存又够，可以用 flat。ghost 只在显存逼到头上时用。
- **序列很长**：别用 ghost。
- **有 Opacus 不接受的层**（共享权重、循环层）：`dpscope check` 会说哪种方法能训练你的模型，又拒绝了什么。
- **论文里要一个数**：`dpscope compare --all`，中位数连同波动范围，硬件和版本都写上；JSON 文件里全都有。

```bash
dpscope report ../benchmarks/results/2026-11-15-h200-page
```

## 练习

1. 从录下的那一页算：每种方法每秒训练多少 token？普通训练一天的量，用 flat 要几天？
2. 上面给出了批次 8 时 flat 的逐样本梯度有多大。据此估计批次 16 时的，再和录下的 `flash-grid/bf16-1024` 比较。
3. 故意弄坏一种方法：让它漏掉一个偏置，看 `dpscope.check` 怎么说。
"""

# %%
# Solution 1
for row in page.to_pandas().itertuples():
    print(f"{row.method:9} {row.tokens_per_second:9,.0f} tokens/s; what takes one day takes {row.time_ratio:.2f} days")

# %%
# Solution 2: they grow as batch × parameters, so twice the batch adds as much again
kept = recorded.component_gib("per_sample_gradients", "memory/8x1024", "flat")
measured = recorded.gib("flash-grid/bf16-1024", "flat", 16) - recorded.gib("flash-grid/bf16-1024", "flat", 8)
print(
    f"doubling the batch adds about {kept:.1f} GiB by estimate; the peak grew by {measured:.1f} GiB (what the rest is, dpscope memory at batch 16 would say)"
)

# %%
# Solution 3
from dpscope.trainers.flash import DPFlashClippingTrainer


class Forgetful(DPFlashClippingTrainer):
    """Flash clipping that forgets the last bias: it is in no norm and in no sum."""

    def prepare_model(self, model):
        model.answer.bias.requires_grad_(False)
        return super().prepare_model(model)


broken = dpscope.check(make(batch_size=4, seq_len=8), [Forgetful], name="my_model", neighbours=False)
print("\n".join(str(broken).splitlines()[:8]))
assert not broken.ok

# %% [markdown]
"""
## 小测验

**1. flat 的比值在序列 256 时比 1024 时差。为什么？**

<details><summary>答案</summary>

它多出来的是批次 × 参数量，与长度无关。序列短，可供比较的普通工作量就少。

</details>

**2. 两种方法时间一样，其中一种搬的显存字节多一倍。要紧吗？**

<details><summary>答案</summary>

眼下也许不要紧：那一步受别的东西限制（启动、算力）。换一块带宽相对更低的 GPU，或者把启动的问题解决之后，字节就成了瓶颈。

</details>

**3. 同事说"我们的模型上 DP 要花 8 倍<!-- given -->"。你该问什么？**

<details><summary>答案</summary>

哪种方法，批次和序列多大，和怎样的普通训练比（同样的优化器、数值格式、机器、同一次运行），多少步的中位数，有没有检查过它是精确的？然后自己测：一条命令。

</details>

**4. `dpscope check` 说 exact。训练就满足隐私了吗？**

<details><summary>答案</summary>

它说的是：在试过的批次上，裁剪后的和与定义一致；加上 neighbours，还说明试过的情形里界没有被突破。完整的保证还要求采样方式与记账器的假设一致，噪声无人能预测，超参数也没有免费地在数据上调过。

</details>

## 要记住的

- DP-SGD 需要每个样本梯度的范数；各种方法得到它的方式不同，付出的分别是显存、字节或时间。
- 与同一次运行中的普通训练比较。报比值和波动，不要报单个时间。
- flat 按样本付费，ghost 按 T² 付费，flash 只付算范数的运算。
- 精确就是隐私：先检查，再测速。
- 一切取决于你的模型。一条命令就知道。

**延伸阅读**：[DP-SGD](https://arxiv.org/abs/1607.00133)、[Opacus](https://opacus.ai)、[测量方法](../../docs/method.md)、[显存](../../docs/memory.md)、[flash 裁剪](../../docs/flash.md)、[工作负载](../../docs/workloads.md)。
"""
