"""`dpscope check` on a GPU: flash clipping, kernels and all, is exact on the models that people train."""

from __future__ import annotations

import pytest
import torch

from dpscope.exactness.check import check
from tests.unit.exactness.real_models import MODELS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", MODELS)
def test_flash_is_exact_in_float32(name):
    found = check(MODELS[name], ["flash"], name=name, device="cuda")
    assert found.ok, str(found)
