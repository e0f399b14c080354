"""Whatever way the user allows TF32 in, it is seen."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from dpscope.flash.kernels.float32_products import operand_rounding

HAS_PRECISION = hasattr(torch.backends.cuda.matmul, "fp32_precision")

SETTINGS = {
    "": (0.0, 0.0),
    "torch.set_float32_matmul_precision('high')": (2.0**-11, None),
    "torch.set_float32_matmul_precision('medium')": (2.0**-11, 2.0**-8),
    "torch.backends.cuda.matmul.allow_tf32 = True": (2.0**-11, 0.0),
}
NEW_SETTINGS = {
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": (2.0**-11, 0.0),
    "torch.backends.cuda.matmul.fp32_precision = 'ieee'": (0.0, 0.0),
    "torch.backends.fp32_precision = 'tf32'": (2.0**-11, 2.0**-11),
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'": (0.0, 2.0**-8),
}


@pytest.mark.parametrize("setting", [*SETTINGS, *(NEW_SETTINGS if HAS_PRECISION else ())])
def test_the_users_setting_is_seen(setting: str) -> None:
    """In a process of its own: torch refuses to be asked in the old way once it was told in the new one."""
    code = (
        f"import torch\n{setting}\nfrom dpscope.flash.kernels.float32_products import operand_rounding as of\n"
        "print(of(torch.device('cuda')), of(torch.device('cpu')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for found, expected in zip(done.stdout.split(), {**SETTINGS, **NEW_SETTINGS}[setting], strict=True):
        assert expected is None or float(found) == expected


def test_by_default_nothing_is_rounded() -> None:
    assert operand_rounding(torch.device("cpu")) == 0.0
