"""Compiled private training on a GPU, by Inductor and by CUDA graphs: held against micro-batches of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpscope.errors import UserError
from dpscope.flash import FlashEngine, run_oracle

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MODES = ("default", "reduce-overhead")
WIDTH, VOCABULARY = 256, 1027  # no 16-byte word divides it
Batch = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def _fresh_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # Inductor and cuDNN round operands differently
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=name in "qv") for name in ("q", "k", "v", "o"))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, layers: int = 2, *, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device).unsqueeze(0))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Pictures(nn.Module):
    """Its first layer reads the caller's own tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm, self.conv2 = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv2(F.gelu(self.norm(self.conv1(x))))
        return self.head(x.mean((2, 3))).unsqueeze(1)


def losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten(), reduction="none").view_as(batch[1]).mean(1)


def tokens(size: int, length: int, seed: int = 1) -> Batch:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (size, length + 1), device="cuda", generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def pictures(size: int, seed: int = 1) -> Batch:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    labels = torch.randint(0, VOCABULARY, (size, 1), device="cuda", generator=generator)
    return torch.randn(size, 3, 16, 16, device="cuda", generator=generator), labels


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    want = want.to(got.device).double()
    return ((got.double() - want).norm() / want.norm()).item()


def clipped_sums(model: nn.Module, batches: list[Batch], *, autocast: bool = False) -> dict[str, torch.Tensor]:
    totals: dict[str, torch.Tensor] = {}

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            return losses(model, batch).mean()

    for batch in batches:
        for name, total in run_oracle(model, batch, loss, max_grad_norm=0.5).clipped_sums.items():
            totals[name] = totals[name] + total if name in totals else total
    return totals


def compiled_sums(
    model: nn.Module, batches: list[Batch], mode: str, *, autocast: bool = False, after: bool = False, steps: int = 4
) -> dict[str, torch.Tensor]:
    """Of the last of several steps: graphs are recorded in the first ones, and replayed."""
    called = model if after else torch.compile(model, mode=mode, fullgraph=True)
    with FlashEngine(called, max_grad_norm=0.5) as engine:
        called = torch.compile(model, mode=mode) if after else called
        for _ in range(steps):
            engine.zero_grad()
            for batch in batches:
                with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                    loss = losses(called, batch).mean()
                loss.backward()
            engine.finish()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_transformer_in_float32_agrees_with_micro_batches_of_one(mode: str, after: bool) -> None:
    model, batch = Decoder(tied=after).cuda(), tokens(4, 128)
    truth = clipped_sums(model, [batch])
    for name, total in compiled_sums(model, [batch], mode, after=after).items():
        assert relative(total, truth[name]) < 1e-5, name


@pytest.mark.parametrize("mode", MODES)
def test_what_the_caller_gave_is_read_before_a_graph_runs_again(mode: str) -> None:
    model, batch = Pictures().cuda(), pictures(6)
    truth = clipped_sums(model, [batch])
    for name, total in compiled_sums(model, [batch], mode).items():
        assert relative(total, truth[name]) < 1e-5, name


@pytest.mark.parametrize("mode", MODES)
def test_two_batches_a_step_are_summed_before_a_graph_overwrites_the_first(mode: str) -> None:
    model = Decoder().cuda()
    batches = [tokens(4, 64, seed) for seed in (1, 2)]
    truth = clipped_sums(model, batches)
    for name, total in compiled_sums(model, batches, mode).items():
        assert relative(total, truth[name]) < 1e-5, name


@pytest.mark.parametrize("mode", MODES)
def test_under_autocast_a_compiled_transformer_agrees_to_the_rounding_of_bfloat16(mode: str) -> None:
    model, batch = Decoder().cuda(), tokens(8, 128)
    truth = clipped_sums(model, [batch], autocast=True)
    for name, total in compiled_sums(model, [batch], mode, autocast=True).items():
        assert relative(total, truth[name]) < 2e-2, name  # a few roundings of 2^-9


def test_nothing_waits_for_the_device_in_a_compiled_step() -> None:
    model, batch = Decoder().cuda(), tokens(4, 128)
    compiled = torch.compile(model, fullgraph=True)
    with FlashEngine(compiled, max_grad_norm=0.5) as engine:
        for watched in (False, False, True):
            engine.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if watched else "default")
            try:
                losses(compiled, batch).mean().backward()
                engine.finish()
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_a_private_forward_is_not_captured_by_hand() -> None:
    model = nn.Linear(8, 8).cuda()
    x = torch.randn(4, 8, device="cuda")
    with FlashEngine(model, max_grad_norm=0.5):
        model(x)
        with (
            pytest.raises(UserError, match="captured in a CUDA graph by hand"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            model(x)
