"""The engine on whole models: the same norms, factors and clipped sums as micro-batches of one."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpscope.errors import UserError
from dpscope.flash import FlashEngine, run_oracle
from dpscope.flash.contributions import Outer
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
from tests.unit.flash.flash_models import Decoder, token_batch, token_losses


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


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize("path", PATHS)
def test_a_cpu_that_may_round_its_products_and_does_not_gets_the_oracles_clipped_sums(path, precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert_exact(Decoder(width=16), token_batch(3, 8), token_losses, path=path)
    finally:
        torch.set_float32_matmul_precision(before)


def mlp(width: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 7), nn.ReLU(inplace=True), nn.LayerNorm(7), nn.Linear(7, 3))


def sine_losses(model, batch):
    return model(batch["x"]).sin().flatten(1).sum(1)


def gradients(model) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_close(found: dict[str, Tensor], truth: dict[str, Tensor], rtol: float = 1e-5) -> None:
    assert found.keys() == truth.keys()
    for name, total in truth.items():
        assert (found[name].double() - total.double()).norm() <= rtol * total.double().norm() + 1e-9, name


# -- what a micro-batch is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("closing", ["by the next forward", "by finish"])
def test_micro_batches_add_up_to_the_whole_batch(reduction, closing):
    model, batch = mlp(), {"x": torch.randn(7, 5)}
    truth, c = reference(model, batch, sine_losses)
    with FlashEngine(model, max_grad_norm=c, loss_reduction=reduction) as engine:
        for part in batch["x"].split([3, 1, 3]):
            losses = sine_losses(model, {"x": part})
            (losses.mean() if reduction == "mean" else losses.sum()).backward()
            if closing == "by finish":
                engine.finish()
        engine.finish()
        assert engine.samples == 7
    assert_close(gradients(model), truth.clipped_sums)


def test_several_losses_of_one_forward_add_before_the_norm():
    model, x = mlp(), torch.randn(4, 5)
    both = {"x": x}
    truth, c = reference(model, both, lambda m, b: m(b["x"]).sin().sum(1) + m(b["x"]).square().sum(1))
    with FlashEngine(model, max_grad_norm=c, loss_reduction="sum") as engine:
        output = model(x)
        output.sin().sum().backward(retain_graph=True)
        output.square().sum().backward()
        engine.finish()
    assert_close(gradients(model), truth.clipped_sums)
    torch.testing.assert_close(engine.norms, truth.norms, rtol=1e-6, atol=0)


def test_several_forwards_before_backward_are_about_the_same_samples():
    model, batch = mlp(), {"x": torch.randn(4, 5), "z": torch.randn(4, 5)}
    losses = lambda m, b: (m(b["x"]) * m(b["z"])).sum(1)  # noqa: E731
    assert_exact(model, batch, losses)


def test_forwards_of_different_sizes_before_one_backward_are_refused():
    model = mlp()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        (model(torch.randn(4, 5)).sum() + model(torch.randn(3, 5)).sum()).backward()
        with pytest.raises(UserError, match=r"\[3, 4\] samples"):
            engine.finish()


@pytest.mark.parametrize("fault", ["mismatched sizes", "changed in place"])
def test_the_micro_batch_after_a_refused_one_is_clipped_and_summed_as_ever(fault):
    model, batch = mlp(), {"x": torch.randn(4, 5)}
    truth, c = reference(model, batch, sine_losses)
    with FlashEngine(model, max_grad_norm=c) as engine:
        x = torch.randn(4, 5)
        loss = sine_losses(model, {"x": x}).mean()
        if fault == "mismatched sizes":
            loss = loss + sine_losses(model, {"x": x[:3]}).mean()
        loss.backward()
        x.add_(1)
        with pytest.raises(UserError):
            engine.finish()
        private_step(engine, batch, sine_losses)
    assert_agrees(model, batch, sine_losses, engine, truth, c)


def test_backward_through_a_forward_that_was_already_summed_is_refused():
    model = mlp()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        loss = model(torch.randn(4, 5)).sin().sum()
        loss.backward(retain_graph=True)
        engine.finish()
        with pytest.raises(UserError, match="already clipped and summed"):
            loss.backward()


def test_a_forward_without_gradients_between_backward_and_finish_changes_nothing():
    model, batch = mlp(), {"x": torch.randn(4, 5)}
    truth, c = reference(model, batch, sine_losses)
    with FlashEngine(model, max_grad_norm=c) as engine:
        sine_losses(model, batch).mean().backward()
        with torch.no_grad():
            model(torch.randn(9, 5))
        assert engine.pending
        engine.finish()
    assert_close(gradients(model), truth.clipped_sums)


def test_parts_of_the_model_may_be_called_without_the_root_where_the_caller_says_how_many_samples_there_are():
    model = nn.ModuleDict({"encoder": mlp(), "head": nn.Linear(3, 2)})
    batch = {"x": torch.randn(4, 5)}
    losses = lambda m, b: m["head"](m["encoder"](b["x"])).sin().sum(1)  # noqa: E731
    truth, c = reference(model, batch, losses)
    with (
        pytest.raises(UserError, match=r"encoder\.0 was called outside .*batch_size_of"),
        FlashEngine(model, max_grad_norm=c),
    ):
        losses(model, batch)
    first = lambda args, kwargs: len(args[0])  # noqa: E731
    with FlashEngine(model, max_grad_norm=c, loss_reduction="sum", batch_size_of=first) as engine:
        for part in batch["x"].split([1, 3]):
            losses(model, {"x": part}).sum().backward()
        engine.finish()
    assert_close(gradients(model), truth.clipped_sums)


def test_zero_grad_throws_away_what_was_not_summed():
    model, batch = mlp(), {"x": torch.randn(4, 5)}
    truth, c = reference(model, batch, sine_losses)
    with FlashEngine(model, max_grad_norm=c) as engine:
        sine_losses(model, {"x": torch.randn(6, 5)}).mean().backward()
        model.zero_grad()
        private_step(engine, batch, sine_losses)
        assert engine.samples == 4
    assert_close(gradients(model), truth.clipped_sums)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing_of_both_kinds(reentrant, autocast):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last, self.on = nn.Linear(5, 5), mlp(), nn.Linear(3, 2), True

        def forward(self, x):
            h = self.first(x)
            h = checkpoint(self.middle, h, use_reentrant=reentrant) if self.on else self.middle(h)
            return self.last(h)

    model, batch = Checkpointed(), {"x": torch.randn(4, 6, 5)}
    found = {}
    for on in (True, False):
        model.on = on
        model.zero_grad()
        with FlashEngine(model, max_grad_norm=0.5) as engine, torch.autocast("cpu", enabled=autocast):
            private_step(engine, batch, sine_losses)
        found[on] = (gradients(model), engine.norms)
    assert_close(found[True][0], found[False][0], rtol=1e-6)
    torch.testing.assert_close(found[True][1], found[False][1], rtol=1e-6, atol=0)
    if not autocast:
        model.on = False
        assert_exact(model, batch, sine_losses)


class Scale(nn.Module):
    """A module with a parameter of its own: it runs sample by sample."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize("unit", [nn.Linear(5, 5), Scale(5)])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_zero_grad_may_come_between_forward_and_backward(unit, reentrant):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.unit, self.reentrant = nn.Linear(5, 5), unit, None

        def forward(self, x):
            h = self.first(x)
            return self.unit(h) if self.reentrant is None else checkpoint(self.unit, h, use_reentrant=self.reentrant)

    model, batch = Model(), {"x": torch.randn(4, 5)}
    truth, c = reference(model, batch, sine_losses)
    model.reentrant = reentrant
    with FlashEngine(model, max_grad_norm=c) as engine:
        for _ in range(2):
            loss = sine_losses(model, batch).mean()
            model.zero_grad()
            loss.backward()
            engine.finish()
    assert_close(gradients(model), truth.clipped_sums)


def test_a_checkpointed_model_run_twice_stays_one_micro_batch():
    model = mlp()
    batch = {"x": torch.randn(4, 5), "z": torch.randn(4, 5)}
    truth, c = reference(model, batch, lambda m, b: (m(b["x"]) * m(b["z"])).sum(1))
    with FlashEngine(model, max_grad_norm=c, loss_reduction="sum") as engine:
        first, second = (checkpoint(model, batch[key], use_reentrant=False) for key in "xz")
        (first * second).sum().backward()
        engine.finish()
        assert engine.samples == 4
    assert_close(gradients(model), truth.clipped_sums)


# -- gradients that are there, missing, frozen -------------------------------------------------------------------------


def test_requires_grad_may_be_switched_between_steps():
    model, batch = Decoder(), token_batch(4, 6)
    truth_all, c = reference(model, batch, token_losses)
    engine = FlashEngine(model, max_grad_norm=c)
    for frozen in (["head", "blocks.0.mlp"], [], ["tokens", "positions", "norm"]):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(name.startswith(part) for part in frozen))
            parameter.grad = None
        truth = run_oracle(model, batch, one_loss(token_losses), max_grad_norm=c, dtype=torch.float64)
        private_step(engine, batch, token_losses)
        assert_agrees(model, batch, token_losses, engine, truth, c)
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == any(name.startswith(part) for part in frozen)
    engine.detach()
    assert len(truth_all.clipped_sums) > len(truth.clipped_sums)


def test_frozen_parameters_that_cannot_require_a_gradient_are_left_alone():
    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.ones(3, 5, dtype=torch.int8), requires_grad=False)
            with torch.inference_mode():
                self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
            self.head = nn.Linear(3, 2)

        def forward(self, x):
            return self.head(x @ self.codes.to(x.dtype).t() * self.scale.clone())

    model, x = Quantised(), torch.randn(4, 5)
    with FlashEngine(model, max_grad_norm=0.1) as engine:
        model(x).sin().sum().backward()
        engine.finish()
        assert model.head.weight.grad.any()
    assert model.codes.grad is None


def test_trainable_parameters_that_nothing_reached_get_zeros():
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].unused = nn.Linear(3, 2)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        model(torch.randn(2, 3)).sum().backward()
        engine.finish()
    assert model[0].unused.weight.grad.count_nonzero() == 0
    assert model[0].weight.grad.count_nonzero() > 0


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_an_empty_batch_gives_zeros_and_adds_nothing(reduction):
    model = Decoder()
    with FlashEngine(model, max_grad_norm=1.0, loss_reduction=reduction) as engine:
        private_step(engine, token_batch(0, 6), token_losses)
        assert engine.samples == 0
        assert engine.norms.shape == (0,)
        assert all(total.count_nonzero() == 0 and total.isfinite().all() for total in gradients(model).values())
        private_step(engine, token_batch(3, 6), token_losses)
        before = gradients(model)
        private_step(engine, token_batch(0, 6), token_losses)
        assert engine.samples == 3
    assert all(torch.equal(before[name], total) for name, total in gradients(model).items())


def test_finish_without_a_backward_gives_zeros():
    model = mlp()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        engine.finish()
    assert all(total.count_nonzero() == 0 for total in gradients(model).values())


def test_a_gradient_from_elsewhere_is_not_added_to():
    model = mlp()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        private_step(engine, {"x": torch.randn(4, 5)}, sine_losses)
        private_step(engine, {"x": torch.randn(4, 5)}, sine_losses)  # its own are
        model[3].weight.grad = model[3].weight.grad * 100
        with pytest.raises(UserError, match=r"3\.weight\.grad.*zero_grad"):
            private_step(engine, {"x": torch.randn(4, 5)}, sine_losses)
        model.zero_grad()
        private_step(engine, {"x": torch.randn(4, 5)}, sine_losses)
        for parameter in model.parameters():
            parameter.grad.zero_()  # zero_grad(set_to_none=False)
        private_step(engine, {"x": torch.randn(4, 5)}, sine_losses)


def test_a_parameter_used_outside_its_module_is_refused_and_its_gradient_thrown_away():
    model = mlp()
    with FlashEngine(model, max_grad_norm=1.0):
        loss = model(torch.randn(4, 5)).sum() + 0.1 * model[3].weight.square().sum()
        with pytest.raises(UserError, match=r"3\.weight received an ordinary, unclipped gradient"):
            loss.backward()
        assert model[3].weight.grad is None


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_second_order_gradients_are_refused():
    model = mlp()
    with FlashEngine(model, max_grad_norm=1.0), pytest.raises(UserError, match="create_graph"):
        model(torch.randn(4, 5)).sin().sum().backward(create_graph=True)


def test_a_batch_overwritten_before_finish_is_an_error_and_not_a_wrong_norm():
    model, x = mlp(), torch.randn(4, 5)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        model(x).sum().backward()
        x.copy_(torch.randn(4, 5))
        with pytest.raises(UserError, match=r"0\.weight was changed in place"):
            engine.finish()


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
            for parameters, tensors, factors in engine.factored_sums():
                for parameter, total in zip(parameters, tensors, strict=True):
                    found[names[parameter]] = (
                        total.clone() if factors is None else torch.einsum("b,b...->...", factors.to(total), total)
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


def test_a_flattened_batch_is_refused_by_the_layers_name():
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 2)

        def forward(self, x):
            return self.layer(x.flatten(0, 1))

    model = Flat()
    with FlashEngine(model, max_grad_norm=1.0), pytest.raises(UserError, match=r"layer .*\(12, 5\) .*3 samples"):
        model(torch.randn(3, 4, 5))


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
        called.clear()
        private_step(engine, batch, sine_losses)  # the first one was rehearsed
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
