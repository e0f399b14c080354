"""Whatever way the user allows TF32 in, it is seen; and what TF32 holds of a tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dpscope.flash.kernels import float32_products
from dpscope.flash.kernels.float32_products import operand_rounding, reads_tf32, rounded_as_cudnn, truncated_to_tf32
from tests.unit.flash.rounded_products import to_tf32

# What a user says -> how operands are rounded on CUDA and on the CPU; None: it depends on the processor.
SETTINGS: dict[str, tuple[float, float | None]] = {
    "": (0.0, 0.0),
    "torch.set_float32_matmul_precision('high')": (2.0**-11, None),
    "torch.set_float32_matmul_precision('medium')": (2.0**-11, 2.0**-8),
    "torch.backends.cuda.matmul.allow_tf32 = True": (2.0**-11, 0.0),
}
if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
    SETTINGS |= {
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'": (2.0**-11, 0.0),
        "torch.backends.cuda.matmul.fp32_precision = 'ieee'": (0.0, 0.0),
        "torch.backends.fp32_precision = 'tf32'": (2.0**-11, 2.0**-11),
        "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'": (0.0, 2.0**-8),
    }


def roundings_after(setting: str) -> list[float]:
    exec(setting, {"torch": torch})
    return [operand_rounding(torch.device(device)) for device in ("cuda", "cpu")]


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_users_setting_is_seen(setting: str, clean_copy: Callable[..., list[float]]) -> None:
    """In a process in which torch was told nothing: once told in the new way, it cannot be asked in the old one."""
    for seen, expected in zip(clean_copy(roundings_after, setting), SETTINGS[setting], strict=True):
        assert expected is None or seen == expected


def test_by_default_nothing_is_rounded() -> None:
    assert operand_rounding(torch.device("cpu")) == 0.0


def test_only_a_gpu_with_tf32_reads_its_operands_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32_products, "operand_rounding", lambda device: 2.0**-11)
    assert not reads_tf32(torch.device("cpu"))
    for capability, reads in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(float32_products, "capability", lambda index, capability=capability: capability)
        assert reads_tf32(torch.device("cuda", 0)) == (reads and torch.version.hip is None)


def test_products_of_tf32_leave_a_truncated_tensor_as_it_is() -> None:
    values = torch.randn(3, 4, 50)[:, 1:].mT * torch.logspace(-30, 30, 50).view(1, -1, 1)
    found = truncated_to_tf32(values)
    assert found.shape == values.shape
    assert (to_tf32(found) == found).all()
    assert (found.abs() <= values.abs()).all()
    assert ((values - found).abs() <= 2.0**-10 * values.abs()).all()


def test_truncation_leaves_infinity_and_nan() -> None:
    found = truncated_to_tf32(torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0]))
    assert found[:2].tolist() == [float("inf"), -float("inf")]
    assert found[2].isnan()
    assert found[3:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("operator", ["conv", "rnn"])
@pytest.mark.parametrize("allowed", [True, False])
def test_products_are_rounded_as_by_cudnn_for_a_while(
    allowed: bool, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float32_products, "capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
    gpu = torch.device("cuda", 0)
    with rounded_as_cudnn(torch.device("cpu"), operator):
        assert operand_rounding(gpu) == 0.0
    with pytest.raises(KeyError), rounded_as_cudnn(gpu, operator):
        assert (operand_rounding(gpu) > 0.0) == (allowed and torch.version.hip is None)
        raise KeyError
    assert operand_rounding(gpu) == 0.0
    assert torch.get_float32_matmul_precision() == "highest"  # torch can be asked in the old way, still
