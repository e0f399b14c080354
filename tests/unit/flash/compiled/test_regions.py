"""The model, or modules inside it, compiled in any order: one graph, the oracle's sums."""

import pytest
import torch
from torch import nn

from dpscope.flash import FlashEngine
from dpscope.flash.contributions import Outer
from tests.unit.flash.agreement import assert_agrees, reference
from tests.unit.flash.compiled.compiling import Graphs, assert_compiled_exact, by_wrapper, in_place
from tests.unit.flash.flash_models import Decoder, token_batch, token_losses

WAYS = {"torch.compile": by_wrapper, "model.compile": in_place}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_compiled_before_is_one_whole_graph_in_every_step(way):
    graphs = assert_compiled_exact(
        Decoder(layers=1), token_batch(4, 6), token_losses, compile=WAYS[way], fullgraph=True, steps=3
    )
    assert graphs.count == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_model_compiled_after_it_was_made_private_is_one_graph(way):
    graphs = assert_compiled_exact(
        Decoder(layers=1, tied=True), token_batch(4, 6), token_losses, compile=WAYS[way], after=True, steps=3
    )
    assert graphs.count == 1


@pytest.mark.parametrize("after", [False, True])
def test_compiled_blocks_share_one_graph_inside_an_eager_model(after):
    model, batch = Decoder(layers=3, tied=True), token_batch(3, 5)
    truth, c = reference(model, batch, token_losses)
    graphs = Graphs()

    def compile_blocks():
        for block in model.blocks:
            block.compile(backend=graphs, fullgraph=True)

    if not after:
        compile_blocks()
    with FlashEngine(model, max_grad_norm=c) as engine:
        if after:
            compile_blocks()
        for _ in range(2):
            engine.zero_grad()
            token_losses(model, batch).mean().backward()
            engine.finish()
        assert_agrees(model, batch, token_losses, engine, truth, c)
    assert graphs.count == 1


def test_wrapped_blocks_inside_an_eager_model_are_exact():
    model, batch = Decoder(layers=2), token_batch(3, 5)
    truth, c = reference(model, batch, token_losses)
    originals, graphs = list(model.blocks), Graphs()
    for index, block in enumerate(originals):
        model.blocks[index] = torch.compile(block, backend=graphs, fullgraph=True)
    with FlashEngine(model, max_grad_norm=c) as engine:
        token_losses(model, batch).mean().backward()
        engine.finish()
        for index, block in enumerate(originals):
            model.blocks[index] = block
        assert_agrees(model, batch, token_losses, engine, truth, c)
    assert graphs.count == 1


def test_a_whole_graph_cannot_hold_a_model_that_is_compiled_after_and_the_error_says_what_to_do():
    model = nn.Sequential(nn.Linear(3, 3))
    with (
        FlashEngine(model, max_grad_norm=1.0),
        pytest.raises(Exception, match=r"torch\.compile first, then make_private"),
    ):
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(2, 3))


def test_detaching_leaves_a_compiled_model_as_it_was():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    before = {name: set(vars(module)) for name, module in compiled.named_modules()}
    x = torch.randn(4, 3)
    with FlashEngine(compiled, max_grad_norm=1.0) as engine:
        compiled(x).sum().backward()
        engine.finish()
    assert {name: set(vars(module)) for name, module in compiled.named_modules()} == before
    compiled.zero_grad()
    compiled(x).sum().backward()
    model_grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    for found, parameter in zip(model_grads, model.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad)


def test_layers_that_read_one_tensor_give_out_one_cast_of_it():
    """Under autocast three copies would be held until the norms are taken."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("first", "q", "k", "v")})

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x):
            x = self.layers["first"](x).float().sin()
            return sum(self.layers[name](x) * scale for scale, name in enumerate("qkv", start=1))

    whole = Heads()
    batch = torch.randn(3, 2, 64)
    sums = []
    for called in (whole, torch.compile(whole, backend=Graphs(), fullgraph=True)):
        with FlashEngine(called, max_grad_norm=0.1) as engine:
            for _ in range(2):
                engine.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = called(batch).float().square().mean()
                loss.backward()
                inputs = {slot.name: part.first for slot, part in engine.contributions() if isinstance(part, Outer)}
                held = len({x.untyped_storage().data_ptr() for name, x in inputs.items() if "first" not in name})
                assert len(inputs) == 4
                assert held == 1
                engine.finish()
            sums.append([parameter.grad.clone() for parameter in whole.parameters()])
            engine.zero_grad()
    torch.testing.assert_close(*sums, rtol=2e-2, atol=2e-4)
    assert engine.graph_cast.source is None
