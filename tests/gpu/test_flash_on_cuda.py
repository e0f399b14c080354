"""Flash clipping on a GPU, where its Triton kernels run: held against micro-batches of one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpscope.flash import FlashEngine, run_oracle
from dpscope.runner.spec import RunSpec
from dpscope.runner.steps import make_trainer
from dpscope.workloads.configs import make_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES = {"vocab_size": 512, "hidden_dim": 256, "num_layers": 2, "num_heads": 4, "max_seq_len": 512}


class Decoder(nn.Module):
    """Embedding, a gated block, a head that may share the embedding's weight."""

    def __init__(self, *, tied: bool, vocabulary: int = 512) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, 256)
        self.norm = nn.LayerNorm(256)
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)
        self.head = nn.Linear(256, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(x)


def token_losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten(), reduction="none").view_as(batch[1]).mean(1)


def batch_of(size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, 512, (size, length + 1), device="cuda")
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    want = want.to(got.device).double()
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("size", "length"), [(1, 300), (4, 128), (6, 77)])
@pytest.mark.parametrize("path", [None, "gram", "direct", "keep"])
def test_float32_agrees_with_micro_batches_of_one(tied: bool, size: int, length: int, path: str | None) -> None:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    model, batch = Decoder(tied=tied).cuda(), batch_of(size, length)
    oracle = run_oracle(model, batch, lambda m, b: token_losses(m, b).mean(), max_grad_norm=0.5)
    with FlashEngine(model, max_grad_norm=0.5, path=path) as engine:
        token_losses(model, batch).mean().backward()
        engine.finish()
    assert relative(engine.norms, oracle.norms) < 1e-5
    for name, parameter in model.named_parameters():
        # float32 products in another order: 1e-5 of the parameter's gradient
        assert relative(parameter.grad, oracle.clipped_sums[name]) < 1e-5, name


@pytest.mark.parametrize(("size", "length"), [(1, 300), (8, 256), (5, 100), (70, 32)])
def test_bfloat16_agrees_to_the_rounding_of_bfloat16(size: int, length: int) -> None:
    torch.manual_seed(0)
    model, batch = Decoder(tied=False).cuda(), batch_of(size, length)

    def loss(m: nn.Module, b: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return token_losses(m, b).mean()

    oracle = run_oracle(model, batch, loss, max_grad_norm=0.5)
    with FlashEngine(model, max_grad_norm=0.5) as engine:
        loss(model, batch).backward()
        engine.finish()
    assert relative(engine.norms, oracle.norms) < 5e-3
    for name, parameter in model.named_parameters():
        assert relative(parameter.grad, oracle.clipped_sums[name]) < 2e-2, name  # a few roundings of 2^-9


def test_a_sample_that_is_not_finite_contributes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)).cuda()
    x = torch.randn(6, 32, 64, device="cuda")

    def clipped(x: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        with FlashEngine(model, max_grad_norm=0.1, loss_reduction="sum") as engine:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x).float().square().mean((1, 2)).sum()
            loss.backward()
            engine.finish()
            assert engine.nonfinite_samples is not None
            return [*(p.grad.clone() for p in model.parameters()), engine.nonfinite_samples]

    whole = x.clone()
    whole[2] = float("nan")
    *with_nan, dropped = clipped(whole)
    *without, _ = clipped(torch.cat([x[:2], x[3:]]))
    assert dropped.item() == 1
    for a, b in zip(with_nan, without, strict=True):
        assert relative(a, b) < 1e-3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clipping": "per_layer"},
        {"clipping": "per_layer", "checkpoint_blocks": True, "memory_budget": "lean"},
        {"checkpoint_blocks": True},
    ],
)
def test_nothing_waits_for_the_device_in_a_step(options: dict[str, Any]) -> None:
    spec = RunSpec(
        workload=make_config("tiny", **SIZES),
        method="flash",
        batch_size=4,
        seq_len=256,
        dtype="bf16",
        device="cuda",
        **options,
    )
    trainer, batch = make_trainer(spec)
    for _ in range(2):
        trainer.train_step(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.train_step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_without_noise_or_clipping_flash_steps_where_standard_steps(dtype: str) -> None:
    """With a clip norm nobody reaches, the private step is the ordinary one, fused update included."""
    ends = {}
    for method in ("standard", "flash"):
        spec = RunSpec(
            workload=make_config("tiny", **SIZES),
            method=method,
            batch_size=4,
            seq_len=256,
            dtype=dtype,
            device="cuda",
            noise_multiplier=0.0,
            max_grad_norm=1e6,
            learning_rate=1e-3,
            optimizer="sgd",
        )
        trainer, batch = make_trainer(spec)
        start = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.train_step(batch)
        ends[method] = torch.cat([(p - s).flatten() for p, s in zip(trainer.model.parameters(), start, strict=True)])
    assert relative(ends["flash"], ends["standard"]) < (1e-3 if dtype == "fp32" else 2e-2)


class MaskedAttention(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)
        self.register_buffer("mask", torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x, x, attn_mask=self.mask, need_weights=False)[0].square().sum((1, 2))


@pytest.mark.parametrize("length", [3, 8, 33])
@pytest.mark.parametrize("size", [1, 4])
def test_attention_with_a_mask_of_any_length_is_clipped_exactly(size: int, length: int) -> None:
    torch.manual_seed(0)
    model = MaskedAttention(length).cuda()
    x = torch.randn(size, length, 8, device="cuda")
    truth = run_oracle(model, x, lambda model, x: model(x).sum(), max_grad_norm=1.0, dtype=torch.float64)
    with FlashEngine(model, max_grad_norm=1.0, loss_reduction="sum") as engine:
        model(x).sum().backward()
        engine.finish()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad.double(),
            truth.clipped_sums[name],
            rtol=1e-4,
            atol=1e-6,
            msg=lambda text, name=name: name + text,
        )


# -- memory and precision ----------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Linear layers whose activations are large beside what a loss needs, kept or not as memory allows."""

    def __init__(self, width: int = 1024, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.back = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, back in zip(self.layers, self.back, strict=True):
            x = x + back(F.gelu(layer(x)))
        return x


def peak_of_steps(engine: FlashEngine | None, model: nn.Module, x: torch.Tensor, steps: int = 4) -> int:
    """Of the last step, in bytes above what is there all the time. Sums are dropped as an update would."""
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        gc.collect()  # what other tests left would be freed inside the step
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        if engine is not None:
            for batch in engine.factored_sums():
                del batch
        peak = torch.cuda.max_memory_allocated() - before
        del loss
    return peak


@pytest.mark.parametrize(("size", "length"), [(2, 4096), (4, 2048), (8, 1024), (16, 512)])
def test_kept_gradients_do_not_raise_the_peak_above_that_of_ordinary_training(size: int, length: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(size, length, 1024, device="cuda")
    ordinary = peak_of_steps(None, model := Wide().cuda(), x)
    kept = {}
    for budget in (None, "lean", 10**12):
        with FlashEngine(model, max_grad_norm=1.0, memory_budget=budget) as engine:
            peak = peak_of_steps(engine, model, x)
            kept[budget] = sum(row.path == "keep" for row in engine.explain() if row.kind == "outer")
        if budget is None:
            assert peak <= 1.01 * ordinary
    assert kept["lean"] <= kept[None] <= kept[10**12]
    if length >= 1024:
        assert kept[None] > 0


@pytest.mark.parametrize("budget", [None, "lean", 10**12])
@pytest.mark.parametrize(("size", "length"), [(3, 2048), (8, 1024), (6, 77)])
def test_bfloat16_is_exact_whatever_memory_allows(size: int, length: int, budget: int | str | None) -> None:
    """Norms of the values that are summed: the sum of one clipped sample has norm C, to the rounding of float32."""
    torch.manual_seed(0)
    model, c = Wide(256, 2).cuda(), 1e-3
    x = torch.randn(size, length, 256, device="cuda")
    x[1:] = x[0]  # the same sample throughout
    with FlashEngine(model, max_grad_norm=c, memory_budget=budget, loss_reduction="sum") as engine:
        for _ in range(2):
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x).float().square().mean((1, 2)).sum()
            loss.backward()
            engine.finish()
    total = torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm().item()
    assert total == pytest.approx(size * c, rel=1e-4)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("path", [None, "gram", "direct", "keep"])
def test_a_vocabulary_that_no_word_divides(path: str | None, tied: bool, half: torch.dtype) -> None:
    """Its gradient gets aligned rows, with columns beyond the last whole word: each sample counts C."""
    torch.manual_seed(0)
    model, c, size = Decoder(tied=tied, vocabulary=1027).cuda(), 1e-3, 5
    ids = torch.randint(0, 1027, (1, 301), device="cuda").expand(size, -1)
    ids = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    truth = run_oracle(model, ids, lambda m, b: token_losses(m, b).sum(), max_grad_norm=c)
    model.zero_grad()
    with FlashEngine(model, max_grad_norm=c, loss_reduction="sum", path=path) as engine:
        with torch.autocast("cuda", half):
            (1024 * token_losses(model, ids).sum()).backward()  # float16 would lose small gradients
        engine.finish()
    total = torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm().item()
    assert total == pytest.approx(size * c, rel=1e-4)
    for name, parameter in model.named_parameters():
        assert relative(parameter.grad, truth.clipped_sums[name]) < 3e-2, name


@pytest.fixture
def tf32() -> Iterator[None]:
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("path", [None, "gram", "direct", "keep"])
@pytest.mark.parametrize("budget", ["lean", 10**12])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_tf32_norms_are_of_the_products_that_are_summed(path: str | None, budget: int | str, size: int) -> None:
    """Positions cancel but for 1/1000: TF32 moves what is left a great deal, in the norm and in the sum alike."""
    torch.manual_seed(0)
    model, c, length = nn.Linear(256, 512, bias=False).cuda(), 1e-3, 512
    x = torch.randn(size, length // 2, 256, device="cuda").repeat_interleave(2, 1)
    g = torch.randn(size, length // 2, 512, device="cuda").repeat_interleave(2, 1)
    sizes = torch.rand(size, length // 2, 1, device="cuda") + 0.5
    x[:, 1::2] *= 1.001 / sizes
    g[:, 1::2] *= -sizes
    g[1:] = 0.0
    with FlashEngine(model, max_grad_norm=c, path=path, memory_budget=budget, loss_reduction="sum") as engine:
        (model(x) * g).sum().backward()
        engine.finish()
    total = model.weight.grad.double().norm().item()
    assert total <= c * (1 + 1e-3)
    if engine.explain()[0].path != "gram":  # whose norm of what cancels is over-estimated
        assert total == pytest.approx(c, rel=1e-3)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("path", [None, "gram", "direct", "keep"])
def test_tf32_agrees_to_the_rounding_of_tf32(tied: bool, path: str | None) -> None:
    torch.manual_seed(0)
    model, batch = Decoder(tied=tied).cuda(), batch_of(4, 128)
    oracle = run_oracle(model, batch, lambda m, b: token_losses(m, b).mean(), max_grad_norm=0.5)
    with FlashEngine(model, max_grad_norm=0.5, path=path) as engine:
        token_losses(model, batch).mean().backward()
        engine.finish()
    assert relative(engine.norms, oracle.norms) < 2e-3
    for name, parameter in model.named_parameters():
        assert relative(parameter.grad, oracle.clipped_sums[name]) < 5e-3, name
