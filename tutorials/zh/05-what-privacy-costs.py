# %% [markdown]
"""
# 5. 差分隐私的代价

*最后验证：2026-11-16，CPU 上用 torch 2.13 和 Opacus 1.6，NVIDIA H200 上用 torch 2.11。*

**难度**：实践。**预备知识**：第 [1](01-how-a-gpu-step-works.ipynb)、[2](02-pytorch-profiler.ipynb) 课；知道什么是梯度。**时间**：阅读约 15 分钟，练习另需 40 分钟左右。

现在把所有工具用在一个问题上：**差分隐私训练比同一模型的普通训练多花多少，为什么？** 下面 H200 的每个数字都由代码从提交的结果里读出。除了 5.6 节里注明运行日期的那张表，都是 2026-11-15 同一天测的；flash 裁剪此后又变快了。最后你会测量自己的模型。

**读完之后你能够**

- 说出 DP-SGD 比 SGD 多做了什么，各部分体现在哪里：时间、显存、字节；
- 用一条命令测量任何模型，并正确地解读结果；
- 在相信一种裁剪方法快之前，先检查它是否名副其实；
- 为你的模型在 flat、ghost 和 flash 裁剪之间做选择。

答案：[solutions/lesson_5.py](../solutions/lesson_5.py)。
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
import tempfile
import warnings

warnings.filterwarnings("ignore", message="Secure RNG turned off")  # right for a lesson, not for a release

import pictures
import recorded
import torch
from checks import check

import dpscope

workplace = Path(tempfile.mkdtemp())
print(f"dpscope {dpscope.__version__}, torch {torch.__version__}")

# %% [markdown]
"""
## 5.1 DP-SGD 多做了什么

普通的一步：前向、反向、更新。差分隐私的一步要限制任何**单个样本**的影响，再用噪声掩盖其余：

1. 对每个样本 b，求它自己的梯度 v_b 的范数，所有参数合在一起；
2. 系数 c_b = min(1, C / ‖v_b‖)，使每个样本的贡献不超过 C；
3. 求和 Σ c_b v_b，加上标准差为 σC 的高斯噪声，除以期望的批次大小；
4. 由记账器（accountant）累计 ε。

普通的反向传播直接得到 Σ v_b，从不算出单个 v_b。这就是差分隐私有代价的原因。各方法的区别在于怎样得到范数：

| 方法 | 范数 | 代价 |
| --- | --- | --- |
| `flat`（Opacus） | 算出每个 v_b | 显存和字节：批次 × 参数量 |
| `ghost`（Opacus） | 由输入和输出梯度算出，再做第二遍反向传播 | 时间：两遍反向传播，以及显存中 T × T 的乘积 |
| `flash`（dpscope） | 同样的数学，分块计算，不写入显存；在更划算且有空间时保留梯度；只做一遍反向传播 | 计算范数的运算 |

**练习 5.1。** 裁剪并求和：`gradients` 每行是一个样本，`bound` 是 C。返回 Σ c_b v_b。
"""


# %%
def clipped_sum(gradients, bound): ...


# %%
check("5.1", clipped_sum)

# %% [markdown]
"""
## 5.2 一条命令

```bash
dpscope compare --methods standard,flat,ghost,flash --model tiny --batch-size 4 --seq-len 64
dpscope compare --all --model 1b --dtype bf16 --batch-size 8 --seq-len 1024 --out page --resume
```

第一条在笔记本电脑上一分钟跑完，第二条在 GPU 上生成整个页面。每一行都是独立的进程，互不影响；失败的行会说明原因，其余继续；不可靠的数字标有 `?`。在 Python 里用 `dpscope.compare`，见 5.9 节。下面是第二条命令在 H200 上的结果，11.7 亿参数的 Transformer，2026-11-15：
"""

# %%
page = recorded.sweep("page")
print("\n".join(str(page).splitlines()[:14]))

# %% [markdown]
"""
flat 裁剪的时间是普通训练的 2.10×<!-- = times("page", "flat") -->，显存是 1.42×<!-- = memory_times("page", "flat") -->；ghost 是 2.72×<!-- = times("page", "ghost") --> 和 1.14×<!-- = memory_times("page", "ghost") -->；flash 是 1.09×<!-- = times("page", "flash") --> 和 0.96×<!-- = memory_times("page", "flash") -->。每次运行会有差异：同一行的 flat 在同一天的三次运行里是 2.10×<!-- = times("page", "flat") -->、2.01×<!-- = times("flash-grid/bf16-1024", "flat") --> 和 1.99×<!-- = times("traffic", "flat") -->。引用时要注明是哪次运行，不要过度解读第二位小数。

**练习 5.2。** 一步 `ms` 毫秒，每秒训练多少个 token？
"""


# %%
def tokens_per_second(batch, seq, ms): ...


# %%
check("5.2", tokens_per_second)

# %% [markdown]
"""
## 5.3 显存去了哪里

```bash
dpscope memory --model 1b --dtype bf16 --batch-size 8 --seq-len 1024
```

每个活跃的字节恰好属于一个组成部分，加起来等于分配器自己的数字。
"""

# %%
from dpscope.reports.memory.figures import draw_breakdown, draw_timeline

memory = recorded.sweep("memory/8x1024")
pictures.show(
    draw_breakdown(memory.rows),
    "Memory at the peak by component, four methods on an H200.",
    "H200 上四种方法的峰值显存，按组成部分划分。",
)
pictures.show(
    draw_timeline(memory.rows),
    "Live memory over one step of four methods.",
    "四种方法一步之内的活跃显存。",
)

# %% [markdown]
"""
flat 的逐样本梯度占 18.9 GiB<!-- = component_gib("per_sample_gradients", "memory/8x1024", "flat") -->，总共 42.78 GiB<!-- = gib("memory/8x1024", "flat") -->。ghost 没有逐样本梯度；在它的峰值处，第一遍反向传播的梯度 4.37 GiB<!-- = component_gib("gradients", "memory/8x1024", "ghost") --> 还在。峰值出现的**时刻**说明了原因：普通训练的峰值在算损失时，那时所有激活都在。flat 的峰值更晚，在裁剪时：激活已经释放，取而代之的东西更大。

**练习 5.3。** 估计逐样本梯度占多少 GiB，再用 8 个样本、1.17e9 个参数、2 字节（bfloat16）与上面的数字比较。（有些层的梯度是 float32。）
"""


# %%
def gib(batch, parameters, nbytes): ...


# %%
check("5.3", gib)

# %% [markdown]
"""
## 5.4 时间去了哪里

根据第 2 课的 trace，逐阶段看（2026-11-15）：ghost 的反向传播用了 270.3 ms<!-- = next(p["gpu_ms"] for p in traced("traces", "ghost")["phases"] if p["phase"] == "backward") --> 的 GPU 时间，普通训练只要 75.8 ms<!-- = next(p["gpu_ms"] for p in traced("traces", "standard")["phases"] if p["phase"] == "backward") -->：两遍反向传播，加上计算范数的乘法。flash 的范数在 `clip` 里，11.8 ms<!-- = next(p["gpu_ms"] for p in traced("traces", "flash")["phases"] if p["phase"] == "clip") -->，权重的乘法、噪声和更新都在 `optimizer` 里。
"""

# %%
from dpscope.reports.trace.figures import draw_differences

pictures.show(
    draw_differences(recorded.sweep("traces").rows),
    "Operators that make a private step longer than an ordinary one.",
    "使隐私训练的一步比普通训练更长的算子。",
)

# %% [markdown]
"""
**练习 5.4。** 返回一种方法在某个阶段的 GPU 毫秒数。`recorded.traced("traces", method)["phases"]` 是字典的列表，含 `phase` 和 `gpu_ms`。
"""


# %%
def phase_ms(method, phase): ...


# %%
check("5.4", phase_ms)

# %% [markdown]
"""
## 5.5 字节去了哪里

根据第 3a 课：序列 256 时，token 少而逐样本梯度多，flat 搬运的字节在批次 8 时是普通训练的 3.99×<!-- = dram_times("traffic", "flat", 8, 256) -->，批次 16 时是 4.56×<!-- = dram_times("traffic", "flat", 16, 256) -->；序列 1024 时是 2.37×<!-- = dram_times("traffic", "flat", 8, 1024) -->。flash 在 0.97×<!-- = dram_times("traffic", "flash", 8, 256) --> 到 1.08×<!-- = dram_times("traffic", "flash", 16, 1024) --> 之间。

字节能解释一部分时间。8 × 256 时，以全带宽搬运 flat 多出的字节需要 56 ms<!-- = (dram_gb("traffic", "flat", 8, 256) - dram_gb("traffic", "standard", 8, 256)) * 1e9 / ceilings()["dram_bytes_per_second"] * 1e3 -->，而它慢了 169.7 ms<!-- = ms("traffic", "flat", 8, 256) - ms("traffic", "standard", 8, 256) -->。其余是什么，字节说明不了，这个尺寸也没有录过 trace；录一份 trace（第 2 课）才能知道是启动、等待还是计算。没有看到的原因，不要下结论。

**练习 5.5。** 多出的字节能解释多出的毫秒数的百分之几？
"""


# %%
def explained(extra_gb, tb_per_second, extra_ms): ...


# %%
check("5.5", explained)

# %% [markdown]
"""
## 5.6 怎样增长

只看一个尺寸说明不了问题。下面是时间和显存与同一次运行的普通训练之比。都是 2026-11-15 的：
"""

# %%
from pandas import DataFrame

lines = []
for folder, batch, seq in (
    ("traffic", 8, 256),
    ("flash-grid/bf16-256", 16, 256),
    ("flash-grid/bf16-256", 32, 256),
    ("flash-grid/bf16-1024", 8, 1024),
    ("flash-grid/bf16-1024", 16, 1024),
    ("flash-grid/bf16-16384", 1, 16384),
):
    line = {"batch × sequence": f"{batch} × {seq}"}
    for method in ("flat", "ghost", "flash"):
        line[method] = (
            f"{recorded.times(folder, method, batch, seq):.2f}× {recorded.memory_times(folder, method, batch, seq):.2f}×"
        )
    lines.append(line)
DataFrame(lines)

# %% [markdown]
"""
一列一列地看。flat 在短样本很多时最差（8 × 256 时 4.79×<!-- = times("traffic", "flat", 8, 256) -->），因为它的代价按样本计。ghost 在那里也不好，对长样本同样如此（1 × 16384 时 4.47×<!-- = times("flash-grid/bf16-16384", "ghost", 1, 16384) -->），因为它的范数按 T² 增长。flash 在大多数尺寸上接近一。

它并非处处没有代价，也随版本变化。下面是大家常训练的模型，用的是当前版本；这张表与 README 里的相同，由同一个脚本写出：

<!-- headline: begin -->
一块 NVIDIA H200，bf16，AdamW，2026-11-17（torch 2.11.0, triton 3.6.0, opacus 1.6.0, transformers 5.17.0, peft 0.21.0, opake 0.16.1）。每步时间和显存峰值，相对同一次运行的普通训练：

| 模型，批大小 | 普通训练 | Opacus flat | Opacus ghost | **flash clipping** | 普通训练，编译后 | **flash，编译后** |
| --- | --- | --- | --- | --- | --- | --- |
| GPT-2 124M，16 × 256 | 42 ms，6.5 GiB | 5.48×，1.62× | 不支持 | 1.58×，1.00× | 0.50×，0.74× | 1.64×，1.00× |
| Llama 1.2B，LoRA r=16，4 × 1024 | 75 ms，16.9 GiB | 1.65×，1.03× | 2.11×，1.09× | 1.54×，0.99× | 0.71×，0.95× | 1.34×，1.00× |
| 解码器 1.4B，8 × 1024 | 152 ms，35.3 GiB | 2.37×，1.40× | 2.84×，1.15× | 1.09×，0.96× | 未测 | 未测 |
| ViT-B/16，批大小 64 | 41 ms，5.7 GiB | 4.14×，2.20× | 4.55×，1.17× | 1.58×，0.92× | 未测 | 未测 |
| BERT-base，32 × 128 | 44 ms，3.0 GiB | 4.02×，4.14× | 4.93×，1.12× | 1.35×，0.93× | 0.74×，0.92× | 1.60×，1.00× |
| ResNet-50，批大小 64 | 34 ms，6.8 GiB | 4.21×，1.48× | 4.86×，1.28× | 2.05×，1.00× | 未测 | 未测 |
| T5-base，16 × 256 | 142 ms，10.0 GiB | 不支持 | 不支持 | 2.26×，0.90× | 未测 | 未测 |

编译后的 flash 相对编译后的普通训练。峰值取首步校验之后的步。数值大于 1 表示更慢或更占显存。波动见原始数据。命令：`python benchmarks/rivals.py OUT --budget 470`；[原始数据](../../benchmarks/results/headline.json)。

没有数字的格子：

- GPT-2 124M，16 × 256，Opacus ghost：Opacus refuses this model: Parameter tying is not supported with Ghost Clipping (at lm_head (Linear))。
- T5-base，16 × 256，Opacus flat：Opacus cannot train this model: encoder.block.0.layer.0.SelfAttention.relative_attention_bias (Embedding) was given a tensor of shape (256, 256) in a batch of 16 samples, and Opacus takes dimension 0 for the samples: keep the batch first and unfolded, and expand positions to a row for each sample。
- T5-base，16 × 256，Opacus ghost：Opacus refuses this model: Parameter tying is not supported with Ghost Clipping (at decoder.embed_tokens (Embedding))。
<!-- headline: end -->

小的训练步受主机限制：比值取决于 CPU，编译会有帮助。用 LoRA 时逐样本梯度很小，连 flat 裁剪也不贵。请测量**你自己的**模型。

**练习 5.6。** 根据这张表，哪种方法对哪种形状最差？
"""

# %%
worst = {"many short samples": ..., "one long sample": ...}

# %%
check("5.6", worst)

# %% [markdown]
"""
## 5.7 结果对不对？

如果一种方法快是因为漏掉了一个偏置，它就不满足差分隐私。在相信速度之前，先与最简单的参照比较：用普通的 autograd，一次一个样本，float64。

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
现在故意弄坏它：一个漏掉最后一个偏置的训练器，这个偏置既不计入范数，也不计入和。`dpscope.check` 必须指出来：
"""

# %%
from dpscope.trainers.flash import DPFlashClippingTrainer


class Forgetful(DPFlashClippingTrainer):
    def prepare_model(self, model):
        model.answer.bias.requires_grad_(False)
        return super().prepare_model(model)


broken = dpscope.check(make(batch_size=4, seq_len=8), [Forgetful], name="my_model", neighbours=False)
print("\n".join(str(broken).splitlines()[:8]))
assert not broken.ok

# %% [markdown]
"""
默认的 `neighbours=True` 还会检验差分隐私所依赖的条件：两个只差一个样本的批次，一步的差别不超过 C；噪声存在、大小正确、从不重复；记账器计入了每一步。*held* 不等于**证明**，但人为植入的错误都能发现（见 [check](../../docs/check.md)）。

**练习 5.7。** 返回一组范数对应的裁剪系数。范数为零时也要安全。
"""


# %%
def factors(norms, bound): ...


# %%
check("5.7", factors)

# %% [markdown]
"""
## 5.8 使用 flash

只改一行 import，训练循环不变：
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
print(f"largest contribution of a sample {share:.3f} (at most 1), ε = {engine.get_epsilon(delta=1e-5):.2f} at δ = 1e-5")

# %% [markdown]
"""
**练习 5.8。** 写成函数：用 `noise_multiplier=1.0` 和 `max_grad_norm=1.0` 处理模型、优化器和数据加载器，返回这三者。
"""


# %%
def make_private(model, optimizer, loader): ...


# %%
check("5.8", make_private)

# %% [markdown]
"""
## 5.9 你自己的模型

写一个返回 `Workload` 的函数：怎样构造模型、一个批次，以及**每个样本一个损失**。[programs/my_model.py](../programs/my_model.py) 就是这样的文件，可以照抄。

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
（这么小的模型在 CPU 上，时间几乎都花在 Python 里，而 flash 在 Python 里做的事更多：这个比值与 GPU 无关。`print(mine)` 里的 `?` 也是这个意思：三步算不上测量。在 GPU 上请用真实的尺寸，`steps` 用默认值。）

**练习 5.9。** 为一个分类器写出 workload 的损失：`batch` 是 `(inputs, labels)`，每个样本一个损失。
"""


# %%
def loss(model, batch): ...


# %%
check("5.9", loss)

# %% [markdown]
"""
## 5.10 结论

- **显存是瓶颈**（短样本多、模型大）：不要用 flat，用 flash 或 ghost。
- **时间是瓶颈**：用 flash；逐样本梯度很小（LoRA）时也测一下 flat。只有显存逼不得已时才用 ghost。
- **长序列**：不要用 ghost。
- **Opacus 不支持的层**（共享权重、循环层）：`dpscope check` 会说明哪种方法支持你的模型。差分隐私的每一步要么结果精确，要么报错并指出是哪一层。
- **论文需要数字**：用 `dpscope compare --all`，给出中位数、波动范围、硬件和版本；JSON 文件里都有。

```bash
dpscope report ../benchmarks/results/2026-11-15-h200-page
```

## 小测验

**1. flat 的比值在序列 256 时比 1024 时差。为什么？**

<details><summary>答案</summary>

它多出的部分是批次 × 参数量，与长度无关。序列短，普通训练的工作量就小。

</details>

**2. 两种方法时间相同，但一种搬运的 DRAM 字节是另一种的两倍。有关系吗？**

<details><summary>答案</summary>

现在也许没有：限制这一步的是别的因素。换到带宽相对较低的 GPU，或者那个限制消除之后，字节就成了瓶颈。

</details>

**3. 同事说“差分隐私在我们的模型上要慢 8×<!-- given -->”。你问什么？**

<details><summary>答案</summary>

用的哪种方法，批次和序列多大，和怎样的普通训练比（相同的优化器、数值格式、机器和运行），多少步的中位数，有没有检查过结果正确？然后自己测：一条命令。

</details>

**4. `dpscope check` 显示 EXACT。训练就满足差分隐私了吗？**

<details><summary>答案</summary>

它说明在试过的批次上，裁剪后的和与定义一致；加上 neighbours，说明没有发现违反界限的情况。差分隐私还要求采样方式符合记账器的假设，噪声不可预测，超参数没有在数据上无代价地调过。

</details>

## 要记住的

- DP-SGD 需要每个样本梯度的范数；各方法得到范数的方式不同，代价分别在显存、字节或时间上。
- 与同一次运行的普通训练比较。给出比值和波动，不要只给一个时间。
- flat 的代价按样本数，ghost 按 T²，flash 是计算范数的运算。
- 结果精确才有隐私：先检查，再测速。没有看到的原因，不要下结论。
- 由你的模型决定，一条命令就知道。

**延伸阅读**：[DP-SGD](https://arxiv.org/abs/1607.00133)、[Opacus](https://opacus.ai)、[测量方法](../../docs/method.md)、[显存](../../docs/memory.md)、[flash 裁剪](../../docs/flash.md)、[workload](../../docs/workloads.md)。下一课：[多个 GPU](06-several-gpus.ipynb)。
"""
