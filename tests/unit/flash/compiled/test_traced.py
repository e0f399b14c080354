"""Every family of layers in a graph: exact, under autocast too, and whole where nothing runs sample by sample."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpscope.errors import UserError
from dpscope.flash import FlashEngine, LayerTap
from dpscope.flash import layers as families
from dpscope.flash.padding.rows import Rows, mark_batch
from tests.compiled_here import inductor_links
from tests.unit.flash.compiled.compiling import assert_compiled_exact
from tests.unit.flash.flash_models import Decoder, EveryFamily, LlamaRMSNorm, randomised, token_batch, token_losses

pytestmark = pytest.mark.usefixtures("fresh_graphs")

BATCH = 4


class Conv1D(nn.Module):
    """Hugging Face's, by its published code."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, out: int, width: int) -> None:
        super().__init__()
        self.nf, self.weight, self.bias = out, nn.Parameter(torch.randn(width, out)), nn.Parameter(torch.randn(out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.size()[:-1], self.nf)


class Features(nn.Module):
    """Linear layers, biased or not, of one and of many positions, a layer called twice, and normalisations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1d, self.llama, self.norm = Conv1D(6, 5), randomised(LlamaRMSNorm(6)), randomised(nn.RMSNorm(6))
        self.twice, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)
        self.one, self.dropout = nn.Linear(6, 4, bias=False), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.llama(self.conv1d(x)))
        x = self.twice(torch.tanh(self.frozen(self.twice(x))))
        return self.one(self.dropout(x).mean(1))


class Volumes(nn.Module):
    """Convolutions of each kind, padded in each way, grouped, strided, with group and instance normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.three, self.two = nn.Conv3d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding="same", groups=2)
        self.one = nn.Conv1d(4, 4, 2, stride=2, padding=1, padding_mode="circular", bias=False)
        self.groups, self.instances = nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.groups(self.three(x)).mean(2)
        x = self.instances(torch.relu(self.two(x))).flatten(2)
        return self.one(x)


class Checkpointed(Decoder):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]).unsqueeze(0))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().flatten(1).sum(1)


CASES = {
    "features": (Features, lambda: {"x": torch.randn(BATCH, 3, 5)}, squares),
    "volumes": (Volumes, lambda: {"x": torch.randn(BATCH, 2, 3, 4, 4)}, squares),
    "checkpoints": (lambda: Checkpointed(layers=1), lambda: token_batch(BATCH, 6), token_losses),
}


@pytest.mark.parametrize("case", CASES)
def test_a_family_is_held_whole_and_exact(case):
    model, batch, losses = CASES[case]
    assert assert_compiled_exact(model(), batch(), losses, fullgraph=True).count == 1


def test_modules_that_run_sample_by_sample_break_the_graph_and_nothing_else_does():
    model, batch = EveryFamily(), {"ids": torch.randint(0, 5, (3, 4))}
    graphs = assert_compiled_exact(model, batch, lambda model, batch: model(batch["ids"]).square().sum((1, 2)), steps=1)
    assert graphs.count > 1


def test_a_recurrent_layer_breaks_the_graph_and_is_exact():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.recurrent, self.last = nn.Linear(3, 4), nn.GRU(4, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.recurrent(torch.tanh(self.first(x)))[0])

    assert_compiled_exact(Recurrent(), {"x": torch.randn(3, 4, 3)}, squares)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 5), nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)))


class Shifted(nn.Module):
    """A parameter of its own, and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(1, 3, 5))
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shift
        for block in self.blocks:
            x = block(x)
        return x


def test_a_model_with_a_parameter_of_its_own_runs_eagerly_and_is_exact():
    assert assert_compiled_exact(Shifted(), {"x": torch.randn(BATCH, 3, 5)}, squares).count == 0


def test_the_blocks_of_a_model_with_a_parameter_of_its_own_share_one_graph():
    def compile_blocks(model: nn.Module, **options) -> nn.Module:
        for block in model.blocks:
            block.compile(**options)
        return model

    graphs = assert_compiled_exact(
        Shifted(), {"x": torch.randn(BATCH, 3, 5)}, squares, compile=compile_blocks, fullgraph=True
    )
    assert graphs.count == 1


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class ScaleByBackward(LayerTap):
    names = ("bias",)

    def forward(self, ctx, x):
        return self.original(x)

    def backward(self, ctx, g):
        self.keep(0, g.sum(1))
        return g


class ScaleByGradients(LayerTap):
    names = ("bias",)

    def forward(self, ctx, x):
        return self.original(x)

    def gradients(self, ctx, g):
        return g, g.sum(1)


@pytest.mark.parametrize(("tap", "graphs"), [(ScaleByBackward, 2), (ScaleByGradients, 1)])
def test_a_registered_layer_is_exact_and_breaks_the_graph_only_if_it_says_backward(tap, graphs, monkeypatch):
    monkeypatch.setattr(families, "_FAMILIES", {**families._FAMILIES, Scale: tap})
    model = nn.Sequential(nn.Linear(5, 5), Scale(), nn.Tanh(), nn.Linear(5, 2))
    assert assert_compiled_exact(model, {"x": torch.randn(BATCH, 3, 5)}, squares).count == graphs


@pytest.mark.parametrize("build", [lambda: Decoder(layers=1, tied=True), lambda: Checkpointed(layers=1)])
def test_half_precision_of_autocast_is_that_of_eager_steps(build):
    def sums(*, compiled: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model, batch = build(), token_batch(BATCH, 6)
        called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        with FlashEngine(called, max_grad_norm=0.3, path="gram") as engine:
            with torch.autocast("cpu", torch.bfloat16):
                loss = token_losses(called, batch).float().mean()
            loss.backward()
            engine.finish()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    eager = sums(compiled=False)
    for name, total in sums(compiled=True).items():
        torch.testing.assert_close(total, eager[name], rtol=1e-4, atol=1e-6)  # operands are rounded alike


class OwnAutocast(nn.Module):
    """Decides itself whether it computes in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.half, self.first, self.last = True, nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            return self.last(torch.tanh(self.first(x)))


def test_a_forward_that_leaves_half_precision_later_gives_the_sums_of_eager_steps():
    """Stand-ins of half precision would round what float32 layers leave."""

    def sums(*, compiled: bool) -> list[dict[str, Tensor]]:
        torch.manual_seed(0)
        model, found = OwnAutocast(), []
        called = torch.compile(model, backend="aot_eager") if compiled else model
        with FlashEngine(called, max_grad_norm=0.3) as engine:
            for model.half in (True, False, True, False):
                model.zero_grad()
                called(torch.ones(BATCH, 6)).float().square().sum(1).mean().backward()
                engine.finish()
                found.append({name: parameter.grad for name, parameter in model.named_parameters()})
        return found

    for eager, compiled in zip(sums(compiled=False), sums(compiled=True), strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("breaks", [False, True])
def test_a_tensor_that_is_written_into_between_two_layers_is_cast_again(breaks):
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.sin(x)
            first, same = self.layers[0](x), self.layers[1](x)
            x.mul_(3.0)
            if breaks:
                torch._dynamo.graph_break()
            second = self.layers[2](x)
            x.view(-1).add_(1.0)
            return torch.tanh(first) + torch.tanh(same) + torch.tanh(second) + self.layers[3](x)

    def norms(*, compiled: bool) -> Tensor:
        torch.manual_seed(0)
        model, x = Written(), torch.randn(BATCH, 3, 6)
        called = torch.compile(model, backend="aot_eager") if compiled else model
        with FlashEngine(called, max_grad_norm=0.3, path="gram") as engine:
            with torch.autocast("cpu", torch.bfloat16):
                loss = called(x).float().square().sum((1, 2)).mean()
            loss.backward()
            engine.finish()
        return engine.norms

    torch.testing.assert_close(norms(compiled=True), norms(compiled=False))


@pytest.mark.parametrize("after", [False, True])
def test_padded_rows_are_nobodys_in_a_graph(after):
    def sums(x: Tensor, *, compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 3))
        called = torch.compile(model, backend="aot_eager") if compiled and not after else model
        with FlashEngine(called, max_grad_norm=0.3, loss_reduction="sum") as engine:
            called = torch.compile(model, backend="aot_eager") if compiled and after else called
            called(x).square().sum().backward()
            engine.finish()
        return [parameter.grad for parameter in model.parameters()]

    x = torch.randn(6, 2, 5)
    padded = mark_batch(x.clone(), Rows(4, 6))
    for found, expected in zip(sums(padded, compiled=True), sums(x[:4], compiled=False), strict=True):
        torch.testing.assert_close(found, expected)


def test_samples_that_mix_are_refused_before_anything_is_compiled():
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.last(x - x.mean(0, keepdim=True))

    called = torch.compile(Mixing(), backend="aot_eager")
    with FlashEngine(called, max_grad_norm=1.0), pytest.raises(UserError, match="samples"):
        called(torch.randn(BATCH, 3))


@pytest.mark.slow
@inductor_links
def test_inductors_kernels_agree_with_micro_batches_of_one():
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm, self.linear = nn.Embedding(7, 6), nn.LayerNorm(6), nn.Linear(6, 6)
            self.conv, self.head = nn.Conv1d(3, 4, 2), nn.Linear(5, 2)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.conv(self.linear(self.norm(self.table(ids))))))

    batch = {"x": torch.randint(0, 7, (BATCH, 3))}
    assert assert_compiled_exact(Small(), batch, squares, backend="inductor", fullgraph=True).count == 1
