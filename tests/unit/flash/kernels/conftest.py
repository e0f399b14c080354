"""Each kernel test runs on every backend this process can run.

Triton decides when it is imported whether kernels are compiled or interpreted, so the interpreter needs a process of
its own: test_interpreter.py runs these same files again under TRITON_INTERPRET=1.
"""

import os

import pytest
import torch

INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=["triton" if INTERPRETER else "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
