"""What stays as it was while an engine is attached, what is not computed, and what is not copied."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from tests.unit.flash.flash_models import Decoder, EveryFamily, token_batch, token_losses

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:Mismatch dtype between input")


def state_of(model: nn.Module) -> list[tuple[str, dict, dict]]:
    """Everything an engine could leave behind, module by module."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [
        (
            name,
            {key: id(value) for key, value in vars(module).items()},
            {hook: dict(vars(module)[hook]) for hook in hooks},
        )
        for name, module in model.named_modules()
    ]


def test_names_classes_and_state_dict_stay():
    model = EveryFamily()
    names, classes = [n for n, _ in model.named_modules()], [type(m) for m in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with FlashEngine(model, max_grad_norm=1.0):
        assert [n for n, _ in model.named_modules()] == names
        assert [type(m) for m in model.modules()] == classes
        assert model.state_dict().keys() == state.keys()
        model.load_state_dict(state)
        assert inspect.signature(model.forward) == inspect.signature(EveryFamily.forward.__get__(model))


@pytest.mark.parametrize("leave", ["detach", "with", "error"])
def test_leaving_restores_everything(leave):
    model = EveryFamily()
    before = state_of(model)
    if leave == "detach":
        engine = FlashEngine(model, max_grad_norm=1.0)
        model(torch.randint(0, 5, (2, 4))).sum().backward()
        engine.detach()
    elif leave == "with":
        with FlashEngine(model, max_grad_norm=1.0) as engine:
            model(torch.randint(0, 5, (2, 4))).sum().backward()
            engine.finish()
    else:
        with pytest.raises(ZeroDivisionError), FlashEngine(model, max_grad_norm=1.0):
            raise ZeroDivisionError
    assert state_of(model) == before
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    model.zero_grad()
    model(torch.randint(0, 5, (2, 4))).sum().backward()  # an ordinary model again
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_is_an_ordinary_model(how):
    model = EveryFamily()
    ids = torch.randint(0, 5, (2, 4))
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        model(ids).sum().backward()
        if how == "deepcopy":
            twin = copy.deepcopy(model)
        elif how == "pickle":
            twin = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        assert engine.pending
        twin(ids).sum().backward()  # neither recorded by the engine nor refused by its guard
        engine.finish()
        assert engine.samples == 2
        torch.testing.assert_close(twin(ids), model(ids))
    ordinary = EveryFamily()
    ordinary.load_state_dict(twin.state_dict())
    ordinary(ids).sum().backward()
    for mine, theirs in zip(twin.parameters(), ordinary.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    with FlashEngine(twin, max_grad_norm=1.0):  # and may get an engine of its own
        twin(ids)


@pytest.mark.parametrize("training", [True, False])
def test_outputs_are_those_of_the_model_itself(training):
    model = EveryFamily().train(training)
    ids = torch.randint(0, 5, (3, 4))
    with torch.no_grad():
        plain = model(ids)
    with FlashEngine(model, max_grad_norm=1.0):
        torch.testing.assert_close(model(ids), plain)
        with torch.no_grad():
            assert torch.equal(model(ids), plain)
        with torch.inference_mode():
            assert torch.equal(model(ids), plain)


def test_output_dtypes_under_autocast_are_those_of_the_model_itself():
    model = EveryFamily()
    seen: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda m, args, out, name=name: seen.update({name: pytree.tree_leaves(out)[0].dtype})
        )
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randint(0, 5, (3, 4)))
        plain = dict(seen)
        with FlashEngine(model, max_grad_norm=1.0):
            model(torch.randint(0, 5, (3, 4)))
    assert seen == plain
    assert torch.bfloat16 in plain.values()


def test_a_replaced_parameter_is_an_error():
    model = nn.Sequential(nn.Linear(3, 3))
    with FlashEngine(model, max_grad_norm=1.0):
        model[0].weight = nn.Parameter(torch.zeros(3, 3))
        with pytest.raises(UserError, match=r"0\.weight was replaced"):
            model(torch.randn(2, 3))


class Products(TorchDispatchMode):
    """Counts matrix products and copies, with their output shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[int, ...]] = []
        self.copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm", "addmm_", "baddbmm"):
            self.products.append(tuple(out.shape))
        if name in ("clone", "_to_copy", "copy_", "contiguous"):
            self.copies += 1
        return out


def test_the_ordinary_weight_gradient_product_is_not_run_and_nothing_is_copied():
    d, p, batch, length = 6, 10, 3, 4
    model = nn.Sequential(nn.Linear(d, p), nn.Linear(p, d))
    x = torch.randn(batch, length, d)
    with FlashEngine(model, max_grad_norm=1.0, path="gram") as engine:
        loss = model(x).sin().sum()
        with Products() as ran:
            loss.backward()
        # All that backward needs is the gradient of the second layer's input.
        assert ran.products == [(batch * length, p)]
        assert ran.copies == 0
        with Products() as ran:
            engine.finish()
        assert sorted(shape for shape in ran.products if set(shape) == {d, p}) == [(d, p), (p, d)]
    with Products() as ran:  # the counter does see an ordinary backward's
        model(x).sin().sum().backward()
    assert (p, d) in ran.products


def test_inputs_and_gradients_are_kept_as_they_are():
    first, second = nn.Linear(6, 5), nn.Linear(5, 4)
    model = nn.Sequential(first, second)
    x = torch.randn(3, 7, 6)
    with FlashEngine(model, max_grad_norm=1.0, path="gram") as engine:
        hidden = []
        first.register_forward_hook(lambda module, args, output: hidden.append(output))
        model(x).sin().sum().backward()
        hidden = hidden[-1]
        (outer,) = engine.slot(first.weight).contributions
        assert outer.x.data_ptr() == x.data_ptr()
        (outer,) = engine.slot(second.weight).contributions
        assert outer.x.data_ptr() == hidden.data_ptr()
        assert outer.x.grad_fn is None


def test_layers_that_read_one_tensor_store_one_cast_of_it():
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, x):
            return self.q(x) + self.k(x) + self.v(x)

    model = nn.Sequential(nn.LayerNorm(6), Three())
    with FlashEngine(model, max_grad_norm=1.0, path="gram") as engine, torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(3, 4, 6)).float().sum().backward()
        pointers = {engine.slot(getattr(model[1], name).weight).contributions[0].x.data_ptr() for name in "qkv"}
        assert len(pointers) == 1
        x = torch.randn(3, 4, 6)
        engine.discard()
        first = engine.cast(x, torch.bfloat16)
        x.zero_()  # a new version is a new cast
        assert engine.cast(x, torch.bfloat16).count_nonzero() == 0
        assert first.count_nonzero() > 0


def test_frozen_layers_run_untouched():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    with FlashEngine(model, max_grad_norm=1.0, batch_size_of=lambda args, kwargs: len(args[0])):
        hidden = model[0](torch.randn(2, 3))
        assert not hidden.requires_grad
        hidden = model[0](torch.randn(2, 3, requires_grad=True))
        assert "Tapped" not in type(hidden.grad_fn).__name__
        assert "Tapped" in type(model[1](hidden).grad_fn).__name__


def test_memory_of_one_sample_is_freed_in_backward():
    """One sample: gradients are kept in the parameter's dtype, and no layer's x and g outlive its backward."""
    model, batch = Decoder(), token_batch(1, 6)
    with FlashEngine(model, max_grad_norm=1.0) as engine, torch.autocast("cpu", torch.bfloat16):
        token_losses(model, batch).sum().backward()
        for slot in engine._slots.values():
            assert [type(part).__name__ for part in slot.contributions] == ["Kept"]
            assert slot.contributions[0].values.dtype == torch.float32


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 3), lambda: nn.Sequential(nn.Linear(4, 3), nn.PReLU())])
def test_transforms_of_torch_func_around_the_model_see_the_ordinary_one(make):
    model, x = make(), torch.randn(5, 4)
    transforms = (
        lambda: torch.vmap(model)(x[:, None]),
        lambda: torch.func.jacrev(model)(x[:1]),
        lambda: per_sample(model, x),
    )
    truths = [transform() for transform in transforms]
    with FlashEngine(model) as engine:
        for _ in range(2):  # before the first forward pass, and between backward and the step
            for transform, truth in zip(transforms, truths, strict=True):
                torch.testing.assert_close(transform(), truth)
            model(x).sum().backward()
        engine.finish()
        with pytest.raises(UserError, match="ordinary, unclipped gradient"):
            torch.vmap(model)(x).sum().backward()


def per_sample(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Per-sample gradients, as torch's tutorial makes them."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    loss = lambda given, row: torch.func.functional_call(model, given, (row[None],)).sum()  # noqa: E731
    return torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
