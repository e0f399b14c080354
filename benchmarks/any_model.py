"""Models whose layers are not fed sample by sample: flash clipping next to ordinary training, time and peak memory.

python benchmarks/any_model.py OUT                             # all rows on a GPU
python benchmarks/any_model.py OUT --only resnet wrn lstm gru    # those without transformers, about 90 s on an H200
python benchmarks/any_model.py OUT --profile --only resnet50   # with the kernels of standard and private steps
python benchmarks/any_model.py OUT --tiny                      # the same models, small, on a CPU: does it run?

Standard and flash steps alternate in blocks of one process; a ratio is the median over blocks, with its range. The
first step is timed apart: the engine verifies the model in it. Kernels of the slowest row are listed last, by time.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpscope.flash import DPFlashOptimizer, FlashEngine, make_graphed_step

BLOCKS, STEPS, WARMUP = 5, 4, 5
KERNELS = 22


class StandardisedConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.flatten(1)
        flat = (flat - flat.mean(1, keepdim=True)) / (flat.std(1, keepdim=True) + 1e-5)
        return F.conv2d(x, flat.view_as(self.weight), self.bias, self.stride, self.padding)


class Block(nn.Module):
    """Convolutions of the given kernels and widths, each with its norm, beside a shortcut; the first of 3 strides."""

    def __init__(
        self, width_in: int, widths: list[int], kernels: list[int], stride: int, conv: type[nn.Conv2d]
    ) -> None:
        super().__init__()
        strided = kernels.index(3)
        inputs = [width_in, *widths[:-1]]
        self.convs = nn.ModuleList(
            conv(a, b, k, stride if i == strided else 1, k // 2, bias=False)
            for i, (a, b, k) in enumerate(zip(inputs, widths, kernels, strict=True))
        )
        self.norms = nn.ModuleList(nn.GroupNorm(min(32, size // 2), size) for size in widths)
        straight = stride == 1 and width_in == widths[-1]
        self.short = nn.Identity() if straight else conv(width_in, widths[-1], 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            y = F.relu(y) if index + 1 < len(self.convs) else y
        return F.relu(y + self.short(x))


def resnet(conv: type[nn.Conv2d], base: int, depths: tuple[int, ...], bottleneck: bool, large: bool) -> nn.Module:
    """ResNet with GroupNorm, for images of 224² (`large`) or 32²."""
    layers: list[nn.Module] = [conv(3, base, 7, 2, 3, bias=False) if large else conv(3, base, 3, 1, 1, bias=False)]
    layers += [nn.GroupNorm(min(32, base // 2), base), nn.ReLU(), *([nn.MaxPool2d(3, 2, 1)] if large else [])]
    width_in = base
    for stage, depth in enumerate(depths):
        width = base * 2**stage
        widths, kernels = ([width, width, 4 * width], [1, 3, 1]) if bottleneck else ([width, width], [3, 3])
        for block in range(depth):
            layers.append(Block(width_in, widths, kernels, 2 if stage and not block else 1, conv))
            width_in = widths[-1]
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
    def ids(batch: int, length: int, words: int) -> Callable[[], Tensor]:
        return lambda: torch.randint(5, words, (2, 12) if tiny else (batch, length))

    def images(count: int, size: int) -> Callable[[], tuple[Tensor, Tensor]]:
        count, size = (2, 32) if tiny else (count, size)
        return lambda: (torch.randn(count, 3, size, size), torch.randint(10, (count,)))

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

    def t5_base() -> nn.Module:
        import transformers as models

        return models.T5ForConditionalGeneration(models.T5Config(**t5))

    def bart_base() -> nn.Module:
        import transformers as models

        return models.BartForConditionalGeneration(models.BartConfig(**(bart | size)))

    def mixtral() -> nn.Module:
        import transformers as models

        return models.MixtralForCausalLM(models.MixtralConfig(**moe))

    def resnet50(conv: type[nn.Conv2d] = nn.Conv2d) -> nn.Module:
        return resnet(conv, base, (3, 4, 6, 3), True, True)

    def resnet18() -> nn.Module:
        return resnet(nn.Conv2d, base, (2, 2, 2, 2), False, True)

    def wide_resnet() -> nn.Module:
        return resnet(nn.Conv2d, base, (6, 6, 6), False, False)

    large, small_images = images(64, 224), images(256, 32)
    standardised = partial(resnet50, StandardisedConv)
    sequences = ids(64, 128, 1000)
    found = [
        Row("t5-base 16x256", t5_base, ids(16, 256, 32000), seq2seq, half, 1.3),
        Row("bart-base 16x256", bart_base, ids(16, 256, 50000), seq2seq, half, 1.3),
        Row("mixture 8x128", mixtral, ids(8, 128, 1000), next_token, None, None),
    ]
    for dtype, suffix in ((None, ""), (torch.bfloat16, " bf16")):
        found += [
            Row(f"resnet50 64{suffix}", resnet50, large, classes, dtype, 1.25),
            Row(f"resnet18 64{suffix}", resnet18, large, classes, dtype, 1.25),
            Row(f"ws-resnet50 64{suffix}", standardised, large, classes, dtype, 1.5),
            Row(f"wrn-40-4 256{suffix}", wide_resnet, small_images, classes, dtype, 1.25),
            Row(f"lstm 64x128{suffix}", lambda: Recurrent(nn.LSTM, width), sequences, next_token, dtype, 2.0),
            Row(f"gru 64x128{suffix}", lambda: Recurrent(nn.GRU, width), sequences, next_token, dtype, 2.0),
        ]
    return found


class Loop:
    """One model and its step; time of a block of steps, and the peak since the last reset."""

    def __init__(self, row: Row, device: str, private: bool) -> None:
        torch.manual_seed(0)
        self.row, self.device = row, device
        self.graphed: Callable[[Any], Tensor] | None = None
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

    def graph(self) -> None:
        """Replay the private step as a CUDA graph from now on."""
        self.optimizer.zero_grad()
        autocast = torch.autocast(
            self.device, dtype=self.row.dtype or torch.bfloat16, enabled=self.row.dtype is not None
        )

        def loss(batch: Any) -> Tensor:
            with autocast:
                return self.row.losses(self.model, batch).mean()

        self.graphed = make_graphed_step(loss, self.optimizer)

    def step(self) -> None:
        if self.graphed is not None:
            self.graphed(self.batch)
            return
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


def measure(row: Row, device: str) -> tuple[dict[str, Any], list[Loop]]:
    found: dict[str, Any] = {"name": row.name, "bar": row.bar}
    peaks, loops = [], []
    for private in (False, True):
        before = torch.cuda.memory_allocated() if device == "cuda" else 0  # of the other loop, at rest
        loop = Loop(row, device, private)
        found[f"first_step_ms_{'flash' if private else 'standard'}"] = loop.block(1)
        loop.block(WARMUP)
        if private:
            found["by_sample"] = [unit.name for unit in loop.engine.per_sample_modules()]
            loop.engine.verification.schedule.pause()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            loop.block(2)
            peaks.append(torch.cuda.max_memory_allocated() - before)
        loop.optimizer.zero_grad()
        loops.append(loop)
    # Kernels are compiled now: what is left of a first step is the verification.
    found["first_step_again_ms"] = Loop(row, device, private=True).block(1)
    times = [[loop.block(STEPS) for loop in loops] for _ in range(BLOCKS)]
    ratios = sorted(flash / standard for standard, flash in times)
    found |= {
        "standard_ms": statistics.median(standard for standard, _ in times),
        "flash_ms": statistics.median(flash for _, flash in times),
        "ratio": statistics.median(ratios),
        "range": [ratios[0], ratios[-1]],
        "peak": peaks[1] / peaks[0] if peaks else None,
    }
    return found, loops


def measure_graphed(loops: list[Loop]) -> dict[str, float]:
    """The private step as a CUDA graph, beside the standard one."""
    standard, private = loops
    private.graph()
    private.block(WARMUP)
    times = [(standard.block(STEPS), private.block(STEPS)) for _ in range(BLOCKS)]
    return {
        "graphed_ms": statistics.median(graphed for _, graphed in times),
        "graphed_ratio": statistics.median(graphed / standard for standard, graphed in times),
    }


def profile(loops: list[Loop], device: str) -> str:
    """The costliest kernels of a standard and of a private step, the time the device is busy, and the host's time."""
    lines = []
    for title, loop in zip(("standard", "private"), loops, strict=True):
        loop.wait()
        start = time.perf_counter()
        loop.step()
        host = (time.perf_counter() - start) * 1e3
        wall = loop.block(STEPS)
        with torch.profiler.profile() as profiler:
            loop.block(2)
        kind = "device" if device == "cuda" else "cpu"
        events = [
            event
            for event in profiler.key_averages()
            if device != "cuda" or event.device_type == torch.autograd.DeviceType.CUDA
        ]
        times = {event.key: (getattr(event, f"self_{kind}_time_total") / 2e3, event.count / 2) for event in events}
        busy = sum(each for each, _ in times.values())
        lines.append(f"{loop.row.name}, {title} step: {wall:.1f} ms, device busy {busy:.1f} ms, host {host:.1f} ms")
        top = sorted(times.items(), key=lambda item: -item[1][0])[:KERNELS]
        lines += [f"  {each:8.3f} ms {count:7.1f} calls  {name[:110]}" for name, (each, count) in top]
    return "\n".join(lines)


def host_profile(loop: Loop) -> str:
    """Functions of three private steps by their own time on the host, backward in this thread."""
    profiler, text = cProfile.Profile(), io.StringIO()
    with torch.autograd.set_multithreading_enabled(False):
        loop.block(1)
        profiler.enable()
        loop.block(3)
        profiler.disable()
    stats = pstats.Stats(profiler, stream=text)
    for order in ("tottime", "cumtime"):
        stats.sort_stats(order).print_stats(50)
    return text.getvalue()


def main() -> None:  # noqa: PLR0915
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="*", default=[], help="patterns of rows' names")
    parser.add_argument("--graphed", action="store_true", help="time private steps as CUDA graphs, too")
    parser.add_argument("--profile", action="store_true", help="list kernels of every row, not of the slowest alone")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() and not options.tiny else "cpu"
    lines = []
    measured: dict[str, Any] = {}
    slowest: tuple[float, list[Loop]] = (0.0, [])
    for row in rows(options.tiny):
        if options.only and not any(re.search(word, row.name) for word in options.only):
            continue
        loops: list[Loop] = []
        try:
            found, loops = measure(row, device)
            if not options.profile:
                slowest = max(slowest, (found["ratio"], loops), key=lambda pair: pair[0])
            low, high = found["range"]
            first, again = (found[key] / found["standard_ms"] for key in ("first_step_ms_flash", "first_step_again_ms"))
            lines.append(
                f"{row.name:22} standard {found['standard_ms']:8.1f} ms  flash {found['flash_ms']:8.1f} ms  "
                f"{found['ratio']:.2f}x ({low:.2f} to {high:.2f})  peak {found['peak'] or 0:.2f}x  "
                f"first step {first:.1f} steps, {again:.1f} with compiled kernels  {found['by_sample'][:1]}"
            )
        except Exception as error:
            found = {"name": row.name, "error": f"{type(error).__name__}: {error}"}
            lines.append(f"{row.name:22} {found['error'][:200]}")
        name = row.name.replace(" ", "-")
        measured[row.name] = found
        (options.out / "rows.json").write_text(json.dumps(measured, indent=1))
        print(lines[-1], flush=True)
        if options.profile and loops:
            text = profile(loops, device)
            (options.out / f"profile-{name}.txt").write_text(text)
            (options.out / f"host-{name}.txt").write_text(host_profile(loops[1]))
            print(text, flush=True)
        if options.graphed and loops:
            try:
                graphed = measure_graphed(loops)
                found |= graphed
                lines.append(f"{row.name:22} graphed  {graphed['graphed_ms']:8.1f} ms  {graphed['graphed_ratio']:.2f}x")
            except Exception as error:
                lines.append(f"{row.name:22} graphed: {type(error).__name__}: {str(error)[:200]}")
            (options.out / "rows.json").write_text(json.dumps(measured, indent=1))
            print(lines[-1], flush=True)
        del loops
        if device == "cuda":
            torch.cuda.empty_cache()
    if slowest[1]:
        text = profile(slowest[1], device)
        (options.out / "slowest-profile.txt").write_text(text)
        print(text)
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
