"""Each kernel test runs on every backend this process can run.

Triton decides when it is imported whether kernels are compiled or interpreted, so the interpreter needs a process of
its own: test_interpreter.py runs these same files again under TRITON_INTERPRET=1.
"""

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from dpscope.flash.kernels import kept_gradients
from dpscope.flash.kernels.tensor_lists import Cut

INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(autouse=True, scope="session")
def language_replaced_once_a_launch() -> None:
    """Triton's interpreter replaces its language anew wherever a kernel calls a function: a quarter of the tests' time.

    What it replaces stays so until the launch ends, so that once for each module that defines functions is enough.
    """
    if not INTERPRETER:
        return
    from triton import language as tl
    from triton.runtime import interpreter

    replace: Callable[..., Any] = interpreter._patch_lang
    done: set[int] = set()

    def replace_once(function: Any) -> Any:
        if id(function.__globals__) in done:
            return None
        done.add(id(function.__globals__))
        scope = replace(function)
        if scope is not None:  # before Triton 3.3 there is none, and the language stays replaced
            restore = scope.restore
            scope.restore = lambda: (done.clear(), restore())
        return scope

    interpreter._patch_lang = replace_once
    # It makes a table of all dtypes for each value; pointers have no hash.
    find, remember = interpreter._get_np_dtype, cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda kind: (remember if type(kind.scalar) is tl.dtype else find)(kind.scalar)


@pytest.fixture(params=["triton" if INTERPRETER else "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks and blocks a tensor, in kernels that add up something of each sample."""
    monkeypatch.setattr(kept_gradients, "SAMPLE_CUT", Cut(2048, 1024))
