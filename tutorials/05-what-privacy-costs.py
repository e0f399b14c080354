# %% [markdown]
"""
# 5. What privacy costs

*Last verified: 2026-11-16, torch 2.13 and Opacus 1.6 on a CPU, torch 2.11 on an NVIDIA H200.*

**Level:** practise. **Assumes:** lessons [1](01-how-a-gpu-step-works.ipynb) and [2](02-pytorch-profiler.ipynb); what a gradient is. **Time:** 20 minutes to read, about 40 more for the exercises.

Now all of it on one question: *what does differentially private training cost next to ordinary training of the same model, and why?* Every figure of the H200 below is read by code from committed results. All are of one day,
2026-11-15, except the table in 5.6 that names a later run: flash clipping has become faster since. At the end you measure a model of your own.

**After it you can**

- say what DP-SGD does beyond SGD, and where each part shows up: in time, in memory, in bytes;
- measure it for any model with one command, and read the result without fooling yourself;
- check that a clipping method does what it promises, before you believe that it is fast;
- decide between flat, ghost and flash clipping for your model.

Solutions: [solutions/lesson_5.py](solutions/lesson_5.py).
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

language.use("en")

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
## 5.1 What DP-SGD adds

An ordinary step: forward, backward, update. A private one must bound what any *single sample* can change, and hide the rest in noise:

1. for every sample b, the norm of its own gradient v_b, over all parameters together;
2. a factor c_b = min(1, C / ‖v_b‖), so that no sample contributes more than C;
3. the sum Σ c_b v_b, plus Gaussian noise of standard deviation σC, divided by the expected batch size;
4. bookkeeping of ε by an accountant.

An ordinary backward pass gives Σ v_b directly and never forms a single v_b. That is why privacy costs something. The methods differ in how they get the norms:

| method | norms | price |
| --- | --- | --- |
| `flat` (Opacus) | form every v_b | memory and bytes: batch × parameters |
| `ghost` (Opacus) | from inputs and output gradients, then a second backward pass | time: two backward passes, and T × T products in memory |
| `flash` (dpscope) | the same mathematics in tiles that never reach memory, or kept gradients where that is cheaper and there is room; one backward pass | the arithmetic of the norms |

**Exercise 5.1.** Clip and sum: `gradients` has one row for each sample, `bound` is C. Return Σ c_b v_b.
"""


# %%
def clipped_sum(gradients, bound): ...


# %%
check("5.1", clipped_sum)

# %% [markdown]
"""
## 5.2 One command

```bash
dpscope compare --methods standard,flat,ghost,flash --model tiny --batch-size 4 --seq-len 64
dpscope compare --all --model 1b --dtype bf16 --batch-size 8 --seq-len 1024 --out page --resume
```

The first runs on a laptop in a minute, the second is the whole page on a GPU. Every row is a process of its own, so that nothing leaks from one into the next; a row that fails says why, and the others go on; doubtful figures are marked
with `?`. From Python it is `dpscope.compare`, which section 5.9 runs. The results of the second on the H200, a transformer of 1.17 billion parameters, 2026-11-15:
"""

# %%
page = recorded.sweep("page")
print("\n".join(str(page).splitlines()[:14]))

# %% [markdown]
"""
Flat clipping takes 2.10×<!-- = times("page", "flat") --> the time and 1.42×<!-- = memory_times("page", "flat") --> the memory of ordinary training; ghost 2.72×<!-- = times("page", "ghost") --> and
1.14×<!-- = memory_times("page", "ghost") -->; flash 1.09×<!-- = times("page", "flash") --> and 0.96×<!-- = memory_times("page", "flash") -->.
Runs differ: the same row of flat took 2.10×<!-- = times("page", "flat") -->,
2.01×<!-- = times("flash-grid/bf16-1024", "flat") --> and 1.99×<!-- = times("traffic", "flat") --> in three runs of one day. Quote the run, and do not read meaning into the second decimal.

**Exercise 5.2.** How many tokens a second is a step of `ms` milliseconds?
"""


# %%
def tokens_per_second(batch, seq, ms): ...


# %%
check("5.2", tokens_per_second)

# %% [markdown]
"""
## 5.3 Where the memory goes

```bash
dpscope memory --model 1b --dtype bf16 --batch-size 8 --seq-len 1024
```

Every live byte belongs to exactly one component, and they add up to the allocator's own figure.
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
Flat's per-sample gradients are 18.9 GiB<!-- = component_gib("per_sample_gradients", "memory/8x1024", "flat") --> of its 42.78 GiB<!-- = gib("memory/8x1024", "flat") -->. Ghost has none; at its peak the gradients of the first backward
pass, 4.37 GiB<!-- = component_gib("gradients", "memory/8x1024", "ghost") -->, are still there. *When* each peaks tells why: ordinary training peaks at the loss, when all activations are live. Flat peaks later, while clipping: by then its activations
are freed and something larger has taken their place.

**Exercise 5.3.** Estimate the memory of per-sample gradients in GiB, then compare 8 samples, 1.17e9 parameters and 2 bytes (bfloat16) with the figure above. (Some layers keep theirs in float32.)
"""


# %%
def gib(batch, parameters, nbytes): ...


# %%
check("5.3", gib)

# %% [markdown]
"""
## 5.4 Where the time goes

From the traces of lesson 2, phase by phase (2026-11-15): ghost spends 270.3 ms<!-- = next(p["gpu_ms"] for p in traced("traces", "ghost")["phases"] if p["phase"] == "backward") --> of GPU time in backward where ordinary training needs
75.8 ms<!-- = next(p["gpu_ms"] for p in traced("traces", "standard")["phases"] if p["phase"] == "backward") -->: two passes and the products of its norms. Flash has the norms in `clip`,
11.8 ms<!-- = next(p["gpu_ms"] for p in traced("traces", "flash")["phases"] if p["phase"] == "clip") -->, and its weight products, noise and update together in `optimizer`.
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
**Exercise 5.4.** Return the GPU milliseconds of a phase of a method. `recorded.traced("traces", method)["phases"]` is a list of dicts with `phase` and `gpu_ms`.
"""


# %%
def phase_ms(method, phase): ...


# %%
check("5.4", phase_ms)

# %% [markdown]
"""
## 5.5 Where the bytes go

From lesson 3a: at sequence 256, where per-sample gradients are many for few tokens, flat moves 3.99×<!-- = dram_times("traffic", "flat", 8, 256) --> the bytes of ordinary training at batch 8 and
4.56×<!-- = dram_times("traffic", "flat", 16, 256) --> at batch 16; at sequence 1024 2.37×<!-- = dram_times("traffic", "flat", 8, 1024) -->. Flash moved between 0.97×<!-- = dram_times("traffic", "flash", 8, 256) --> and
1.08×<!-- = dram_times("traffic", "flash", 16, 1024) -->.

Bytes explain part of the time. At 8 × 256, moving flat's extra bytes at full bandwidth would take 56 ms<!-- = (dram_gb("traffic", "flat", 8, 256) - dram_gb("traffic", "standard", 8, 256)) * 1e9 / ceilings()["dram_bytes_per_second"] * 1e3 --> of the
169.7 ms<!-- = ms("traffic", "flat", 8, 256) - ms("traffic", "standard", 8, 256) --> that it is slower. What the rest is, bytes cannot say, and this size was not traced; a trace (lesson 2) would show whether it is launches, waits or arithmetic. Name a cause only
when you have seen it.

**Exercise 5.5.** Which percentage of the extra milliseconds do the extra bytes explain?
"""


# %%
def explained(extra_gb, tb_per_second, extra_ms): ...


# %%
check("5.5", explained)

# %% [markdown]
"""
## 5.6 How it grows

One size is an anecdote. Ratios of time and memory to ordinary training of the same run, 2026-11-15:
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
Read down the columns. Flat is worst for many short samples (4.79×<!-- = times("traffic", "flat", 8, 256) --> at 8 × 256), because its cost is per sample. Ghost is bad there too, and for long ones
(4.47×<!-- = times("flash-grid/bf16-16384", "ghost", 1, 16384) --> at 1 × 16384), because its norms cost T². Flash is near one at most sizes.

It is not free everywhere, and it changes with versions. These are models people train, with the current version. The table is the README's, and one script writes both:

<!-- headline: begin -->
One NVIDIA H200, bf16, AdamW, 2026-11-17 (torch 2.11.0, triton 3.6.0, opacus 1.6.0, transformers 5.17.0, peft 0.21.0, opake 0.16.1). Step time and peak memory relative to ordinary training in the same run:

| model, batch | ordinary training | Opacus flat | Opacus ghost | **flash clipping** | ordinary, compiled | **flash, compiled** |
| --- | --- | --- | --- | --- | --- | --- |
| GPT-2 124M, 16 × 256 | 42 ms, 6.5 GiB | 5.48×, 1.62× | refused | 1.58×, 1.00× | 0.50×, 0.74× | 1.64×, 1.00× |
| Llama 1.2B with LoRA r=16, 4 × 1024 | 75 ms, 16.9 GiB | 1.65×, 1.03× | 2.11×, 1.09× | 1.54×, 0.99× | 0.71×, 0.95× | 1.34×, 1.00× |
| decoder 1.4B, 8 × 1024 | 152 ms, 35.3 GiB | 2.37×, 1.40× | 2.84×, 1.15× | 1.09×, 0.96× | not measured | not measured |
| ViT-B/16, batch 64 | 41 ms, 5.7 GiB | 4.14×, 2.20× | 4.55×, 1.17× | 1.58×, 0.92× | not measured | not measured |
| BERT-base, 32 × 128 | 44 ms, 3.0 GiB | 4.02×, 4.14× | 4.93×, 1.12× | 1.35×, 0.93× | 0.74×, 0.92× | 1.60×, 1.00× |
| ResNet-50, batch 64 | 34 ms, 6.8 GiB | 4.21×, 1.48× | 4.86×, 1.28× | 2.05×, 1.00× | not measured | not measured |
| T5-base, 16 × 256 | 142 ms, 10.0 GiB | refused | refused | 2.26×, 0.90× | not measured | not measured |

Compiled flash is relative to compiled ordinary training. Peaks are of a clear step. Above 1 is slower or larger. Spread: in the raw figures. Command: `python benchmarks/rivals.py OUT --budget 470`; [raw figures](../benchmarks/results/headline.json).

Cells without a figure:

- GPT-2 124M, 16 × 256, Opacus ghost: Opacus refuses this model: Parameter tying is not supported with Ghost Clipping (at lm_head (Linear)).
- T5-base, 16 × 256, Opacus flat: Opacus cannot train this model: encoder.block.0.layer.0.SelfAttention.relative_attention_bias (Embedding) was given a tensor of shape (256, 256) in a batch of 16 samples, and Opacus takes dimension 0 for the samples: keep the batch first and unfolded, and expand positions to a row for each sample.
- T5-base, 16 × 256, Opacus ghost: Opacus refuses this model: Parameter tying is not supported with Ghost Clipping (at decoder.embed_tokens (Embedding)).
<!-- headline: end -->

Small steps are host-bound: their ratio depends on the CPU, and compiling helps. With LoRA adapters per-sample gradients are tiny, and even flat clipping is cheap. Measure *your* model.

**Exercise 5.6.** Which method is worst for which shape, by the table?
"""

# %%
worst = {"many short samples": ..., "one long sample": ...}

# %%
check("5.6", worst)

# %% [markdown]
"""
## 5.7 Is it right?

A method that is fast because it forgets a bias is not private. Before you believe a speed, compare the method with the simplest possible oracle: one sample at a time through plain autograd, in float64.

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
Now break it: a trainer that forgets the last bias, which is then in no norm and in no sum. `dpscope.check` must say so:
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
With `neighbours=True`, the default, it also tries what the guarantee rests on: that a step on two batches that differ in one sample moves by at most C, that noise is there, of the right size and never repeated, and that the
accountant counts every step. *Held* is not *proved*, but a planted fault is found ([check](../docs/check.md) lists them).

**Exercise 5.7.** Return the clipping factors of a tensor of norms. A norm of zero must be safe.
"""


# %%
def factors(norms, bound): ...


# %%
check("5.7", factors)

# %% [markdown]
"""
## 5.8 Use flash

One import. The loop stays as it was:
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
**Exercise 5.8.** Write it as a function that makes model, optimizer and loader private with `noise_multiplier=1.0` and `max_grad_norm=1.0`, and returns the three.
"""


# %%
def make_private(model, optimizer, loader): ...


# %%
check("5.8", make_private)

# %% [markdown]
"""
## 5.9 Your own model

A function that returns a `Workload`: how to build the model, a batch, and *one loss per sample*. [programs/my_model.py](programs/my_model.py) is such a file; copy it.

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
(A model this small on a CPU spends nearly all its time in Python, and flash does more in Python: this ratio says nothing about a GPU. The `?` of `print(mine)` says so too: three steps are no measurement. On a GPU, take your real sizes and leave
`steps` at its default.)

**Exercise 5.9.** Write the loss of a workload for a classifier: `batch` is `(inputs, labels)`. One loss per sample.
"""


# %%
def loss(model, batch): ...


# %%
check("5.9", loss)

# %% [markdown]
"""
## 5.10 What to conclude

- *Memory is the problem* (many short samples, a large model): not flat. Flash or ghost.
- *Time is the problem*: flash; measure flat too if per-sample gradients are tiny (LoRA). Ghost only where memory forces it.
- *Long sequences*: not ghost.
- *A layer that Opacus refuses* (tied weights, recurrent layers): `dpscope check` says which method takes your model. Each private step is exact, or fails with an error that names the layer.
- *You need a number for a paper*: `dpscope compare --all`, the medians with their spread, the hardware and the versions; the JSON files hold all of it.

```bash
dpscope report ../benchmarks/results/2026-11-15-h200-page
```

## Quiz

**1. Flat's ratio is worse at sequence 256 than at 1024. Why?**

<details><summary>Answer</summary>

Its extra is batch × parameters, whatever the length. A short sequence gives little ordinary work to compare it with.

</details>

**2. Two methods have the same time, but one moves twice the DRAM bytes. Does it matter?**

<details><summary>Answer</summary>

Today perhaps not: something else bounds that step. On a GPU with less bandwidth for its arithmetic, or once that other limit is gone, the bytes are the limit.

</details>

**3. A colleague reports "DP costs 8×<!-- given --> on our model". What do you ask?**

<details><summary>Answer</summary>

Which method, which batch and sequence, against which ordinary training (same optimizer, same number format, same machine, same run), median of how many steps, and was it checked to be exact? Then measure it: one command.

</details>

**4. `dpscope check` says EXACT. Is training private?**

<details><summary>Answer</summary>

It says that clipped sums on the batches that were tried agree with the definition, and, with neighbours, that nothing tried broke the bound. The guarantee also needs sampling as the accountant assumes, noise that nobody can predict, and
hyperparameters that were not tuned on the data without paying for it.

</details>

## What to remember

- DP-SGD needs the norm of every sample's gradient; the methods differ in how they get it, and pay in memory, bytes or time.
- Compare with ordinary training of the same run. Ratios with spread, never single times.
- Flat pays per sample, ghost per T², flash for the arithmetic of the norms.
- Exactness is privacy: check first, then measure. Name a cause only when you have seen it.
- Your model decides. One command tells.

**Further**: [DP-SGD](https://arxiv.org/abs/1607.00133), [Opacus](https://opacus.ai), [method](../docs/method.md), [memory](../docs/memory.md), [flash clipping](../docs/flash.md), [workloads](../docs/workloads.md). Next: [Several GPUs](06-several-gpus.ipynb).
"""
