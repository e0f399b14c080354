"""Ways to lose, or to count twice, what a layer leaves in a compiled graph: each is exact, or an error that says so."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from dpscope.flash.compiled.traced import Traced

B, D = 4, 5
CLIP = 0.3


class Model(nn.Module):
    """`between` is called between two layers, `times` says how often the second one is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D)
        self.head, self.spare = nn.Linear(D, 3, bias=False), nn.Linear(D, 3)
        self.between: Callable[[Tensor], Tensor] = torch.tanh
        self.times = 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.norm(self.first(x)))
        for _ in range(self.times):
            x = torch.tanh(self.second(x))
        return self.head(x)


def made() -> Model:
    torch.manual_seed(0)
    return Model()


def compiled(model: nn.Module, **options) -> nn.Module:
    return torch.compile(model, backend="aot_eager", **options)


def batch(size: int = B, seed: int = 1) -> Tensor:
    return torch.randn(size, 7, D, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, x: Tensor) -> None:
    model(x).square().sum((1, 2)).mean().backward()


def sums(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: name + text)


def assert_as_eager(run: Callable[[nn.Module, Model, FlashEngine], None], **options) -> None:
    """`run(called, model, engine)` leaves the same sums whether `called` is compiled or not."""
    found = []
    for wrap in (lambda model: model, lambda model: compiled(model, **options)):
        model = made()
        called = wrap(model)
        with FlashEngine(called, max_grad_norm=CLIP) as engine:
            run(called, model, engine)
            engine.finish()
            found.append(sums(model))
    assert_same(found[1], found[0])


# -- other code in the graph -------------------------------------------------------------------------------------------


def test_a_graph_that_breaks_between_layers():
    def run(called, model, engine):
        model.between = broken
        step(called, batch())

    def broken(x):
        torch._dynamo.graph_break()
        return x.tanh()

    assert_as_eager(run)


def test_a_layer_that_the_user_keeps_out_of_the_graph():
    def run(called, model, engine):
        model.between = torch.compiler.disable(lambda x: model.spare(x)[..., :1] + x)
        step(called, batch())

    assert_as_eager(run)


def test_a_hook_on_a_layer():
    def run(called, model, engine):
        model.second.register_forward_hook(lambda module, args, output: output * 3)
        step(called, batch())

    assert_as_eager(run)


def test_a_head_that_takes_no_part_in_the_loss():
    def run(called, model, engine):
        model.between = lambda x: x + 0 * model.spare(x).detach().sum()
        step(called, batch())

    assert_as_eager(run)


# -- graphs from before, and graphs that are not there -----------------------------------------------------------------


def test_a_graph_that_was_compiled_before_the_engine_was_attached():
    model, twin = made(), made()
    called = compiled(model)
    step(called, batch())
    model.zero_grad()
    for each in (called, twin):
        with FlashEngine(each, max_grad_norm=CLIP) as engine:
            step(each, batch())
            engine.finish()
    assert_same(sums(model), sums(twin))


def test_graphs_of_evaluation_and_of_training_in_turns():
    def run(called, model, engine):
        for _ in range(2):
            with torch.no_grad():
                called(batch())
            model.eval()
            with torch.no_grad():
                called(batch(3))
            model.train()
            step(called, batch())

    assert_as_eager(run)


def test_a_stance_that_runs_no_graph():
    def run(called, model, engine):
        step(called, batch(seed=2))
        with torch.compiler.set_stance("force_eager"):
            step(called, batch())

    assert_as_eager(run)


def test_a_compiler_that_fails_and_is_let_fail():
    def fails(graph, inputs):
        raise RuntimeError("no such operator")

    model, twin = made(), made()
    called = torch.compile(model, backend=fails)
    with torch._dynamo.config.patch(suppress_errors=True):
        for each in (called, twin):
            with FlashEngine(each, max_grad_norm=CLIP) as engine:
                step(each, batch())
                engine.finish()
    assert_same(sums(model), sums(twin))


def test_graphs_that_are_forgotten_between_forward_and_backward():
    def run(called, model, engine):
        loss = called(batch()).square().sum((1, 2)).mean()
        torch._dynamo.reset()
        loss.backward()
        step(called, batch(seed=2))

    assert_as_eager(run)


def test_more_shapes_than_torch_compiles_graphs_for():
    def run(called, model, engine):
        for size in (4, 3, 2, 1, 4):
            step(called, batch(size))

    with torch._dynamo.config.patch(recompile_limit=1):
        assert_as_eager(run, dynamic=False)


def test_batches_of_any_size_one_sample_and_none():
    def run(called, model, engine):
        for size in (4, 6, 3, 1, 0, 5):
            step(called, batch(size))

    assert_as_eager(run)


# -- the model changes -------------------------------------------------------------------------------------------------


def test_a_module_that_is_replaced_is_not_taken_for_the_old_one():
    def run(called, model, engine):
        step(called, batch())
        torch.manual_seed(3)
        model.head = nn.Linear(D, 2).requires_grad_(False)
        step(called, batch())

    assert_as_eager(run)


def test_a_parameter_that_is_replaced_is_refused():
    model = made()
    called = compiled(model)
    with FlashEngine(called, max_grad_norm=CLIP):
        step(called, batch())
        model.second.weight = nn.Parameter(torch.zeros(D, D))
        with pytest.raises(UserError, match=r"second\.weight was replaced"):
            step(called, batch())


def test_parameters_that_are_frozen_and_thawed_between_steps():
    def run(called, model, engine):
        for frozen in ("first.weight", "second.bias"):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name != frozen)
            step(called, batch())
        model.requires_grad_(True)
        step(called, batch())

    assert_as_eager(run)


def test_a_layer_that_is_skipped_or_called_again_in_some_step():
    def run(called, model, engine):
        for times in (1, 0, 3):
            model.times = times
            step(called, batch())

    assert_as_eager(run)


def test_a_copy_of_a_compiled_private_model_is_an_ordinary_one():
    model = made()
    called = compiled(model)
    with FlashEngine(called, max_grad_norm=CLIP) as engine:
        step(called, batch())
        engine.finish()
        before = sums(model)
        twin = copy.deepcopy(called)
        twin.zero_grad()
        step(twin, batch())
        assert not engine.pending
        assert_same(sums(model), before)
    plain = made()
    step(plain, batch())
    assert_same({name.removeprefix("_orig_mod."): total for name, total in sums(twin).items()}, sums(plain))


def test_a_compiled_model_that_has_an_engine_takes_no_second_one():
    called = compiled(made())
    with FlashEngine(called, max_grad_norm=CLIP), pytest.raises(UserError, match="already has a FlashEngine"):
        FlashEngine(called, max_grad_norm=CLIP)


def test_the_module_inside_the_wrapper_may_be_called_itself():
    def run(called, model, engine):
        step(called, batch())
        step(model, batch(seed=2))

    assert_as_eager(run)


# -- passes ------------------------------------------------------------------------------------------------------------


def test_two_forward_passes_before_one_backward_stay_apart():
    def run(called, model, engine):
        losses = called(batch()).square().sum((1, 2)) + called(batch(seed=2)).sum((1, 2))
        losses.mean().backward()

    assert_as_eager(run)


def test_two_backward_passes_through_one_forward():
    def run(called, model, engine):
        y = called(batch())
        y.square().sum((1, 2)).mean().backward(retain_graph=True)
        y.sum((1, 2)).mean().backward()

    with torch._functorch.config.patch(donated_buffer=False):
        assert_as_eager(run)


def test_gradients_of_inputs_alone_leave_nothing():
    def run(called, model, engine):
        x = batch().requires_grad_()
        y = called(x)
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert not engine.pending
        y.square().sum((1, 2)).mean().backward()

    with torch._functorch.config.patch(donated_buffer=False):
        assert_as_eager(run)


def test_a_graph_whose_samples_are_summed_is_not_run_again():
    called = compiled(made())
    with FlashEngine(called, max_grad_norm=CLIP), torch._functorch.config.patch(donated_buffer=False):
        loss = called(batch()).square().sum((1, 2)).mean()
        loss.backward(retain_graph=True)
        called(batch())
        with pytest.raises(UserError, match="already clipped and summed"):
            loss.backward()


def test_gradients_of_gradients_are_refused():
    called = compiled(made())
    with (
        FlashEngine(called, max_grad_norm=CLIP),
        torch._functorch.config.patch(donated_buffer=False),
        pytest.raises(UserError, match="create_graph"),
    ):
        called(batch()).sum().backward(create_graph=True)


def test_batches_that_are_accumulated():
    def run(called, model, engine):
        for seed in (1, 2, 3):
            step(called, batch(seed=seed))

    assert_as_eager(run)


# -- what leaves the graph ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["every piece", "one piece"])
def test_a_piece_that_the_compiler_loses_is_an_error_that_names_the_layer(monkeypatch, lost):
    whole = Traced.backward

    def losing(ctx, g):
        first, dx, third, fourth, *pieces = whole(ctx, g)
        if g.shape[-1] == 3:  # of the head
            pieces = [None] * len(pieces) if lost == "every piece" else [None, *pieces[1:]]
        return first, dx, third, fourth, *pieces

    monkeypatch.setattr(Traced, "backward", staticmethod(losing))
    called = compiled(made())
    with FlashEngine(called, max_grad_norm=CLIP), pytest.raises(UserError, match="head was called in a compiled graph"):
        step(called, batch())


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(D, D), 1

    def block(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def test_two_calls_that_a_compiled_checkpoint_adds_up_are_refused():
    model = Checkpointed()
    called = compiled(model)
    with FlashEngine(called, max_grad_norm=CLIP):
        step(called, batch())
        model.times = 2  # the shapes say nothing of it
        with pytest.raises(UserError, match="layer was called 2 times in a compiled checkpoint"):
            step(called, batch())


def test_two_layers_that_are_given_one_gradient_do_not_share_what_they_leave():
    def run(called, model, engine):
        model.between = lambda x: (
            model.spare(x).sum(-1, keepdim=True) + model.spare(x.flip(1)).sum(-1, keepdim=True) + x
        )
        step(called, batch())
        step(called, batch(seed=2))

    assert_as_eager(run)
