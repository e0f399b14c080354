"""The engine on whole models: the same norms, factors and clipped sums as micro-batches of one."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash import FlashEngine, run_oracle
from dpscope.flash.gradients.contributions import Outer
from tests.torch_here import takes_compiled
from tests.unit.flash.agreement import (
    CLIPPING,
    PATHS,
    REDUCTIONS,
    assert_agrees,
    assert_exact,
    one_loss,
    private_step,
    reference,
)
from tests.unit.flash.flash_models import Decoder, sine_losses, token_batch, token_losses
from tests.unit.flash.small_models import assert_close, gradients, mlp


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tied", [False, True])
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 5),
    length=st.integers(1, 8),
    clipping=st.sampled_from(CLIPPING),
    reduction=st.sampled_from(REDUCTIONS),
    norm=st.sampled_from([nn.LayerNorm, nn.RMSNorm]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_a_decoder_gets_the_oracles_clipped_sums(path, tied, batch, length, clipping, reduction, norm, dtype):
    model = Decoder(tied=tied, norm=norm).to(dtype)
    assert_exact(
        model, token_batch(batch, length), token_losses, clipping=clipping, loss_reduction=reduction, path=path
    )


def rounds_products() -> bool:
    """Return whether this CPU rounds the operands of float32 products, where torch is allowed to."""
    a = torch.rand(64, 64)
    return not torch.allclose(a @ a, (a.double() @ a.double()).float(), rtol=1e-5)


@pytest.fixture(params=["high", "medium"])
def allowed_precision(request):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("path", PATHS)
def test_a_cpu_that_may_round_its_products_and_does_not_gets_the_oracles_clipped_sums(path, allowed_precision):
    if rounds_products():  # CPUs with instructions for products of bf16
        pytest.skip("this CPU rounds its products")
    assert_exact(Decoder(width=16), token_batch(3, 8), token_losses, path=path)


@pytest.mark.parametrize("length", [8, 33])
@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize("path", PATHS)
def test_a_sample_keeps_to_the_bound_on_a_cpu_that_may_round_its_products(path, width, length, allowed_precision):
    model, batch, bound = Decoder(width=width), token_batch(1, length), 1e-2
    with FlashEngine(model, max_grad_norm=bound, loss_reduction="sum", path=path) as engine:
        token_losses(model, batch).sum().backward()
        engine.finish()
    share = torch.stack([parameter.grad.double().norm() for parameter in model.parameters()]).norm()
    assert (1 - 1e-3) * bound <= share <= (1 + 1e-3) * bound


# -- the sums as a stream ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("stream", ["clipped", "factored"])
def test_the_stream_gives_what_finish_would_and_leaves_grad_alone(batch, stream):
    model, batch = Decoder(tied=True), token_batch(batch, 6)
    truth, c = reference(model, batch, token_losses)
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {}
    with FlashEngine(model, max_grad_norm=c) as engine:
        token_losses(model, batch).mean().backward()
        if stream == "clipped":
            found = {names[parameter]: total.clone() for parameter, total in engine.clipped_sums()}
        else:
            for parameters, tensors, factors, rows in engine.factored_sums():
                for at, (parameter, total) in enumerate(zip(parameters, tensors, strict=True)):
                    found[names[parameter]] = (
                        total.clone()
                        if factors is None
                        else torch.einsum("b,b...->...", factors[rows[at]].to(total), total)
                    )
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_close(found, truth.clipped_sums)


def test_a_layers_inputs_are_freed_as_its_sum_is_handed_out():
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    held: list[weakref.ref[Tensor]] = []
    with FlashEngine(model, max_grad_norm=1.0, path="gram") as engine:
        model(torch.randn(3, 4, 6)).sin().sum().backward()
        for slot in engine._slots.values():
            held += [weakref.ref(part.g) for part in slot.contributions if isinstance(part, Outer)]
        assert len(held) == 4
        alive = []
        for parameter, total in engine.clipped_sums():
            if parameter.dim() == 2:
                del total
                alive.append(sum(ref() is not None for ref in held))
    assert alive == sorted(alive, reverse=True)
    assert alive[-1] == 0
    assert alive[0] <= 3


def test_a_cpu_frees_the_inputs_of_a_large_weight_before_the_next_one_is_summed():
    model = nn.Sequential(nn.Linear(512, 640), nn.Linear(640, 512), nn.Linear(512, 640))
    with FlashEngine(model, max_grad_norm=1.0, path="gram") as engine:
        model(torch.randn(3, 4, 512)).sin().sum().backward()
        weights = [parameter for parameter in model.parameters() if parameter.dim() == 2]
        held = [weakref.ref(engine.slot(weight).contributions[0].g) for weight in weights]
        alive = []
        for batch in engine.factored_sums():
            if any(parameter.dim() == 2 for parameter in batch.parameters):
                alive.append(sum(each() is not None for each in held))
            del batch
    assert alive == [2, 1, 0]


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tied", [False, True])
def test_bfloat16_autocast_agrees_with_the_oracle_to_the_rounding_of_bfloat16(path, tied):
    model, batch = Decoder(tied=tied, width=16), token_batch(4, 8)

    def losses(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return token_losses(model, batch).float()

    norms = run_oracle(model, batch, one_loss(losses), max_grad_norm=1.0).norms
    c = float(norms.median()) * 1.001
    truth = run_oracle(model, batch, one_loss(losses), max_grad_norm=c)
    with FlashEngine(model, max_grad_norm=c, path=path) as engine:
        private_step(engine, batch, losses)
    # Both round activations and gradients to 8 bits at every layer, each in its own order: a few 2⁻⁸ apart.
    torch.testing.assert_close(engine.norms, truth.norms, rtol=4 * 2**-8, atol=0)
    assert_close(gradients(model), truth.clipped_sums, rtol=8 * 2**-8)
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("batch", [1, 4])
def test_backward_and_finish_inside_the_autocast_context_stay_exact(path, batch):
    model, batch = mlp(), {"x": torch.randn(batch, 6, 5)}
    truth, c = reference(model, batch, sine_losses)
    with FlashEngine(model, max_grad_norm=c, path=path) as engine:
        loss = sine_losses(model, batch).mean()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
            engine.finish()
            assert torch.is_autocast_enabled("cpu")
    assert_close(gradients(model), truth.clipped_sums)
    torch.testing.assert_close(engine.norms, truth.norms, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [1024.0, lambda: 1024.0, torch.tensor(1024.0)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_loss_scale_is_taken_out_again(scale, reduction):
    model, batch = mlp(), {"x": torch.randn(4, 5)}
    truth, c = reference(model, batch, sine_losses)
    with FlashEngine(model, max_grad_norm=c, loss_reduction=reduction, loss_scale=scale) as engine:
        private_step(engine, batch, lambda m, b: 1024.0 * sine_losses(m, b))
    assert_agrees(model, batch, sine_losses, engine, truth, c)


def test_a_model_in_bfloat16_gets_gradients_in_bfloat16():
    model, batch = mlp().bfloat16(), {"x": torch.randn(4, 6, 5).bfloat16()}
    with FlashEngine(model, max_grad_norm=0.5) as engine:
        private_step(engine, batch, sine_losses)
        private_step(engine, batch, sine_losses)  # and adds to them
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.bfloat16}
    twice = sum(total.float().square().sum() for total in gradients(model).values()).sqrt()
    assert twice <= 2 * 4 * 0.5 * (1 + 2**-7)


def test_max_grad_norm_may_be_changed_between_steps_and_must_be_positive():
    model, batch = mlp(), {"x": torch.randn(4, 5)}
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for c in (1e-3, 1e3):
            engine.max_grad_norm = c
            model.zero_grad()
            truth = run_oracle(model, batch, one_loss(sine_losses), max_grad_norm=c, dtype=torch.float64)
            private_step(engine, batch, sine_losses)
            assert_agrees(model, batch, sine_losses, engine, truth, c)
        for wrong in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(UserError, match="max_grad_norm must be a finite number above 0"):
                engine.max_grad_norm = wrong


# -- the batch dimension -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [3, 4, 8])
def test_a_flattened_batch_has_a_block_of_rows_for_each_sample(batch):
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 2)

        def forward(self, x):
            return self.layer(x.flatten(0, 1))

    model, x = Flat().double(), torch.randn(batch, 4, 5, dtype=torch.float64)
    truth = run_oracle(model, (x,), lambda model, batch: model(batch[0]).square().sum(), max_grad_norm=0.1)
    with FlashEngine(model, max_grad_norm=0.1, loss_reduction="sum") as engine:
        model(x).square().sum().backward()
        engine.finish()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, truth.clipped_sums[name], rtol=1e-9, atol=0)


def test_an_input_without_a_batch_dimension_is_refused():
    model = nn.Sequential(nn.Linear(5, 2))
    with FlashEngine(model, max_grad_norm=1.0), pytest.raises(UserError, match="batch as the first dimension"):
        model(torch.randn(5))


def test_where_the_batch_is_not_dimension_zero_of_the_first_tensor_the_caller_says_so():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 2)

        def forward(self, table, x):
            return self.layer(x + table.sum(0))

    model, table, x = Shared(), torch.randn(7, 5), torch.randn(4, 5)
    batch = {"x": x}
    losses = lambda m, b: m(table, b["x"]).sin().sum(1)  # noqa: E731
    truth, c = reference(model.double(), {"x": x.double()}, lambda m, b: m(table.double(), b["x"]).sin().sum(1))
    model.float()
    with pytest.raises(UserError, match="7 samples"), FlashEngine(model, max_grad_norm=c) as engine:
        private_step(engine, batch, losses)
    with FlashEngine(model, max_grad_norm=c, batch_size_of=lambda args, kwargs: len(args[1])) as engine:
        private_step(engine, batch, losses)
    assert_close(gradients(model), truth.clipped_sums)


def test_layers_take_their_input_by_name_too():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 2)

        def forward(self, *, x):
            return self.layer(input=x)

    assert_exact(Named(), {"x": torch.randn(4, 5)}, lambda m, b: m(x=b["x"]).sin().sum(1))


# -- what can be seen --------------------------------------------------------------------------------------------------


def test_explain_names_every_trainable_parameter_with_its_path():
    model = Decoder(layers=1)
    model.norm.requires_grad_(False)
    engine = assert_exact(model, token_batch(4, 6), token_losses, path="gram")
    rows = {row.parameter: row for row in engine.explain()}
    assert rows.keys() == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert rows["head.weight"].path == "gram"
    assert rows["head.weight"].shapes == "x (4, 6, 8), g (4, 6, 17)"
    assert rows["tokens.weight"].kind == "lookup"
    text = str(engine.explain())
    assert all(name in text for name in rows)


def test_wrong_arguments_are_refused_with_what_is_possible():
    with pytest.raises(UserError, match="mean, sum"):
        FlashEngine(mlp(), max_grad_norm=1.0, loss_reduction="batch")
    with pytest.raises(UserError, match="gram, direct, keep"):
        FlashEngine(mlp(), max_grad_norm=1.0, path="fast")
    model = mlp()
    with FlashEngine(model, max_grad_norm=1.0), pytest.raises(UserError, match="already has a FlashEngine"):
        FlashEngine(model, max_grad_norm=1.0)


def test_a_layer_used_often_by_one_sample_holds_one_gradient():
    layer = nn.Linear(5, 5)
    model = nn.Sequential(*(part for _ in range(4) for part in (layer, nn.Tanh())))
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        model(torch.randn(1, 5)).sin().sum().backward()
        assert len(engine.slot(layer.weight).contributions) == 1
    assert_exact(model, {"x": torch.randn(1, 5)}, sine_losses)


def test_hooks_of_the_user_are_called_as_ever():
    model, batch = mlp(), {"x": torch.randn(4, 5)}
    called = []
    model[0].register_forward_hook(lambda module, args, output: called.append("forward"))
    model[3].register_full_backward_hook(lambda module, grad_input, grad_output: called.append("backward"))
    assert_exact(model, batch, sine_losses)
    called.clear()
    model.zero_grad()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        private_step(engine, batch, sine_losses)
        assert called[-2:] == ["forward", "backward"]
        engine.verification.schedule.pause()
        called.clear()
        private_step(engine, batch, sine_losses)  # the first one was verified
    assert called == ["forward", "backward"]


def test_saved_tensors_may_be_moved_away_and_back():
    model, batch = Decoder(), token_batch(3, 5)
    truth, c = reference(model, batch, token_losses)
    with FlashEngine(model, max_grad_norm=c) as engine:
        with torch.autograd.graph.save_on_cpu():
            loss = token_losses(model, batch).mean()
        loss.backward()
        engine.finish()
    assert_agrees(model, batch, token_losses, engine, truth, c)


@pytest.mark.parametrize("trained", [False, True])
def test_a_private_model_that_nobody_holds_any_more_is_freed(trained):
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 1))
    held = [weakref.ref(parameter) for parameter in model.parameters()]
    engine = FlashEngine(model, max_grad_norm=1.0)
    if trained:
        model(torch.randn(3, 4, 6)).sum().backward()
        engine.finish()
    del model, engine
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)


@takes_compiled
def test_a_parameter_that_autograd_passes_by_has_no_ordinary_gradient_though_a_sum_is_there():
    """A compiled graph holds its parameters: autograd comes to them with nothing, also in a step's second batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3))
    batches = [torch.randint(0, 7, (3, 5)) for _ in range(2)]
    sums = []
    for called in (model, torch.compile(model, backend="aot_eager")):
        with FlashEngine(called, max_grad_norm=0.1) as engine:
            for batch in batches:
                called(batch).square().mean().backward()
                engine.finish()
            sums.append([parameter.grad.clone() for parameter in model.parameters()])
            engine.zero_grad()
    torch.testing.assert_close(*sums)
