"""The model, or modules inside it, compiled in any order: one graph, the oracle's sums."""

import gc

import pytest
import torch
from torch import nn

from dpscope.errors import UserError
from dpscope.flash import FlashEngine, PrivacyEngine
from dpscope.flash.compiled import regions
from dpscope.flash.gradients.contributions import Outer
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
    assert engine.graphs.last_cast.source is None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(3, 3)

    def forward(self, x):
        return torch.tanh(self.inside(x))


class DecoratedBlock(Block):
    forward = torch.compile(Block.forward, backend="aot_eager")


class DecoratedScale(nn.Module):
    """Nothing inside it is tapped but itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))

    @torch.compile(backend="aot_eager")
    def forward(self, x):
        return x * self.weight


class UncompiledBlock(Block):
    forward = torch.compiler.disable(Block.forward)


def compile_forward(module):
    module.forward = torch.compile(module.forward, backend="aot_eager")


COMPILED_FORWARDS = {
    "the model": compile_forward,
    "0": lambda model: compile_forward(model[0]),
    "1": lambda model: model.__setitem__(1, DecoratedBlock()),
}


@pytest.mark.parametrize("name", COMPILED_FORWARDS)
def test_a_compiled_forward_is_refused_when_the_engine_attaches_with_what_to_compile_instead(name):
    model = nn.Sequential(Block(), Block())
    COMPILED_FORWARDS[name](model)
    with pytest.raises(UserError, match=rf"the forward of {name} was compiled.*compile the module instead"):
        FlashEngine(model, max_grad_norm=1.0)
    model(torch.randn(2, 3)).sum().backward()  # no tap is left
    assert not PrivacyEngine().is_compatible(module=model)


@pytest.mark.parametrize("path", ["0", "0.inside"])
def test_a_forward_compiled_inside_a_private_model_is_refused_at_the_next_call(path):
    model = nn.Sequential(Block(), Block())
    with FlashEngine(model, max_grad_norm=1.0):
        compile_forward(model.get_submodule(path))
        with pytest.raises(UserError, match=rf"the forward of {path} was compiled.*compile the module instead"):
            model(torch.randn(2, 3))


@pytest.mark.slow
def test_compiled_forwards_that_no_trained_layer_is_called_in_are_exact():
    def losses(model, x):
        return model(x).square().sum(1)

    model, batch = nn.Sequential(Block(), DecoratedScale(), UncompiledBlock(), Block()), torch.randn(4, 3)
    model[3].requires_grad_(False)
    truth, c = reference(model, batch, losses)
    compile_forward(model[3])
    with FlashEngine(model, max_grad_norm=c) as engine:
        losses(model, batch).mean().backward()
        engine.finish()
        del model[3].forward
        assert_agrees(model, batch, losses, engine, truth, c)


@pytest.mark.parametrize("model", [torch.compile(lambda x: x, backend="aot_eager"), 3])
def test_what_is_no_module_is_refused_with_a_sentence(model):
    sentence = "the model must be an nn.Module, but it is a"
    with pytest.raises(UserError, match=sentence):
        FlashEngine(model, max_grad_norm=1.0)
    with pytest.raises(UserError, match=sentence):
        PrivacyEngine().make_private(
            module=model, optimizer=None, data_loader=None, noise_multiplier=1.0, max_grad_norm=1.0
        )
    assert not PrivacyEngine().is_compatible(module=model)


def test_a_model_that_is_compiled_twice_is_exact_or_refused_with_a_sentence():
    """It is a function from torch 2.13 on, and a module within a module before."""
    twice = torch.compile(torch.compile(nn.Sequential(nn.Linear(3, 3)), backend="aot_eager"), backend="aot_eager")
    if isinstance(twice, nn.Module):
        FlashEngine(twice, max_grad_norm=1.0).detach()
    else:
        with pytest.raises(UserError, match="compile it once"):
            FlashEngine(twice, max_grad_norm=1.0)


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def test_more_lengths_hold_no_more_tensors(monkeypatch):
    monkeypatch.setattr(regions, "MOST_PLANS", 2)
    model = nn.Sequential(Block(), Block())
    compiled = torch.compile(model, backend="aot_eager")
    held = []
    # Graphs hold tensors, too, which are torch's: none is made here.
    with FlashEngine(compiled, max_grad_norm=1.0) as engine, torch.compiler.set_stance("force_eager"):
        for length in range(2, 10):
            engine.zero_grad()
            compiled(torch.randn(3, length, 3)).square().mean().backward()
            engine.finish()
            held.append(live_tensors())
    assert held[-1] <= held[3]


def test_a_pass_whose_plan_is_let_go_before_backward_is_exact(monkeypatch):
    monkeypatch.setattr(regions, "MOST_PLANS", 1)

    def losses(model, batch):
        return sum(model(batch[key]).square().flatten(1).sum(1) for key in ("a", "b", "c", "a"))

    batch = {key: torch.randn(4, length, 3) for length, key in enumerate("abc", start=2)}
    assert_compiled_exact(nn.Sequential(Block(), Block()), batch, losses, steps=2)
