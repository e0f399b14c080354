"""Parameters that a module owns itself are followed to the operators that use them; its layers stay layers."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpscope.errors import UserError
from dpscope.flash import FlashEngine, run_oracle
from dpscope.flash.layers import row_derivatives
from dpscope.flash.layers.bare import Bare, _weight_norm
from tests.unit.flash.agreement import CLIPPING, assert_exact, one_loss, private_step
from tests.unit.flash.flash_models import sine_losses

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

LENGTH, WIDTH = 5, 6


class Owner(nn.Module):
    """A module with parts of any kind, and a forward that is a function of it and its input."""

    def __init__(self, run, **parts) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            is_buffer = isinstance(part, Tensor) and not isinstance(part, nn.Parameter)
            self.register_buffer(name, part) if is_buffer else setattr(self, name, part)

    def forward(self, *args):
        return self.run(self, *args)


def bare(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def giver(*shape: int) -> Owner:
    return Owner(lambda m: m.p, p=bare(*shape))


def layer() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def losses(model, batch):
    return model(batch["x"]).sin().flatten(1).sum(1)


class OwnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p):
        ctx.save_for_backward(x, p)
        return x * p

    @staticmethod
    def backward(ctx, g):
        x, p = ctx.saved_tensors
        return g * p, (g * x).sum((0, 1))


def write_in_place(m, x):
    y = m.inner(x)
    first = y[:, :2]
    y += m.p
    y.mul_(m.q)
    return y + first.sum(1, keepdim=True)


def write_rows(m, x):
    y = m.inner(x).clone()
    y[:, 0] = m.p
    return y


def clamp_without_gradients(m, x):
    with torch.no_grad():
        ceiling = m.p.abs().max()
    return (x * m.p).clamp(max=ceiling)


def clamp_in_place(m, x):
    with torch.no_grad():
        m.p.clamp_(-0.5, 0.5)
    return x * m.p


def experts(m, x):
    weights = m.router(x).softmax(-1)
    return sum(weights[..., e : e + 1] * F.linear(x, m.w[e]) for e in range(3))


def attend(m, x):
    return F.scaled_dot_product_attention(x, x, x, attn_mask=m.p)


def attend_in_windows(m, x):
    """Two windows an image, three heads, as Swin has them."""
    windows = m.inner(torch.cat([x, -x], 1)).view(2 * len(x), LENGTH, 3, WIDTH // 3).transpose(1, 2)
    found = F.scaled_dot_product_attention(windows, windows, windows, attn_mask=m.p)
    return found.reshape(len(x), -1)


def by_heads(rows):
    batch, length, width = rows.shape
    return rows.view(batch, length, 2, width // 2).transpose(1, 2).reshape(2 * batch, length, width // 2)


def attend_to_positions(m, x):
    """Positions that a layer makes of a table are repeated for the heads of each sample, as in DeBERTa."""
    positions = by_heads(m.inner(m.table.weight[None])).repeat(len(x), 1, 1)
    return torch.bmm(by_heads(m.inner(x)), positions.transpose(1, 2)).view(len(x), -1)


def normalised(m, x):
    return F.linear(x, m.size * m.direction / m.direction.norm(dim=1, keepdim=True))


FOLLOWED = {
    "positions": lambda: Owner(lambda m, x: m.inner(x) + m.p, p=bare(LENGTH, WIDTH), inner=layer()),
    "positions (1, T, d)": lambda: Owner(lambda m, x: m.inner(x + m.p), p=bare(1, LENGTH, WIDTH), inner=layer()),
    "sliced positions": lambda: Owner(lambda m, x: x + m.p[: x.shape[1]], p=bare(9, WIDTH)),
    "positions by ids": lambda: Owner(lambda m, x: x + m.p[m.ids], p=bare(9, WIDTH), ids=torch.arange(LENGTH)),
    "scale": lambda: Owner(lambda m, x: m.inner(x) * m.p, p=bare(WIDTH), inner=layer()),
    "scalar": lambda: Owner(lambda m, x: m.p * m.inner(x), p=bare(), inner=layer()),
    "scale over T": lambda: Owner(lambda m, x: m.p * m.inner(x), p=bare(LENGTH, 1), inner=layer()),
    "gate": lambda: Owner(lambda m, x: x + torch.sigmoid(m.p) * m.inner(x), p=bare(1), inner=layer()),
    "differences": lambda: Owner(lambda m, x: (1 - m.p) * x - m.p + (m.q - x), p=bare(WIDTH), q=bare(LENGTH, WIDTH)),
    "class token": lambda: Owner(
        lambda m, x: torch.cat([m.p.expand(len(x), -1, -1), m.inner(x)], dim=1) + m.q,
        p=bare(1, 1, WIDTH),
        q=bare(1, LENGTH + 1, WIDTH),
        inner=layer(),
    ),
    "repeated token": lambda: Owner(lambda m, x: torch.cat((x, m.p.repeat(len(x), 1, 1)), 1), p=bare(1, 2, WIDTH)),
    "linear": lambda: Owner(lambda m, x: F.linear(x, m.w, m.b), w=bare(3, WIDTH), b=bare(3)),
    "products": lambda: Owner(lambda m, x: x @ m.w @ m.v.T, w=bare(WIDTH, 3), v=bare(7, 3)),
    "einsum": lambda: Owner(lambda m, x: torch.einsum("btd,edf->betf", x, m.w), w=bare(3, WIDTH, 2)),
    "experts": lambda: Owner(experts, w=bare(3, WIDTH, WIDTH), router=nn.Linear(WIDTH, 3)),
    "where": lambda: Owner(lambda m, x: torch.where(x > 0, m.p, m.inner(x)), p=bare(WIDTH), inner=layer()),
    "layer norm": lambda: Owner(lambda m, x: F.layer_norm(x, (WIDTH,), m.w, m.b), w=bare(WIDTH), b=bare(WIDTH)),
    "attention bias": lambda: Owner(attend, p=bare(LENGTH, LENGTH)),
    "attention bias of heads": lambda: Owner(attend_in_windows, p=bare(3, LENGTH, LENGTH), inner=layer()),
    "attention bias in windows": lambda: Owner(attend_in_windows, p=bare(1, 3, LENGTH, LENGTH), inner=layer()),
    "repeated positions": lambda: Owner(attend_to_positions, table=nn.Embedding(7, WIDTH), inner=layer()),
    "a repeated weight": lambda: Owner(lambda m, x: m.inner(x) @ m.p.repeat(4, 1).T, p=bare(2, WIDTH), inner=layer()),
    "weight norm": lambda: Owner(normalised, size=bare(3, 1), direction=bare(3, WIDTH)),
    "masked weight": lambda: Owner(
        lambda m, x: F.linear(x, m.w * m.mask), w=bare(3, WIDTH), mask=torch.ones(3, WIDTH).tril()
    ),
    "used twice": lambda: Owner(lambda m, x: m.p * torch.tanh(m.p * x) + m.p, p=bare(WIDTH)),
    "given to a layer": lambda: Owner(lambda m, x: x + m.inner(m.p), p=bare(1, LENGTH, WIDTH), inner=layer()),
    "table by ids": lambda: Owner(lambda m, x: x + m.p[(x[..., 0] > 0).long() - 1], p=bare(3, WIDTH)),
    "embedding": lambda: Owner(
        lambda m, x: x + F.embedding((x[..., 0] > 0).long(), m.p, padding_idx=0), p=bare(2, WIDTH)
    ),
    "in place": lambda: Owner(write_in_place, p=bare(WIDTH), q=bare(LENGTH, WIDTH), inner=layer()),
    "written rows": lambda: Owner(write_rows, p=bare(WIDTH), inner=layer()),
    "under no_grad": lambda: Owner(clamp_without_gradients, p=bare(WIDTH)),
    "detached": lambda: Owner(lambda m, x: x * m.p * m.p.detach().abs().mean() + m.p.data, p=bare(WIDTH)),
    "a power": lambda: Owner(lambda m, x: (x.abs() + 0.1) ** m.p, p=bare(WIDTH)),
    "functions of parameters": lambda: Owner(
        lambda m, x: x * m.p.mean() + torch.stack([m.p, m.q]).softmax(0).sum(0), p=bare(WIDTH), q=bare(WIDTH)
    ),
    "scaled sum": lambda: Owner(lambda m, x: torch.add(x, m.p, alpha=0.5), p=bare(WIDTH)),
    "folded": lambda: Owner(lambda m, x: (x.reshape(-1, WIDTH) * m.p).view(x.shape), p=bare(WIDTH)),
    "parameter list": lambda: Owner(
        lambda m, x: x * m.of[0] + m.of[1], of=nn.ParameterList([bare(WIDTH), bare(LENGTH, WIDTH)])
    ),
    "overlapping views": lambda: Owner(
        lambda m, x: x @ m.p.unfold(0, WIDTH, 1) + m.q.as_strided((LENGTH, WIDTH), (1, 1)),
        p=bare(2 * WIDTH - 1),
        q=bare(LENGTH + WIDTH - 1),
    ),
    "of two modules": lambda: Owner(lambda m, x: x * (m.a() + m.b()), a=giver(LENGTH, 1), b=giver(1, WIDTH)),
    "weight and bias of two modules": lambda: Owner(lambda m, x: F.linear(x, m.a(), m.b()), a=giver(3, 6), b=giver(3)),
    "given to a module": lambda: Owner(
        lambda m, x: x + m.inner(m.p), p=bare(1, LENGTH, WIDTH), inner=Owner(lambda m, x: x * m.p, p=bare(WIDTH))
    ),
    "beside an empty tensor": lambda: Owner(
        lambda m, x: torch.cat([x.new_empty(0), m.p.expand(len(x), -1, -1), x], 1), p=bare(1, 2, WIDTH)
    ),
    "cosines": lambda: Owner(lambda m, x: F.normalize(x, dim=-1) @ F.normalize(m.w, dim=-1).T, w=bare(3, WIDTH)),
    "clamped in place": lambda: Owner(clamp_in_place, p=bare(WIDTH)),
    "the whole answer": lambda: Owner(lambda m, x: m.p.expand(len(x), -1), p=bare(3)),
}


class TwicePositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = bare(1, LENGTH, WIDTH)

    def forward(self):
        return 2 * self.p


FOLLOWED |= {
    "given back to the parent": lambda: Owner(
        lambda m, x: m.inner(x) + m.table(), table=TwicePositions(), inner=layer(), p=bare()
    ),
    "given to a child": lambda: Owner(
        lambda m, x: m.child((x, m.p)),
        p=bare(LENGTH, WIDTH),
        child=Owner(lambda m, x: m.inner(x[0]) + x[1], inner=layer()),
    ),
    "queries through a layer": lambda: Owner(
        lambda m, x: F.scaled_dot_product_attention(m.inner(m.p.expand(len(x), -1, -1)), x, x),
        p=bare(1, 3, WIDTH),
        inner=layer(),
    ),
    "normalised rows": lambda: Owner(
        lambda m, x: F.linear(x, F.normalize(m.w, dim=-1)) * m.t.exp(), w=bare(3, WIDTH), t=bare()
    ),
    "a layer's weight": lambda: Owner(lambda m, x: m.p * F.linear(x, m.inner.weight), p=bare(WIDTH), inner=layer()),
    "convolution": lambda: Owner(lambda m, x: F.conv1d(x.mT, m.w, m.b, padding=1).mT, w=bare(4, WIDTH, 3), b=bare(4)),
}

LEFT_TO_VMAP = {
    "time-major": lambda: Owner(lambda m, x: (x.mT.movedim(2, 0) * m.p).permute(1, 0, 2), p=bare(LENGTH, 1, WIDTH)),
    "an autograd.Function": lambda: Owner(lambda m, x: OwnProduct.apply(x, m.p), p=bare(WIDTH)),
    "complex": lambda: Owner(
        lambda m, x: torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(m.p), n=WIDTH), p=bare(4, 2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_followed_parameter_gets_the_oracles_sums(name):
    torch.manual_seed(0)
    model = nn.Sequential(layer(), FOLLOWED[name]())
    for batch, clipping in zip((3, 1, LENGTH), CLIPPING, strict=True):
        engine = assert_exact(model, {"x": torch.randn(batch, LENGTH, WIDTH)}, losses, clipping=clipping)
        assert "opaque" not in {row.kind for row in engine.explain()}


@pytest.mark.parametrize("name", LEFT_TO_VMAP)
def test_what_cannot_be_followed_runs_sample_by_sample(name):
    torch.manual_seed(0)
    for batch in (3, LENGTH):
        model = nn.Sequential(layer(), LEFT_TO_VMAP[name]())
        engine = assert_exact(model, {"x": torch.randn(batch, LENGTH, WIDTH)}, losses)
        kinds = {row.parameter: row.kind for row in engine.explain()}
        assert kinds["1.p"] == "opaque"
        assert kinds["0.weight"] == "outer"


@pytest.mark.parametrize("name", [name for name in FOLLOWED if name != "layer norm"])
def test_batches_of_other_sizes_on_one_engine_stay_exact(name):
    """Sizes meet the batch's by chance, later or at first; one sample, and none, in between."""
    torch.manual_seed(1)
    model = nn.Sequential(layer(), FOLLOWED[name]()).double()
    for sizes in ((3, LENGTH, 1, WIDTH), (1, WIDTH, 0, 2)):
        with FlashEngine(model, max_grad_norm=1.0, loss_reduction="sum") as engine:
            for size in sizes:
                batch = {"x": torch.randn(size, LENGTH, WIDTH).double()}
                engine.clear_gradients()
                private_step(engine, batch, losses)
                truth = run_oracle(model, batch, one_loss(losses), max_grad_norm=1.0)
                for key, parameter in model.named_parameters():
                    torch.testing.assert_close(parameter.grad, truth.clipped_sums[key], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "name", ["positions", "class token", "scale", "linear", "products", "einsum", "experts", "in place"]
)
def test_under_autocast_norms_are_the_oracles_up_to_rounding(name):
    torch.manual_seed(0)
    model = nn.Sequential(layer(), FOLLOWED[name]())
    batch = {"x": torch.randn(4, LENGTH, WIDTH)}

    def rounded(m, b):
        with torch.autocast("cpu", torch.bfloat16):
            return losses(m, b).float()

    truth = run_oracle(model, batch, one_loss(rounded), max_grad_norm=1.0)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        private_step(engine, batch, rounded)
    assert "opaque" not in {row.kind for row in engine.explain()}
    torch.testing.assert_close(engine.norms, truth.norms, rtol=0.03, atol=0.0)


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        if not self.training:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("budget", [None, "lean"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["positions", "class token", "in place", "experts", "given to a layer"])
def test_a_checkpointed_module_is_followed_when_it_runs_again(name, reentrant, budget):
    torch.manual_seed(0)
    model = nn.Sequential(layer(), Checkpointed(FOLLOWED[name](), reentrant)).double()
    batch = {"x": torch.randn(4, LENGTH, WIDTH).double()}
    truth = run_oracle(model.eval(), batch, one_loss(losses), max_grad_norm=1.0)
    with FlashEngine(model.train(), max_grad_norm=1.0, loss_reduction="sum", memory_budget=budget) as engine:
        private_step(engine, batch, losses)
        assert "opaque" not in {row.kind for row in engine.explain()}
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, truth.clipped_sums[key], rtol=1e-9, atol=1e-12)


def test_what_is_made_of_parameters_does_not_run_a_checkpoint_again():
    """Once in backward, as in ordinary training: not for each use, and not where dropout cannot draw."""
    runs = []

    def run(m, x):
        runs.append(m.training)
        q = torch.tanh(m.p)
        return F.dropout(m.inner(x) * q, 0.5) + q

    owner = Owner(run, p=bare(WIDTH), inner=layer())
    model = nn.Sequential(layer(), Checkpointed(owner, reentrant=False))
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        private_step(engine, {"x": torch.randn(3, LENGTH, WIDTH)}, losses)
        engine.clear_gradients()
        loss = losses(model, {"x": torch.randn(3, LENGTH, WIDTH)}).sum()
        runs.clear()
        loss.backward()
        engine.finish()
    assert len(runs) == 1


@pytest.mark.parametrize("name", ["of two modules", "given back to the parent"])
def test_hooks_on_saved_tensors_around_a_step_are_no_checkpoint(name):
    torch.manual_seed(0)
    model = nn.Sequential(layer(), FOLLOWED[name]())
    with torch.autograd.graph.save_on_cpu():
        engine = assert_exact(model, {"x": torch.randn(3, LENGTH, WIDTH)}, losses)
    assert "opaque" not in {row.kind for row in engine.explain()}


def test_a_use_inside_a_checkpoint_inside_its_module_is_left_to_vmap():
    def run(m, x):
        return checkpoint(lambda y: m.inner(y) * m.p, x, use_reentrant=False)

    model = nn.Sequential(layer(), Owner(run, p=bare(WIDTH), inner=layer()))
    engine = assert_exact(model, {"x": torch.randn(3, LENGTH, WIDTH)}, losses)
    assert {row.kind for row in engine.explain() if row.module.startswith("1")} == {"opaque"}


def test_parameters_whose_gradients_are_one_tensor_are_summed_apart():
    """Over two forward passes, which are added in place where nobody else holds the tensor."""

    def run(m, x):
        return x * (m.p + m.q) + m.r.sum()

    def both(model, batch):
        return losses(model, batch) + losses(model, {"x": 2 * batch["x"]})

    model = nn.Sequential(layer(), Owner(run, p=bare(LENGTH, WIDTH), q=bare(LENGTH, WIDTH), r=bare(WIDTH)))
    assert_exact(model, {"x": torch.randn(3, LENGTH, WIDTH)}, both)


class PositionBias(nn.Module):
    """A bias made of a table once, and masked and copied again in every block, as T5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.value = nn.Parameter(torch.randn(9, 2)), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(5)
        bias = (self.table[at[:, None] - at + 4] * 2).permute(2, 0, 1).unsqueeze(0)
        for _ in range(3):
            seen = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
            scores = (x @ x.mT).unsqueeze(1) + torch.where(seen, bias, -1e9).contiguous()
            x = x + (scores.softmax(-1) @ self.value(x).unsqueeze(1)).mean(1)
        return x.mean(1)


def test_what_all_blocks_make_of_a_parameter_is_pulled_back_once(monkeypatch):
    pulled = []

    def pull(*given, _vjp=row_derivatives._vjp):
        pulled.append(given[0].shape)
        return _vjp(*given)

    monkeypatch.setattr(row_derivatives, "_vjp", pull)
    model, batch = PositionBias(), {"x": torch.randn(4, 5, 6)}
    assert_exact(model, batch, sine_losses)
    model.zero_grad()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        private_step(engine, batch, sine_losses)
        engine.verification.schedule.pause()
        engine.zero_grad()
        pulled.clear()
        private_step(engine, batch, sine_losses)
        assert pulled == [(1, 2, 5, 5)]


def test_a_parameter_shared_by_two_modules_counts_their_cross_terms():
    one, two = FOLLOWED["scale"](), FOLLOWED["scale"]()
    two.p, two.inner.weight = one.p, one.inner.weight
    assert_exact(nn.Sequential(one, nn.Tanh(), two), {"x": torch.randn(3, LENGTH, WIDTH)}, losses)


def test_a_convolution_beside_a_class_token_runs_once_each_way_and_not_under_vmap():
    """A step calls it as ordinary training does: forward, and backward for all samples at once."""

    class Embeddings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.positions = bare(1, 1, 8), bare(1, 5, 8)
            self.patches = nn.Conv2d(3, 8, 4, 4)

        def forward(self, images):
            x = self.patches(images).flatten(2).mT
            return torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions

    model = nn.Sequential(Embeddings(), nn.Linear(8, 3))
    batch = {"x": torch.randn(4, 3, 8, 8)}
    engine = assert_exact(model, batch, losses)
    assert "opaque" not in {row.kind for row in engine.explain()}
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for _ in range(4):
            engine.clear_gradients()
            private_step(engine, batch, losses)  # the checks of the 1st, 2nd and 4th call are over
        engine.clear_gradients()
        with torch.profiler.profile(record_shapes=True) as profile:
            private_step(engine, batch, losses)
    convolutions = [event for event in profile.events() if event.name == "aten::convolution"]
    assert [event.input_shapes[0] for event in convolutions] == [[4, 3, 8, 8]]
    backward = [event for event in profile.events() if event.name == "aten::convolution_backward"]
    assert len(backward) <= 2  # for the norms, and for the clipped sum


def test_a_module_that_mixes_samples_beside_its_parameter_is_refused():
    model = nn.Sequential(layer(), Owner(lambda m, x: x * m.p + 1e-3 * x.mean(0), p=bare(WIDTH)))
    with FlashEngine(model, max_grad_norm=1.0), pytest.raises(UserError, match="samples mix"):
        model(torch.randn(3, LENGTH, WIDTH))


def test_parameters_are_the_models_own_during_and_after_forward():
    seen = []
    model = FOLLOWED["scale"]()
    run = model.run
    model.run = lambda m, x: seen.append(isinstance(m.p, nn.Parameter)) or run(m, x)
    own = model.p
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        private_step(engine, {"x": torch.randn(3, LENGTH, WIDTH)}, losses)
        assert model.p is own
        with pytest.raises(ValueError, match="broken"):
            model.run = lambda m, x: (_ for _ in ()).throw(ValueError("broken"))
            model(torch.randn(3, LENGTH, WIDTH))
    assert seen[-1]
    assert model.p is own


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_hooks_find_ordinary_parameters_while_taps_are_taken_off():
    model, kinds = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Tanh()), []
    model[0].register_forward_pre_hook(lambda module, _: kinds.append(type(module.weight)))
    with FlashEngine(model) as engine:
        model(torch.randn(3, 4))
        assert Bare in kinds
        kinds.clear()
        with engine.without_taps():
            model(torch.randn(3, 4))
    assert kinds == [Tensor]


@pytest.mark.parametrize("name", ["attention bias", "attention bias of heads", "attention bias in windows"])
def test_a_bias_of_attention_does_not_make_it_run_row_by_row(name):
    model = FOLLOWED[name]()
    with FlashEngine(model) as engine:
        losses(model, {"x": torch.randn(4, LENGTH, WIDTH)}).sum().backward()
        engine.finish()
        assert "expand_rows" in next(row.why for row in engine.explain() if row.parameter == "p")


def test_images_of_other_sizes_have_other_numbers_of_windows():
    def attend(m, x):
        windows = x.view(-1, LENGTH, WIDTH)  # as many as the image has
        return F.scaled_dot_product_attention(windows, windows, windows, attn_mask=m.p).view(x.shape)

    model = Owner(attend, p=bare(LENGTH, LENGTH))
    with FlashEngine(model, max_grad_norm=0.1) as engine:
        for windows in (2, 3, 1):
            batch = {"x": torch.randn(4, windows, LENGTH, WIDTH)}
            model.zero_grad()
            private_step(engine, batch, losses)
            with engine.without_taps():
                truth = run_oracle(model, batch, one_loss(losses), max_grad_norm=0.1)
            torch.testing.assert_close(model.p.grad, truth.clipped_sums["p"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("samples", [4, 5, 3])
def test_a_parameter_that_is_repeated_for_each_sample_keeps_its_layers_layers(samples):
    model = FOLLOWED["repeated positions"]()
    batch = {"x": torch.randn(samples, LENGTH, WIDTH)}
    assert "opaque" not in {row.kind for row in assert_exact(model, batch, losses).explain()}


@pytest.mark.parametrize("derive", [nn.utils.spectral_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_a_bias_that_is_removed_between_steps_stays_removed(derive):
    """Hooks that derive a weight run before forward: proxies are in place by then, and must not bring the bias back."""
    inner = derive(layer())
    model = nn.Sequential(layer(), inner, nn.Tanh(), layer()).eval()
    batch = {"x": torch.randn(4, LENGTH, WIDTH)}
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        private_step(engine, batch, losses)
        engine.zero_grad()
        inner.bias = None
        truth = run_oracle(model, batch, one_loss(losses), max_grad_norm=1.0)
        private_step(engine, batch, losses)
        torch.testing.assert_close(engine.norms, truth.norms, rtol=1e-5, atol=1e-6)
        for name, total in truth.clipped_sums.items():
            torch.testing.assert_close(model.get_parameter(name).grad, total, rtol=1e-4, atol=1e-5)
        assert inner.bias is None


@pytest.mark.parametrize(
    "run",
    [
        lambda m, x: torch.addcmul(x, m.table, m.p),
        lambda m, x: torch.lerp(x, m.p.expand_as(x), m.table),
        lambda m, x: torch.where(m.table > 0, x * m.p, m.p),
        lambda m, x: torch.einsum("btd,te,d->bte", x, m.table.expand(-1, 3), m.p),
    ],
)
@pytest.mark.parametrize("sizes", [(5,), (3, 5), (5, 7, 5)])
def test_a_table_of_as_many_rows_as_there_are_samples_is_not_taken_for_samples(run, sizes):
    """T = 5: in a batch of five samples a constant for each position could be one for each sample."""
    owner = Owner(run, p=bare(WIDTH), table=torch.rand(LENGTH, 1))
    model = nn.Sequential(layer(), owner)
    with FlashEngine(model, max_grad_norm=1.0, loss_reduction="sum") as engine:
        for size in sizes:
            model.zero_grad()
            batch = {"x": torch.randn(size, LENGTH, WIDTH)}
            truth = run_oracle(model, batch, one_loss(losses), max_grad_norm=1.0)
            private_step(engine, batch, losses)
            torch.testing.assert_close(engine.norms, truth.norms, rtol=1e-4, atol=1e-6)
            for name, total in truth.clipped_sums.items():
                torch.testing.assert_close(model.get_parameter(name).grad, total, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_weight_norm_is_torchs_own_and_refuses_shapes_with_which_torch_leaves_its_memory(dim):
    """Trials of an operator take other rows."""
    v = torch.randn(3, 4)
    g = torch.norm_except_dim(v, 2, dim) + 1
    torch.testing.assert_close(_weight_norm(v, g, dim), torch._weight_norm(v, g, dim))
    with pytest.raises(RuntimeError, match="must match"):
        _weight_norm(v, torch.randn(7, 5), dim)
