# %% [markdown]
"""
# 5. What privacy costs

*Last verified: 2026-11-15, torch 2.13 and Opacus 1.6 on a CPU, torch 2.11 on an NVIDIA H200.*

Now all of it on one question: *what does differentially private training cost next to ordinary training of the same model, and why?*
Every figure of the H200 below is read by code from results that are committed with this course. At the end the same is done to a model of
your own.

**After it you can**

- say what DP-SGD does beyond SGD, and where each part shows up: in time, in memory, in bytes;
- measure it for any model with one command, and read the result without fooling yourself;
- check that a clipping method does what it promises, before you believe that it is fast;
- decide between flat, ghost and flash clipping for your model.
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
## 5.1 What DP-SGD adds

An ordinary step: forward, backward, update. A private one must bound what any *single sample* can change, and hide the rest in noise:

1. for every sample b, the norm of its own gradient v_b, over all parameters together;
2. a factor c_b = min(1, C / ‖v_b‖), so that no sample contributes more than C;
3. the sum Σ c_b v_b, plus Gaussian noise of standard deviation σC, divided by the expected batch size;
4. bookkeeping of ε by an accountant.

An ordinary backward pass gives Σ v_b directly and never forms a single v_b. That is why privacy costs something, and the methods differ in
how they get the norms:

| method | norms | price |
| --- | --- | --- |
| `flat` (Opacus) | form every v_b | memory and bytes: batch × parameters |
| `ghost` (Opacus) | from inputs and output gradients, then a second backward pass | time: two backward passes, and T × T products in memory |
| `flash` (dpscope) | the same mathematics in tiles that never reach memory; one backward pass | the arithmetic of the norms |
"""

# %% [markdown]
"""
## 5.2 One command

```bash
dpscope compare --methods standard,flat,ghost,flash --model tiny --batch-size 4 --seq-len 64
dpscope compare --all --model 1b --dtype bf16 --batch-size 8 --seq-len 1024 --out page --resume
```

The first runs on a laptop in a minute, the second is the whole page on a GPU. Every row is a process of its own, so that nothing leaks from one into the
next; a row that fails says why, and the others go on; figures that the machine's noise makes doubtful are marked with `?`. From Python it is
`dpscope.compare`, which section 5.9 runs. These are the results of the second on the H200, a transformer of 1.17 billion parameters:
"""

# %%
page = recorded.sweep("page")
print("\n".join(str(page).splitlines()[:14]))

# %% [markdown]
"""
Flat clipping takes 2.10×<!-- = times("page", "flat") --> the time and 1.42×<!-- = memory_times("page", "flat") --> the memory of ordinary training; ghost
2.72×<!-- = times("page", "ghost") --> and 1.14×<!-- = memory_times("page", "ghost") -->; flash
1.09×<!-- = times("page", "flash") --> and 0.96×<!-- = memory_times("page", "flash") -->. Three questions follow: where is the memory, where is the time, and
where are the bytes?
"""

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
pictures.show(draw_breakdown(memory.rows), "memory by component of four methods on an H200")

# %% [markdown]
"""
Flat's per-sample gradients are 18.9 GiB<!-- = component_gib("per_sample_gradients", "memory/8x1024", "flat") --> of its
42.78 GiB<!-- = gib("memory/8x1024", "flat") -->. Ghost has none; at its peak the gradients of the first backward pass,
4.37 GiB<!-- = component_gib("gradients", "memory/8x1024", "ghost") -->, still lie there. *When* each peaks tells why:
"""

# %%
pictures.show(draw_timeline(memory.rows), "live memory over one step of four methods")

# %% [markdown]
"""
Ordinary training peaks at the loss, when all activations are live. Flat peaks later, while clipping: it has freed its activations by then and put
something larger in their place. Flash stays below ordinary training throughout.

## 5.4 Where the time goes

From the traces of tutorial 2, phase by phase: ghost spends 270.3 ms<!-- = next(p["gpu_ms"] for p in traced("traces", "ghost")["phases"] if p["phase"] == "backward") -->
of GPU time in backward where ordinary training needs
75.8 ms<!-- = next(p["gpu_ms"] for p in traced("traces", "standard")["phases"] if p["phase"] == "backward") -->: two passes and the products of its norms. Flash has the norms in
`clip`, 11.8 ms<!-- = next(p["gpu_ms"] for p in traced("traces", "flash")["phases"] if p["phase"] == "clip") -->, and its weight products, noise and update together in
`optimizer`.
"""

# %%
from dpscope.reports.trace.figures import draw_differences

pictures.show(draw_differences(recorded.sweep("traces").rows), "operators that make a private step longer")

# %% [markdown]
"""
## 5.5 Where the bytes go

From tutorial 3: at sequence 256, where per-sample gradients are many for few tokens, flat moves
3.99×<!-- = dram_times("traffic", "flat", 8, 256) --> the bytes of ordinary training at batch 8 and
4.56×<!-- = dram_times("traffic", "flat", 16, 256) --> at batch 16; at sequence 1024 2.37×<!-- = dram_times("traffic", "flat", 8, 1024) -->. Flash moves
between 0.97×<!-- = dram_times("traffic", "flash", 8, 256) --> and 1.08×<!-- = dram_times("traffic", "flash", 16, 1024) -->.

Bytes explain part of the time, and dpscope says how much: moving flat's extra bytes at full bandwidth would take
56 ms<!-- = (dram_gb("traffic", "flat", 8, 256) - dram_gb("traffic", "standard", 8, 256)) * 1e9 / ceilings()["dram_bytes_per_second"] * 1e3 --> of the
169.7 ms<!-- = ms("traffic", "flat", 8, 256) - ms("traffic", "standard", 8, 256) --> that it is slower. The rest is launches: thousands of small kernels, and a host
that cannot keep up.
"""

# %%
from dpscope.reports.time.figures import draw_tradeoff

pictures.show(draw_tradeoff(page.rows), "memory against time")

# %% [markdown]
"""
## 5.6 How it grows

One size is an anecdote. Ratios to ordinary training of the same run, from the recorded grid:
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
Read down the columns. Flat is worst for many short samples (3.73×<!-- = times("flash-grid/bf16-256", "flat", 16, 256) --> at 16 × 256), because its cost is per sample. Ghost is
worst for long ones (4.47×<!-- = times("flash-grid/bf16-16384", "ghost", 1, 16384) --> at 1 × 16384), because its norms cost T². Flash stays near one.

It is not free everywhere. For ViT-B/16 at batch 64, whose class token and positions are bare parameters, flash took
1.35×<!-- = times("keep", "flash", 64, None, model="hf:vit") --> the time (a figure that dpscope marks as doubtful, for the spread of that row was wide). With LoRA adapters,
where per-sample gradients are tiny, flat is the quicker one:
1.05×<!-- = times("your-model/first/llama-lora", "flat", 8, 2048, model="hf:llama+lora-r16") --> against flash's
1.11×<!-- = times("your-model/first/llama-lora", "flash", 8, 2048, model="hf:llama+lora-r16") -->. Measure *your* model.

## 5.7 Is it right?

A method that is fast because it forgets a bias is not private. Before you believe a speed, hold the method against the simplest possible
oracle: one sample at a time through plain autograd, in float64.

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
With `neighbours=True`, the default, it also tries what the guarantee rests on: that a step on two batches that differ in one sample moves by at most C, that noise
is there, of the right size and never repeated, and that the accountant counts every step. *Held* is not *proved*, but a planted fault is found
([check](../docs/check.md) lists them).

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
print(f"largest share of a sample {share:.3f} (at most 1), ε = {engine.get_epsilon(delta=1e-5):.2f} at δ = 1e-5")

# %% [markdown]
"""
## 5.9 Your own model

A function that returns a `Workload`: how to build the model, a batch, and *one loss per sample*. `programs/my_model.py` is such a file; copy it.

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
(For a model this small on a CPU nearly all time is Python's, and flash does more in Python: its ratio here says nothing about a GPU. The `?` of `print(mine)` would
say so too: three steps are no measurement. On a GPU, take your real sizes and leave `steps` at its default.)

## 5.10 What to conclude

- *Memory is the problem* (many short samples, a large model): flat is out. Flash or ghost.
- *Time is the problem*: flash, or flat if per-sample gradients are tiny (LoRA) and memory has room. Ghost only where memory forces it.
- *Long sequences*: not ghost.
- *A layer that Opacus refuses* (tied weights, recurrent layers): `dpscope check` says which method takes your model, and what it refuses by name.
- *You need a number for a paper*: `dpscope compare --all`, the medians with their spread, the hardware and the versions; the JSON files hold all of it.

```bash
dpscope report ../benchmarks/results/2026-11-15-h200-page
```

## Exercises

1. From the recorded page: how many tokens a second does each method train? What does a day of private training with flat cost in days of ordinary training?
2. The memory of flat's per-sample gradients at batch 8 is above. Estimate it for batch 16 from what you know, and compare with the recorded sweep `flash-grid/bf16-1024`.
3. Break a method on purpose: let it forget one bias, and see that `dpscope.check` says so.
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
## Quiz

**1. Flat's ratio is worse at sequence 256 than at 1024. Why?**

<details><summary>Answer</summary>

Its extra is batch × parameters, whatever the length. A short sequence gives little ordinary work to compare it with.

</details>

**2. Two methods have the same time, but one moves twice the DRAM bytes. Does it matter?**

<details><summary>Answer</summary>

Today perhaps not: something else bounds that step (launches, arithmetic). On a GPU with less bandwidth for its arithmetic, or once the launches are mended, the bytes are the
limit.

</details>

**3. A colleague reports "DP costs 8×<!-- given --> on our model". What do you ask?**

<details><summary>Answer</summary>

Which method, which batch and sequence, against which ordinary training (same optimizer, same number format, same machine, same run), median of how many steps, and was it checked to
be exact? Then measure it: one command.

</details>

**4. `dpscope check` says EXACT. Is training private?**

<details><summary>Answer</summary>

It says that clipped sums on the batches that were tried agree with the definition, and, with neighbours, that nothing tried broke the bound. The guarantee also needs sampling as the
accountant assumes, noise that nobody can predict, and hyperparameters that were not tuned on the data without paying for it.

</details>

## What to remember

- DP-SGD needs the norm of every sample's gradient; the methods differ in how they get it, and pay in memory, bytes or time.
- Compare with ordinary training of the same run. Ratios with spread, never single times.
- Flat pays per sample, ghost per T², flash for the arithmetic of the norms.
- Exactness is privacy: check first, then measure.
- Your model decides. One command tells.

**Further**: [DP-SGD](https://arxiv.org/abs/1607.00133), [Opacus](https://opacus.ai), [method](../docs/method.md), [memory](../docs/memory.md), [flash clipping](../docs/flash.md), [workloads](../docs/workloads.md).
"""
