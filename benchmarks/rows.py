"""Models at the sizes that people train, the engines that train them, and one training loop of each pair."""

from __future__ import annotations

import gc
import importlib.metadata
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from dpscope import Workload

PACKAGES = ("torch", "triton", "opacus", "transformers", "peft", "opake")
WARMUP = 5  # steps; flash clipping verifies the model in the first ones, and a graph is captured by the fourth


class Row(NamedTuple):
    """A model at the size that people train: its names on the pages, its preset, and a small preset for a CPU."""

    label: str
    label_zh: str
    model: str
    tiny: str
    batch: int
    length: int | None
    sizes: dict[str, int] = {}  # noqa: RUF012  (never changed)
    lora: str | None = None


ROWS = {
    "gpt2": Row("GPT-2 124M, 16 × 256", "GPT-2 124M，16 × 256", "hf:gpt2", "hf:gpt2-tiny", 16, 256),
    "llama-lora": Row(
        *("Llama 1.2B with LoRA r=16, 4 × 1024", "Llama 1.2B，LoRA r=16，4 × 1024", "hf:llama", "hf:llama-tiny"),
        *(4, 1024, {}, "r=16,alpha=32,target=q_proj,v_proj"),
    ),
    "decoder": Row(
        "decoder 1.4B, 8 × 1024", "解码器 1.4B，8 × 1024", "1b", "tiny", 8, 1024, {"hidden_dim": 2048, "num_layers": 24}
    ),
    "vit": Row("ViT-B/16, batch 64", "ViT-B/16，批大小 64", "hf:vit", "hf:vit-tiny", 64, None),
    "bert": Row("BERT-base, 32 × 128", "BERT-base，32 × 128", "hf:bert", "hf:bert-tiny", 32, 128),
    "resnet50": Row("ResNet-50, batch 64", "ResNet-50，批大小 64", "resnet50", "resnet-tiny", 64, None),
    "t5": Row("T5-base, 16 × 256", "T5-base，16 × 256", f"{__file__}:t5_base", f"{__file__}:t5_tiny", 16, 256),
}


class Cell(NamedTuple):
    """A way to train: its method and number format, the cell it is compared with, and its names on the pages."""

    method: str
    compile: str
    base: str | None
    title: str
    title_zh: str = ""
    dtype: str = "bf16"
    graphed: bool = False


# fastDP cannot run under autocast: it has ordinary training in its own number format beside it.
CELLS = {
    "standard": Cell("standard", "none", None, "ordinary training", "普通训练"),
    "flat": Cell("flat", "none", "standard", "Opacus flat", "Opacus flat"),
    "ghost": Cell("ghost", "none", "standard", "Opacus ghost", "Opacus ghost"),
    "flash": Cell("flash", "none", "standard", "**flash clipping**", "**flash clipping**"),
    "standard graphed": Cell("standard", "none", "standard", "ordinary, CUDA graph", "普通训练，CUDA 图", graphed=True),
    "flash graphed": Cell("flash", "none", "standard", "**flash, CUDA graph**", "**flash，CUDA 图**", graphed=True),
    "standard compiled": Cell("standard", "default", "standard", "ordinary, compiled", "普通训练，编译后"),
    "flash compiled": Cell("flash", "default", "standard compiled", "**flash, compiled**", "**flash，编译后**"),
    "functorch": Cell("functorch", "none", "standard", "Opacus functorch"),
    "standard tf32": Cell("standard", "none", None, "ordinary training, TF32", dtype="tf32"),
    "fastdp tf32": Cell("fastdp", "none", "standard tf32", "fastDP, TF32", dtype="tf32"),
    "opake": Cell("opake", "none", "standard", "opake"),
    "opake compiled": Cell("opake", "default", "standard compiled", "opake, compiled"),
}


# -- workloads ---------------------------------------------------------------------------------------------------------


def t5_base(batch_size: int, seq_len: int) -> Workload:
    return _t5(batch_size, seq_len, {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12})


def t5_tiny(batch_size: int, seq_len: int) -> Workload:
    return _t5(batch_size, seq_len, {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16})


def _t5(batch_size: int, seq_len: int, sizes: dict[str, int]) -> Workload:
    """Return T5 as a workload: an encoder and a decoder that read the same random tokens."""
    import torch
    import torch.nn.functional as F
    from transformers import T5Config, T5ForConditionalGeneration

    from dpscope import Workload

    config = T5Config(**sizes, dropout_rate=0.0)

    def batch(seed: int, device: torch.device) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randint(5, config.vocab_size, (batch_size, seq_len), generator=generator, device=device)

    def loss(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits.transpose(1, 2), ids, reduction="none").mean(1)

    return Workload(model=lambda: T5ForConditionalGeneration(config), batch=batch, loss=loss)


# -- loops -------------------------------------------------------------------------------------------------------------


class Loop:
    """One model and its training step, on the device."""

    def __init__(self, row: Row, cell: Cell, *, tiny: bool) -> None:
        from dpscope.runner.spec import RunSpec
        from dpscope.runner.steps import assemble
        from dpscope.workloads.configs import find_workload, make_config, parse_lora, with_lora

        name = row.tiny if tiny else row.model
        config = find_workload(name) if ":" in name.removeprefix("hf:") else make_config(name)
        if row.sizes and not tiny:
            config = config.resized(**row.sizes)
        if row.lora is not None:
            config = with_lora(config, parse_lora(row.lora))
        spec = RunSpec(
            workload=config,
            method=cell.method,
            compile=cell.compile,
            batch_size=2 if tiny else row.batch,
            seq_len=None if row.length is None else 16 if tiny else row.length,
            dtype="fp32" if (cell.dtype, device()) == ("tf32", "cpu") else cell.dtype,
            cuda_graph=cell.graphed,
            device=device(),
        )
        before = allocated()
        reset_peak()
        self.trainer, self.batches = assemble(spec)
        self.block(WARMUP)
        self.captured_peak = highest() - before if cell.graphed else None
        self.trainer.begin_measuring()
        free()
        self.held = allocated() - before  # bytes between steps

    def block(self, steps: int) -> float:
        """Take steps as training does, one after the other; return milliseconds a step."""
        synchronise()
        start = time.perf_counter()
        for _ in range(steps):
            self.trainer.train_step(*self.batches)
        synchronise()
        return 1e3 * (time.perf_counter() - start) / steps

    def peak(self) -> int | None:
        """Return the peak of two steps of this loop alone, with what it holds between steps; of a graph's capture."""
        if device() == "cpu":
            return None
        if self.captured_peak is not None:
            return self.captured_peak
        reset_peak()
        others = allocated() - self.held
        self.block(2)
        return highest() - others


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if device() == "cuda" else "CPU"


def synchronise() -> None:
    import torch

    if device() == "cuda":
        torch.cuda.synchronize()


def allocated() -> int:
    import torch

    return torch.cuda.memory_allocated() if device() == "cuda" else 0


def highest() -> int:
    """Return the most bytes that were allocated since `reset_peak`."""
    import torch

    return torch.cuda.max_memory_allocated() if device() == "cuda" else 0


def reset_peak() -> None:
    import torch

    if device() == "cuda":
        torch.cuda.reset_peak_memory_stats()


def fill_workspaces() -> None:
    """Have cuBLAS allocate its workspaces, of the forward's and the backward's thread, before a peak is measured."""
    import torch

    if device() == "cuda":
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.ones(64, 64, device="cuda", dtype=dtype, requires_grad=True)
            torch.nn.functional.linear(x @ x, x, x[0]).sum().backward()


def free() -> None:
    import torch

    gc.collect()
    if device() == "cuda":
        torch.cuda.empty_cache()


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
