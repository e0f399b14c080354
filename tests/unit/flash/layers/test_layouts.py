"""Every layer family gives the oracle's sums whatever the strides of its input and of its output's gradient."""

import pytest
import torch
from torch import Tensor, nn

from dpscope.flash import FlashEngine
from tests.unit.flash.agreement import PATHS, assert_agrees, assert_exact, private_step, reference
from tests.unit.flash.flash_models import LlamaRMSNorm, randomised

BATCHES = (1, 3)


def swapped(t: Tensor) -> Tensor:
    """The last two dimensions lie the other way round in memory (dimension 0 and 1 of a matrix)."""
    return t.mT.contiguous().mT


def sample_last(t: Tensor) -> Tensor:
    return t.movedim(0, -1).contiguous().movedim(-1, 0)


def with_offset(t: Tensor) -> Tensor:
    """A slice of a larger tensor: gaps between rows, and a storage offset that no 16-byte word divides."""
    larger = torch.full([size + 3 for size in t.shape], 9, dtype=t.dtype)
    part = larger[tuple(slice(1, 1 + size) for size in t.shape)]
    part.copy_(t)
    return part


def every_second(t: Tensor) -> Tensor:
    """Elements two apart."""
    larger = torch.full([*t.shape[:-1], 2 * t.shape[-1]], 9, dtype=t.dtype)
    larger[..., ::2] = t
    return larger[..., ::2]


def channels_last(t: Tensor) -> Tensor:
    if t.dim() < 3:
        return t
    return t.movedim(1, -1).contiguous().movedim(-1, 1)


def negative_view(t: Tensor) -> Tensor:
    """A lazily negated tensor: its memory holds -t. What torch gives for the imaginary part of a conjugate."""
    return torch._neg_view(-t) if t.is_floating_point() else t


def repeated(t: Tensor) -> Tensor:
    """Strides of zero over positions, as the gradient of a sum has them; each sample keeps a value of its own."""
    first = t.flatten(1)[:, :1].view(-1, *[1] * (t.dim() - 1))
    return first.expand(t.shape)


def repeated_rows(t: Tensor) -> Tensor:
    return t.narrow(-2, 0, 1).expand(t.shape) if t.dim() > 2 else t


LAYOUTS = {
    layout.__name__: layout
    for layout in (
        swapped,
        sample_last,
        with_offset,
        every_second,
        channels_last,
        negative_view,
        repeated,
        repeated_rows,
    )
}


class Laid(torch.autograd.Function):
    """The identity: its output lies in memory as `forward_layout` says, its gradient as `backward_layout` does.

    Layouts that repeat values change the gradient; the oracle runs through the same function and sees the same one.
    """

    @staticmethod
    def forward(ctx, x, forward_layout, backward_layout):
        ctx.layout = backward_layout
        return x.clone() if forward_layout is None else forward_layout(x).detach()

    @staticmethod
    def backward(ctx, g):
        return g if ctx.layout is None else ctx.layout(g), None, None


FAMILIES = {
    "Linear of vectors": (lambda: nn.Linear(4, 5), (4,)),
    "Linear": (lambda: nn.Linear(4, 5), (3, 4)),
    "Linear of images": (lambda: nn.Linear(4, 5), (3, 2, 4)),
    "LayerNorm": (lambda: randomised(nn.LayerNorm(4)), (3, 4)),
    "LayerNorm over two dimensions": (lambda: randomised(nn.LayerNorm((3, 4))), (2, 3, 4)),
    "RMSNorm": (lambda: randomised(nn.RMSNorm(4)), (3, 4)),
    "RMSNorm of images": (lambda: randomised(nn.RMSNorm(4)), (3, 2, 4)),
    "LlamaRMSNorm": (lambda: randomised(LlamaRMSNorm(4)), (3, 4)),
    "GroupNorm of vectors": (lambda: randomised(nn.GroupNorm(2, 6)), (6,)),
    "GroupNorm": (lambda: randomised(nn.GroupNorm(2, 4)), (4, 3)),
    "GroupNorm of images": (lambda: randomised(nn.GroupNorm(2, 4)), (4, 3, 2)),
    "InstanceNorm1d": (lambda: randomised(nn.InstanceNorm1d(4, affine=True)), (4, 5)),
    "InstanceNorm2d": (lambda: randomised(nn.InstanceNorm2d(4, affine=True)), (4, 3, 2)),
    "InstanceNorm3d": (lambda: randomised(nn.InstanceNorm3d(2, affine=True)), (2, 3, 2, 2)),
    "Conv1d": (lambda: nn.Conv1d(4, 3, 2, padding=1), (4, 5)),
    "Conv2d": (lambda: nn.Conv2d(4, 4, 2, padding=1), (4, 3, 2)),
    "Conv2d with groups": (lambda: nn.Conv2d(4, 4, 2, stride=2, groups=2), (4, 4, 4)),
    "Conv2d with a circle of padding": (lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), (4, 3, 3)),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 3, 2, 2)),
    "Embedding": (lambda: nn.Embedding(5, 4, padding_idx=0), None),
    "bare parameter": (lambda: nn.PReLU(3, init=0.3), (3, 4)),
    "transposed convolution": (lambda: nn.ConvTranspose1d(3, 2, 2), (3, 4)),
    "attention": (lambda: SelfAttention(), (3, 4)),  # noqa: PLW0108 - defined below
    "LSTM": (lambda: FirstOf(nn.LSTM(4, 3, batch_first=True)), (3, 4)),
}


# Every layer in every layout. One sample alone: in layouts whose strides are odd for it, and each other one in turn.
CASES = [(3, family, layout) for family in FAMILIES for layout in LAYOUTS]
CASES += [
    (1, family, layout)
    for number, family in enumerate(FAMILIES)
    for layout in {"sample_last": 0, "channels_last": 0, list(LAYOUTS)[number % len(LAYOUTS)]: 0}
]


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class FirstOf(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


class Between(nn.Module):
    """The layer, with a trainable scale before it where x is to require a gradient."""

    def __init__(self, layer: nn.Module, x_layout, g_layout, *, x_requires_grad: bool) -> None:
        super().__init__()
        self.layer, self.x_layout, self.g_layout = layer, x_layout, g_layout
        self.before = nn.PReLU(init=0.7) if x_requires_grad else nn.Identity()

    def forward(self, x):
        x = Laid.apply(self.before(x), self.x_layout, None) if x.is_floating_point() else self.x_layout(x)
        return Laid.apply(self.layer(x), None, self.g_layout)


def losses(model, batch):
    y = model(batch["x"]) * 1.3
    return (y * torch.linspace(0.5, 1.5, y[0].numel(), dtype=y.dtype).view(y.shape[1:])).sin().flatten(1).sum(1)


def case(family: str, batch: int, x_layout, g_layout, *, x_requires_grad: bool):
    make, shape = FAMILIES[family]
    floating = shape is not None
    x = torch.randn(batch, *shape, dtype=torch.float64) if floating else torch.randint(0, 5, (batch, 3))
    layer = make()
    model = Between(layer, x_layout, g_layout, x_requires_grad=x_requires_grad and floating)
    return model.double(), {"x": x}


def contiguous(t: Tensor) -> Tensor:
    return t.contiguous()


def plain(layout):
    """The same values in order: torch's own backward passes read some layouts wrongly, or past their end."""
    return lambda t: layout(t).resolve_neg().contiguous()


def assert_exact_in_layout(family: str, batch: int, x_layout, g_layout):
    """On every path of the family; x requires a gradient where the engine chooses."""
    by_need = {True: PATHS[:1]}
    if family.startswith(("Linear", "Conv", "Embedding")):
        by_need[False] = PATHS[1:]
    for x_requires_grad, paths in by_need.items():
        model, data = case(family, batch, plain(x_layout), plain(g_layout), x_requires_grad=x_requires_grad)
        truth, c = reference(model, data, losses)
        for path in paths:
            model.zero_grad()
            model.x_layout, model.g_layout = x_layout, g_layout
            with FlashEngine(model, max_grad_norm=c, path=path) as engine:
                private_step(engine, data, losses)
            model.x_layout, model.g_layout = plain(x_layout), plain(g_layout)
            assert_agrees(model, data, losses, engine, truth, c)


@pytest.mark.parametrize(("batch", "family", "layout"), CASES)
def test_any_layout_of_the_input(batch, family, layout):
    if layout == "repeated" and "Norm" in family:
        pytest.skip("a norm of equal values is nothing but rounding")
    assert_exact_in_layout(family, batch, LAYOUTS[layout], contiguous)


@pytest.mark.parametrize(("batch", "family", "layout"), CASES)
def test_any_layout_of_the_outputs_gradient(batch, family, layout):
    if "InstanceNorm" in family and layout == "channels_last" and batch == 1:
        pytest.skip("torch's own gradient of it is wrong, and is what the engine is held against")
    assert_exact_in_layout(family, batch, contiguous, LAYOUTS[layout])


@pytest.mark.parametrize("norm", [lambda: nn.GroupNorm(2, 4), lambda: nn.InstanceNorm1d(4, affine=True)])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_norm_over_channels_between_two_transpositions(norm, batch, dtype):
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.norm = nn.Linear(3, 4), randomised(norm())

        def forward(self, x):
            return self.norm(self.before(x).transpose(1, 2)).transpose(1, 2)

    assert_exact(
        Transposed().to(dtype), {"x": torch.randn(batch, 5, 3, dtype=dtype)}, lambda m, b: m(b["x"]).sin().sum((1, 2))
    )


@pytest.mark.parametrize("norm", [lambda: nn.GroupNorm(2, 4), lambda: nn.InstanceNorm2d(4, affine=True)])
def test_a_norm_over_channels_right_before_a_sum_over_positions(norm):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), randomised(norm()))
    assert_exact(model, {"x": torch.randn(3, 3, 4, 5)}, lambda m, b: m(b["x"]).sum((2, 3)).sin().sum(1))
