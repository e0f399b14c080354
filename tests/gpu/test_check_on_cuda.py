"""`dpscope check` on a GPU: flash clipping, kernels and all, is exact on the models that people train."""

from __future__ import annotations

import pytest
import torch

from dpscope.exactness.check import check
from dpscope.workloads.configs import make_config
from dpscope.workloads.workload import build_workload
from tests.unit.exactness.real_models import MODELS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", MODELS)
def test_flash_is_exact_in_float32(name):
    found = check(MODELS[name], ["flash"], name=name, device="cuda")
    assert found.ok, str(found)


COMPILED = [name for name in MODELS if name != "a bare parameter"]


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_flash_is_exact_in_float32(name):
    found = check(MODELS[name], ["flash"], name=name, device="cuda", compile="default")
    assert found.ok, str(found)


def test_a_model_that_no_graph_can_hold_is_not_called_exact():
    """The root's own parameters are followed sample by sample, outside of graphs."""
    (found,) = check(MODELS["a bare parameter"], ["flash"], device="cuda", compile="default").methods
    assert found.verdict == "skipped"
    assert "compiled nothing" in found.reason


@pytest.mark.parametrize(("model", "seq_len"), [("tiny", 64), ("cnn", None)])
def test_compiled_flash_is_exact_on_the_transformer_and_the_cnn(model, seq_len):
    workload = build_workload(make_config(model), batch_size=4, seq_len=seq_len)
    found = check(workload, ["flash"], name=model, device="cuda", compile="default")
    assert found.ok, str(found)
