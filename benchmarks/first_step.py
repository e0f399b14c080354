"""What verification costs: the first private step, and all checks of 1,000 steps, in ordinary steps of the same model.

python benchmarks/first_step.py [--only t5 bart] [--device cuda] [--operators]

Models are small versions of real ones (32 × 32 tokens, 32 images of 32²), so that Python's share of the time is larger
than in practice. Ordinary and private steps alternate; medians. Later checks run at steps 2, 4, 8, …, 512: those of the
first 16 steps are timed. On a CPU, processor time is taken. With `--operators` the operators of torch are counted
instead, as its profiler sees them (one that calls another counts twice): what a host-bound step on a GPU waits for, and
the same on every machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpscope.flash import FlashEngine

BATCH, LENGTH, WORDS, WIDTH = 32, 32, 500, 128
STEPS, TOTAL = 16, 1000


def mlp() -> nn.Module:
    layers = [nn.Linear(3 * 32 * 32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(8, width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1),
            nn.GroupNorm(8, width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def resnet() -> nn.Module:
    blocks = [Residual(32) for _ in range(8)]
    return nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


# Class of the model, and sizes of its configuration.
HUGGING_FACE: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("ForMaskedLM", {"hidden_size": WIDTH, "num_hidden_layers": 12, "num_attention_heads": 4}),
    "GPT2": ("LMHeadModel", {"n_embd": WIDTH, "n_layer": 12, "n_head": 4}),
    "T5": ("ForConditionalGeneration", {"d_model": WIDTH, "d_kv": 32, "d_ff": 512, "num_layers": 12, "num_heads": 4}),
    "Bart": ("ForConditionalGeneration", {"d_model": WIDTH, "encoder_layers": 6, "decoder_layers": 6}),
}


def hugging_face(name: str) -> nn.Module:
    import transformers

    head, sizes = HUGGING_FACE[name]
    config = getattr(transformers, f"{name}Config")(vocab_size=WORDS, pad_token_id=0, **sizes)
    model: nn.Module = getattr(transformers, f"{name}{head}")(config)
    return model.eval()  # without dropout, as most of verification runs it


def of_images(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def of_tokens(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    given = {"decoder_input_ids": batch[0], "use_cache": False} if hasattr(model, "get_encoder") else {}
    logits = model(input_ids=batch[0], **given).logits
    return F.cross_entropy(logits.transpose(1, 2), batch[0], reduction="none").mean(1)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Any], Tensor]]] = {
    "mlp": (mlp, of_images),
    "resnet": (resnet, of_images),
    "bert": (lambda: hugging_face("Bert"), of_tokens),
    "gpt2": (lambda: hugging_face("GPT2"), of_tokens),
    "t5": (lambda: hugging_face("T5"), of_tokens),
    "bart": (lambda: hugging_face("Bart"), of_tokens),
}


def seconds(step: Callable[[], None], device: str) -> float:
    clock = time.perf_counter if device == "cuda" else time.process_time  # other programs do not count
    begin = clock()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - begin


def operators(step: Callable[[], None], device: str) -> float:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return sum(event.name.startswith("aten::") for event in profile.events())


def measure(name: str, device: str, cost: Callable[[Callable[[], None], str], float]) -> tuple[float, ...]:
    make, losses = MODELS[name]
    torch.manual_seed(0)
    plain, private = (make().to(device) for _ in range(2))
    images = name in ("mlp", "resnet")
    data = torch.randn(BATCH, 3, 32, 32) if images else torch.randint(5, WORDS, (BATCH, LENGTH))
    batch = data.to(device), torch.randint(10, (BATCH,), device=device)
    engine = FlashEngine(private, max_grad_norm=1.0)

    def ordinary() -> None:
        plain.zero_grad()
        losses(plain, batch).mean().backward()

    def flash() -> None:
        engine.zero_grad()
        losses(private, batch).mean().backward()
        engine.finish()

    for _ in range(3):
        cost(ordinary, device)
    first = cost(flash, device)
    pairs = [(cost(ordinary, device), cost(flash, device)) for _ in range(STEPS)]
    base = statistics.median(one for one, _ in pairs)
    later = [two for _, two in pairs]
    usual = statistics.median(later)
    checks = {index: max(0.0, later[index - 2] - usual) for index in (2, 4, 8, 16)}
    whole, rows = checks[4], statistics.mean((checks[2], checks[8]))  # every fourth has the self-test
    return base, usual / base, first / base, (3 * whole + 7 * rows) / (TOTAL * usual)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--operators", action="store_true", help="count them, and take no times")
    options = parser.parse_args()
    cost, unit = (operators, 1) if options.operators else (seconds, 1e3)
    what = "operators" if options.operators else "ordinary ms"
    print(f"{'model':8} {what:>12} {'private ×':>10} {'first step ×':>13} {'checks of 1,000 steps':>22}")
    for name in options.only:
        base, usual, first, share = measure(name, options.device, cost)
        print(f"{name:8} {unit * base:12.1f} {usual:10.2f} {first:13.1f} {share:22.2%}", flush=True)


if __name__ == "__main__":
    main()
