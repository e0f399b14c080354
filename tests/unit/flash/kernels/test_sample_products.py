"""Which per-sample products the Gluon kernel takes, and what happens where it cannot be trusted."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from dpscope.flash.kernels import sample_products, triton_runtime
from dpscope.flash.kernels.sample_products import LONG_SAMPLES, OLDEST_GLUON, SHORT_SAMPLES, products_and_norms
from dpscope.flash.kernels.triton_runtime import has_triton
from dpscope.vocabulary import phases
from dpscope.vocabulary.phases import hearing

B, T, D, P = 3, 70, 16, 24
KERNEL_FILE = "dpscope.flash.kernels.sample_product_kernels"


def operands(batch=B, length=T, d=D, p=P, dtype=torch.bfloat16):
    return torch.randn(batch, length, d).to(dtype), torch.randn(batch, length, p).to(dtype)


class Stand:
    """Stands in for the kernel: right, unless told otherwise."""

    def __init__(self):
        self.configurations = []

    def __call__(self, x, g, tiles, programs=None):
        self.configurations.append(tiles)
        values = torch.bmm(g.float().mT, x.float()).to(g.dtype)
        return values, values.double().square().flatten(1).sum(1, keepdim=True)


@pytest.fixture
def hopper(monkeypatch):
    """A CPU counts as a GPU whose kernel has not been used yet."""
    monkeypatch.setattr(sample_products, "_has_wgmma", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(sample_products, "_checked", set())
    monkeypatch.setattr(sample_products, "_faults", [])


@pytest.fixture
def stand(hopper, monkeypatch):
    stand = Stand()
    monkeypatch.setattr(sample_products, "_launch", stand)
    return stand


def test_a_cpu_is_not_served():
    assert products_and_norms(*operands()) is None


NOT_SERVED = {
    "float16": operands(dtype=torch.float16),
    "float32": operands(dtype=torch.float32),
    "mixed dtypes": (operands()[0], operands(dtype=torch.float32)[1]),
    "one sample": operands(batch=1),
    "no sample": operands(batch=0),
    "short samples": operands(length=63),
    "no outputs": operands(p=0),
    "no inputs": operands(d=0),
    "columns that fill no word": (torch.randn(B, T, 16).bfloat16()[..., :12], operands()[1]),
    "rows off 16-byte words": operands(d=12),
    "a start off 16-byte words": (operands()[0], torch.randn(B, T, P + 8).bfloat16()[..., 1 : P + 1]),
    "one sample's values for all": (operands()[0], torch.randn(1, T, P).bfloat16().expand(B, T, P)),
    "positions innermost": (operands()[0], torch.randn(B, P, 72).bfloat16().mT[:, :T]),
    "other lengths": (operands()[0], operands(length=T + 1)[1]),
    "other batches": (operands()[0], operands(batch=B + 1)[1]),
    "no positions": (torch.randn(B, D).bfloat16(), torch.randn(B, P).bfloat16()),
}


@pytest.mark.parametrize("case", NOT_SERVED)
def test_what_the_kernel_does_not_serve_is_left_to_others(stand, case):
    assert products_and_norms(*NOT_SERVED[case]) is None
    assert stand.configurations == []


def test_what_it_serves_is_announced(stand):
    x, g = operands()
    heard = []
    with hearing(heard.append):
        values, squares = products_and_norms(x, g)
    torch.testing.assert_close(values, torch.bmm(g.mT, x))
    torch.testing.assert_close(squares.sum(1), values.double().square().sum((1, 2)))
    (launch,) = heard
    assert (launch.name, launch.family) == ("_sample_products_kernel", phases.GEMM)
    assert (launch.reads, launch.writes) == ([g, x], [values, squares])
    assert launch.flops == 2 * B * T * P * D


def test_rows_may_be_parts_of_wider_rows(stand):
    x, g = torch.randn(B, T, 64).bfloat16()[..., 8:24], torch.randn(2 * B, T, 32).bfloat16()[::2, :, :21]
    assert products_and_norms(x, g) is not None


def test_each_configuration_is_checked_before_its_first_use_and_only_then(stand):
    long, short = operands(length=400), operands()
    for pair in (short, short, long, long):
        products_and_norms(*pair)
    assert stand.configurations == [SHORT_SAMPLES] * 3 + [LONG_SAMPLES] * 3


def test_its_first_use_leaves_the_random_numbers_alone(stand):
    pair = operands()
    before = torch.get_rng_state()
    products_and_norms(*pair)
    assert torch.equal(before, torch.get_rng_state())


def failing(x, g, tiles, programs=None):
    raise RuntimeError("PassManager::run failed")


def off_by_a_rounding(x, g, tiles, programs=None):
    values, squares = Stand()(x, g, tiles)
    values[1, 0, 0] *= 1 + 2.0**-7
    return values, squares


def without_the_last_position(x, g, tiles, programs=None):
    return Stand()(x[:, :-1], g[:, :-1], tiles)


def with_norms_in_float32(x, g, tiles, programs=None):
    values, _ = Stand()(x, g, tiles)
    return values, values.float().square().flatten(1).sum(1, keepdim=True).double()


def with_norms_of_what_was_not_rounded(x, g, tiles, programs=None):
    values, squares = Stand()(x, g, tiles)
    return values, squares * (1 + 3e-5)


def with_nan_for_a_norm(x, g, tiles, programs=None):
    values, squares = Stand()(x, g, tiles)
    return values, squares * float("nan")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (failing, "RuntimeError: PassManager::run failed"),
        (off_by_a_rounding, "a product of known values is wrong"),
        (without_the_last_position, "a product of known values is wrong"),
        (with_norms_in_float32, "the norm of a product"),
        (with_norms_of_what_was_not_rounded, "the norm of a product"),
        (with_nan_for_a_norm, "the norm of a product"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_kernel_whose_first_product_is_wrong_is_off_in_this_process(stand, monkeypatch, fault, said):
    monkeypatch.setattr(sample_products, "_launch", fault)
    with pytest.warns(UserWarning, match=said) as seen:
        assert products_and_norms(*operands()) is None
    assert len(seen) == 1
    assert "off in this process" in str(seen[0].message)
    monkeypatch.setattr(sample_products, "_launch", stand)  # it is not asked again, in no configuration
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert products_and_norms(*operands()) is None
        assert products_and_norms(*operands(length=400)) is None
    assert stand.configurations == []


def test_a_triton_without_gluon_turns_the_kernel_off(hopper, monkeypatch):
    monkeypatch.delitem(sys.modules, KERNEL_FILE, raising=False)
    monkeypatch.setitem(sys.modules, "triton.experimental", None)
    with pytest.warns(UserWarning, match="triton"):
        assert products_and_norms(*operands()) is None


def test_a_capture_does_not_begin_with_the_first_use(stand, monkeypatch):
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert products_and_norms(*operands()) is None
    assert products_and_norms(*operands()) is not None


@pytest.mark.parametrize(
    ("version", "known"),
    [("3.2.0", False), ("3.5.1", False), ("3.6.0", True), ("3.7.1+git0a1b", True), ("3.10.0", True), ("4.0", True)],
)
def test_gluon_is_taken_from_the_first_version_that_was_tried(monkeypatch, version, known):
    monkeypatch.setattr(triton_runtime, "INTERPRETED", False)
    monkeypatch.setattr(triton_runtime, "triton", SimpleNamespace(__version__=version))
    assert has_triton.__wrapped__(*OLDEST_GLUON) is known


def test_no_triton_no_gluon(monkeypatch):
    monkeypatch.setattr(triton_runtime, "triton", None)
    assert has_triton.__wrapped__(*OLDEST_GLUON) is False


@pytest.mark.slow
@pytest.mark.skipif(not has_triton(*OLDEST_GLUON), reason="needs a Triton with Gluon")
def test_it_compiles_for_hopper_and_spills_nothing():
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from dpscope.flash.kernels import sample_product_kernels as kernels

    blocks = zip(("g_rows", "x_rows", "v_rows"), kernels._blocks(LONG_SAMPLES.block_k), strict=True)
    signature = {name: f"tensordesc<bf16{shape},{layout!r}>" for name, (shape, layout) in blocks}
    constants = dict(zip(("BLOCK_K", "STAGES", "LEAD"), LONG_SAMPLES, strict=True))
    signature |= {"squares": "*fp64", **dict.fromkeys(("tiles", "rows", "columns", "steps"), "i32")}
    source = GluonASTSource(
        kernels._sample_products_kernel, signature | dict.fromkeys(constants, "constexpr"), constants
    )
    options = {"num_warps": 4, "maxnreg": kernels._REGISTERS}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= 227 * 2**10
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert b".nv.local" not in compiled.asm["cubin"]
