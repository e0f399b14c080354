"""Models whose layers are not fed sample by sample: flash clipping next to ordinary training, time and peak memory.

python benchmarks/any_model.py OUT           # all rows on a GPU, about two minutes on an H200
python benchmarks/any_model.py OUT --tiny    # the same models, small, on a CPU: does it run?

Standard and flash steps alternate in blocks of one process; a ratio is the median over blocks, with its range. The
first step is timed apart: the engine verifies the model in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpscope.flash import DPFlashOptimizer, FlashEngine

BLOCKS, STEPS, WARMUP = 5, 4, 5


class StandardisedConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.flatten(1)
        flat = (flat - flat.mean(1, keepdim=True)) / (flat.std(1, keepdim=True) + 1e-5)
        return F.conv2d(x, flat.view_as(self.weight), self.bias, self.stride, self.padding)


class Bottleneck(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int, conv: type[nn.Conv2d]) -> None:
        super().__init__()
        out = 4 * width
        self.convs = nn.ModuleList(
            [
                conv(width_in, width, 1, bias=False),
                conv(width, width, 3, stride, 1, bias=False),
                conv(width, out, 1, bias=False),
            ]
        )
        self.norms = nn.ModuleList(nn.GroupNorm(min(32, size // 2), size) for size in (width, width, out))
        self.short = conv(width_in, out, 1, stride, bias=False) if stride > 1 or width_in != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            y = F.relu(y) if index < 2 else y
        return F.relu(y + self.short(x))


def resnet50(conv: type[nn.Conv2d], base: int = 64) -> nn.Module:
    layers: list[nn.Module] = [conv(3, base, 7, 2, 3, bias=False), nn.GroupNorm(min(32, base), base), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    width_in = base
    for stage, depth in enumerate((3, 4, 6, 3)):
        for block in range(depth):
            width = base * 2**stage
            layers.append(Bottleneck(width_in, width, 2 if stage and not block else 1, conv))
            width_in = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width_in, 1000))


class Recurrent(nn.Module):
    def __init__(self, cls: type[nn.RNNBase], width: int) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(1000, width), nn.Linear(width, 1000)
        self.rnn = cls(width, width, 2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.rnn(self.table(ids))[0])


class Row(NamedTuple):
    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    losses: Callable[[nn.Module, Any], Tensor]
    dtype: torch.dtype | None
    bar: float | None


def rows(tiny: bool) -> list[Row]:
    import transformers

    def ids(batch: int, length: int, words: int) -> Callable[[], Tensor]:
        return lambda: torch.randint(5, words, (2, 12) if tiny else (batch, length))

    def images() -> tuple[Tensor, Tensor]:
        count, size = (2, 32) if tiny else (64, 224)
        return torch.randn(count, 3, size, size), torch.randint(10, (count,))

    def seq2seq(model: nn.Module, x: Tensor) -> Tensor:
        logits = model(input_ids=x, decoder_input_ids=x, use_cache=False).logits
        return F.cross_entropy(logits.transpose(1, 2), x, reduction="none").mean(1)

    def next_token(model: nn.Module, x: Tensor) -> Tensor:
        found = model(x)
        logits = getattr(found, "logits", found)[:, :-1]
        return F.cross_entropy(logits.transpose(1, 2), x[:, 1:], reduction="none").mean(1)

    def classes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    small = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16} if tiny else {}
    t5 = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "dropout_rate": 0.0, **small}
    size = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 32} if tiny else {}
    bart = {"encoder_layers": 6, "decoder_layers": 6, "d_model": 768, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}
    bart |= {"encoder_attention_heads": 4 if tiny else 12, "decoder_attention_heads": 4 if tiny else 12, "dropout": 0.0}
    moe: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 1000}
    moe |= {"num_hidden_layers": 2 if tiny else 4, "hidden_size": 32 if tiny else 512, "num_attention_heads": 4}
    moe |= {"intermediate_size": 64 if tiny else 1024, "num_key_value_heads": 4, "use_cache": False}
    base = 8 if tiny else 64
    width = 32 if tiny else 1024
    half = None if tiny else torch.bfloat16
    models = transformers

    def t5_base() -> nn.Module:
        return models.T5ForConditionalGeneration(models.T5Config(**t5))

    def bart_base() -> nn.Module:
        return models.BartForConditionalGeneration(models.BartConfig(**(bart | size)))

    def mixtral() -> nn.Module:
        return models.MixtralForCausalLM(models.MixtralConfig(**moe))

    return [
        Row("t5-base 16x256", t5_base, ids(16, 256, 32000), seq2seq, half, 1.3),
        Row("bart-base 16x256", bart_base, ids(16, 256, 50000), seq2seq, half, 1.3),
        Row("ws-resnet50 64", lambda: resnet50(StandardisedConv, base), images, classes, None, 1.5),
        Row("ws-resnet50 64 bf16", lambda: resnet50(StandardisedConv, base), images, classes, half, None),
        Row("resnet50 64", lambda: resnet50(nn.Conv2d, base), images, classes, None, None),
        Row("lstm 64x128", lambda: Recurrent(nn.LSTM, width), ids(64, 128, 1000), next_token, None, 2.0),
        Row("gru 64x128", lambda: Recurrent(nn.GRU, width), ids(64, 128, 1000), next_token, None, 2.0),
        Row("mixture 8x128", mixtral, ids(8, 128, 1000), next_token, None, None),
    ]  # fmt: skip


class Loop:
    """One model and its step; time of a block of steps, and the peak since the last reset."""

    def __init__(self, row: Row, device: str, private: bool) -> None:
        torch.manual_seed(0)
        self.row, self.device = row, device
        self.model = row.model().to(device)
        batch = row.batch()
        self.batch = batch.to(device) if isinstance(batch, Tensor) else tuple(each.to(device) for each in batch)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=device == "cuda")
        if private:
            size = len(self.batch if isinstance(self.batch, Tensor) else self.batch[0])
            engine = FlashEngine(self.model, max_grad_norm=1.0)
            options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": size}
            self.optimizer = DPFlashOptimizer(self.optimizer, engine=engine, **options)
            self.engine = engine

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.device, dtype=self.row.dtype or torch.bfloat16, enabled=self.row.dtype is not None):
            loss = self.row.losses(self.model, self.batch).mean()
        loss.backward()
        self.optimizer.step()

    def block(self, steps: int) -> float:
        self.wait()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.wait()
        return (time.perf_counter() - start) / steps * 1e3

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def measure(row: Row, device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"name": row.name, "bar": row.bar}
    peaks = {}
    for private in (False, True):  # peaks one after the other: nothing of one is there while the other is measured
        loop = Loop(row, device, private)
        found[f"first_step_ms_{'flash' if private else 'standard'}"] = loop.block(1)
        loop.block(WARMUP)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            loop.block(2)
            peaks[private] = torch.cuda.max_memory_allocated()
        if private:
            found["by_sample"] = [unit.name for unit in loop.engine.opaque_units()]
        del loop
        if device == "cuda":
            torch.cuda.empty_cache()
    loops = [Loop(row, device, private) for private in (False, True)]
    for loop in loops:
        loop.block(WARMUP)
        if hasattr(loop, "engine"):
            loop.engine.rehearsals.schedule.pause()
    times = [[loop.block(STEPS) for loop in loops] for _ in range(BLOCKS)]
    ratios = sorted(flash / standard for standard, flash in times)
    found |= {
        "standard_ms": statistics.median(standard for standard, _ in times),
        "flash_ms": statistics.median(flash for _, flash in times),
        "ratio": statistics.median(ratios),
        "range": [ratios[0], ratios[-1]],
        "peak": peaks[True] / peaks[False] if peaks else None,
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() and not options.tiny else "cpu"
    lines = []
    for row in rows(options.tiny):
        if options.only and not any(word in row.name for word in options.only):
            continue
        try:
            found = measure(row, device)
            low, high = found["range"]
            first = found["first_step_ms_flash"] / found["standard_ms"]
            lines.append(
                f"{row.name:22} standard {found['standard_ms']:8.1f} ms  flash {found['flash_ms']:8.1f} ms  "
                f"{found['ratio']:.2f}x ({low:.2f} to {high:.2f})  peak {found['peak'] or 0:.2f}x  "
                f"first step {first:.1f} steps  {found['by_sample'][:1]}"
            )
        except Exception as error:
            found = {"name": row.name, "error": f"{type(error).__name__}: {error}"}
            lines.append(f"{row.name:22} {found['error'][:200]}")
        name = row.name.replace(" ", "-")
        (options.out / f"any-model-{name}.json").write_text(json.dumps(found, indent=1))
        print(lines[-1], flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
