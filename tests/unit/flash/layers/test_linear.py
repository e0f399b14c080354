"""Linear in every shape, on every path."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from dpscope.flash.gradients.contributions import Kept, Summed
from dpscope.flash.layers import linear
from tests.torch_here import takes_compiled
from tests.unit.flash.agreement import CLIPPING, PATHS, REDUCTIONS, assert_exact
from tests.unit.flash.compiled.compiling import assert_compiled_exact
from tests.unit.flash.flash_models import Decoder, sine_losses, token_batch, token_losses


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("clipping", CLIPPING)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 5),
    middle=st.lists(st.integers(1, 5), max_size=3),
    d=st.integers(1, 7),
    p=st.integers(1, 7),
    bias=st.booleans(),
    reduction=st.sampled_from(REDUCTIONS),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_linear_of_any_shape(path, clipping, batch, middle, d, p, bias, reduction, dtype):
    model = nn.Sequential(nn.Linear(d, p, bias=bias), nn.Tanh(), nn.Linear(p, 3)).to(dtype)
    x = torch.randn(batch, *middle, d, dtype=dtype)
    assert_exact(model, {"x": x}, sine_losses, clipping=clipping, loss_reduction=reduction, path=path)


class Twice(nn.Module):
    """One Linear used twice on different inputs, and twice on the same."""

    def __init__(self, same: bool) -> None:
        super().__init__()
        self.shared, self.head, self.same = nn.Linear(5, 5), nn.Linear(5, 2), same

    def forward(self, x):
        first = self.shared(x)
        second = self.shared(x if self.same else first.tanh())
        return self.head(first * second)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_linear_used_twice_counts_its_cross_terms(path, same, dtype):
    model = Twice(same).to(dtype)
    assert_exact(model, {"x": torch.randn(4, 3, 5, dtype=dtype)}, sine_losses, path=path)


@pytest.mark.parametrize("path", PATHS)
def test_two_linears_that_share_one_weight(path):
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    model[2].weight = model[0].weight
    assert_exact(model, {"x": torch.randn(4, 3, 5)}, sine_losses, path=path)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "strided"])
def test_inputs_that_are_not_contiguous(layout):
    x = {
        "transposed": torch.randn(4, 5, 3).transpose(1, 2),
        "expanded": torch.randn(4, 1, 5).expand(4, 3, 5),
        "strided": torch.randn(4, 3, 10)[..., ::2],
    }[layout]
    assert_exact(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)), {"x": x}, sine_losses)


class Conv1D(nn.Module):
    """Hugging Face's, by its published code: a Linear whose weight is (in, out)."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("batch", [1, 4])
def test_the_transposed_linear_of_hugging_face(path, batch):
    model = nn.Sequential(nn.Linear(5, 4), Conv1D(3, 4))
    engine = assert_exact(model, {"x": torch.randn(batch, 6, 5)}, sine_losses, path=path)
    assert "opaque" not in {row.kind for row in engine.explain()}


CUDA = torch.device("cuda")


def test_wide_half_precision_gradients_get_aligned_rows_on_a_gpu():
    assert linear.missing_columns(50_257, torch.bfloat16, CUDA) == 7
    assert linear.missing_columns(30_522, torch.float16, CUDA) == 6
    assert linear.missing_columns(50_264, torch.bfloat16, CUDA) == 0
    for width, dtype, device in (
        (13, torch.bfloat16, CUDA),
        (50_257, torch.float32, CUDA),
        (50_257, torch.half, "cpu"),
    ):
        assert linear.missing_columns(width, dtype, torch.device(device)) == 0


@pytest.fixture
def aligned_everywhere(monkeypatch):
    """Every layer's gradient gets rows of 8 columns, as those of a vocabulary on a GPU do."""
    monkeypatch.setattr(linear, "missing_columns", lambda width, dtype, device: -width % 8)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_gradients_with_columns_of_zeros_give_the_same_sums(path, tied, aligned_everywhere):
    assert_exact(Decoder(tied=tied), token_batch(4, 6), token_losses, path=path)


@pytest.mark.slow
@takes_compiled
@pytest.mark.parametrize("tied", [False, True])
def test_compiled_gradients_with_columns_of_zeros_give_the_same_sums(tied, aligned_everywhere):
    graphs = assert_compiled_exact(Decoder(tied=tied), token_batch(4, 6), token_losses, fullgraph=True)
    assert graphs.count == 1


@pytest.mark.parametrize(
    ("path", "kind", "weight_trains"), [("gram", Summed, True), ("keep", Kept, True), ("gram", Kept, False)]
)
def test_a_bias_is_summed_when_the_micro_batch_closes_where_the_weight_holds_g_anyway(path, kind, weight_trains):
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    model[2].weight.requires_grad_(weight_trains)
    with FlashEngine(model, max_grad_norm=1.0, path=path) as engine:
        model(torch.randn(2, 3, 5)).sin().sum().backward()
        parts = {slot.name: part for slot, part in engine.contributions()}
        assert type(parts["2.bias"]) is kind
        if kind is Summed:
            assert parts["2.bias"].summed_later is parts["2.weight"].g


def test_a_g_that_was_changed_in_place_is_refused_for_the_bias_too():
    model, seen = nn.Sequential(nn.Linear(5, 4)), []
    with FlashEngine(model, max_grad_norm=1.0, path="gram") as engine:
        y = model(torch.randn(2, 3, 5))
        y.register_hook(seen.append)
        y.sin().sum().backward()
        seen[0].zero_()
        engine._slots[model[0].weight].contributions.clear()  # leaves the bias alone with it
        with pytest.raises(UserError, match=r"0\.bias was changed in place"):
            engine.finish()


@pytest.mark.parametrize("path", PATHS)
def test_sequences_of_no_position_have_gradients_of_zero(path):
    assert_exact(nn.Linear(5, 4), {"x": torch.randn(3, 0, 5)}, sine_losses, path=path)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("shape", [(3, 6), (3, 4, 6), (3, 2, 4, 6)])
def test_outputs_may_be_changed_in_place_and_are_watched_as_in_ordinary_training(shape, autocast):
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    x = torch.randn(shape)
    engine = FlashEngine(model, max_grad_norm=1.0, batch_size_of=lambda args, kwargs: len(args[0]))
    with engine, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(x)  # its layers are known from here on
        y = model[0](x)
        assert not y._is_view()
        assert y.requires_grad
        assert y._version == 0
        changed = y.relu_()
        model[1](changed).float().sum().backward()
        engine.discard()
        y = model[0](x)
        squares = y * y
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squares.float().sum().backward()
        engine.discard()
        y = model[0](x)
        z = model[1](y)
        y.add_(1)  # what the second layer has saved; a cast of it would still be the value that was read
        if not autocast:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                z.float().sum().backward()


def test_a_gradient_in_foreign_memory_is_copied_once_for_weight_and_bias():
    model = nn.Linear(3, 2)
    foreign = np.ones((4, 5, 2), dtype=np.float32)
    with FlashEngine(model, max_grad_norm=1.0, path="gram") as engine:
        model(torch.randn(4, 5, 3)).backward(torch.from_numpy(foreign))
        (outer,), (summed,) = (engine.slot(p).contributions for p in (model.weight, model.bias))
        assert summed.summed_later is outer.g
        foreign[:] = 7
        assert torch.equal(outer.g, torch.ones(4, 5, 2))


def test_dispatch_modes_see_the_products_that_ordinary_training_makes():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(func)
            return func(*args, **(kwargs or {}))

    model, x = nn.Linear(3, 2), torch.randn(4, 5, 3)
    with FlashEngine(model, max_grad_norm=1.0):
        model(x)
        seen: set = set()
        with Seen():
            model(x)
    assert torch.ops.aten.addmm.default in seen
    assert torch.ops.aten.linear.default not in seen


@pytest.mark.parametrize("fails", [False, True])
def test_torch_notes_views_again_after_a_layer(fails):
    model = nn.Linear(3, 2)
    with FlashEngine(model, max_grad_norm=1.0):
        model(torch.randn(4, 5, 3))
        if fails:
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model(torch.randn(4, 5, 7))
        assert torch.ones(6).view(2, 3)._is_view()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(512, 512) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))
        return self.out(attended)


@pytest.mark.parametrize("autocast", [False, True])
def test_keeping_gradients_frees_an_input_only_if_no_other_layer_reads_it(autocast: bool) -> None:
    """Of 400 positions: kept gradients are larger than the output gradient, and smaller than that and the input."""
    model = Attention()
    with FlashEngine(model, max_grad_norm=1.0, memory_budget="lean") as engine:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(torch.randn(2, 400, 512)).float().mean()
        loss.backward()
        freed = {row.parameter: "no room" not in row.why for row in engine.explain() if "weight" in row.parameter}
    assert freed == {"q.weight": False, "k.weight": False, "v.weight": False, "out.weight": True}


@pytest.mark.parametrize("sparse", [Tensor.to_sparse, Tensor.to_sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_sparse_input_is_refused_by_name_where_the_weight_is_trained(sparse) -> None:
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(5, 4)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        with pytest.raises(UserError, match=r"0 was given a sparse tensor.*to_dense"):
            model(sparse(x))
        engine.zero_grad()
        model(x).sum().backward()
        engine.finish()


def test_a_fake_tensor_goes_through_without_a_warning_for_its_address() -> None:
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(5, 4)
    with FlashEngine(model, max_grad_norm=1.0):
        model(x)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, warnings.catch_warnings():
            warnings.simplefilter("error")
            assert model(mode.from_tensor(x)).shape == (5, 3)


class ParallelBlock(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        return super().forward(x) + self.up(x)


def test_an_input_is_shared_also_where_others_are_read_in_between() -> None:
    model = ParallelBlock()
    with FlashEngine(model, max_grad_norm=1.0, memory_budget="lean") as engine:
        model(torch.randn(2, 400, 512)).mean().backward()
        freed = {row.parameter: "no room" not in row.why for row in engine.explain() if "weight" in row.parameter}
    assert [name for name, is_freed in freed.items() if is_freed] == ["out.weight"]


def test_an_input_that_is_gone_is_not_shared_with_another_in_its_memory() -> None:
    """A forward whose loss is thrown away leaves its memory to the next."""
    model = nn.Sequential(nn.Linear(512, 512))
    with FlashEngine(model, max_grad_norm=1.0, memory_budget="lean") as engine:
        memory = torch.randn(2, 400, 512)
        model(memory.view(2, 400, 512))
        model(memory.view(2, 400, 512)).mean().backward()
        assert "no room" not in engine.explain()[0].why


def test_the_next_batch_in_the_same_memory_is_no_input_that_is_shared() -> None:
    model, x = nn.Sequential(nn.Linear(512, 512)), torch.randn(2, 400, 512)
    with FlashEngine(model, max_grad_norm=1.0, memory_budget="lean") as engine:
        for _ in range(2):
            model(x.normal_()).mean().backward()
            engine.finish()
        assert "no room" not in engine.explain()[0].why
