"""torch.compile without Inductor, for tests: graphs are traced and differentiated, and then run by torch's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

inductor_links = pytest.mark.skipif(
    " " in torch.__file__, reason="Inductor hands the linker torch's folder without quotes, and its path has a space"
)


@pytest.fixture
def aot_eager() -> Iterator[None]:
    """Users cannot choose this backend; tracing is the same, and takes a second instead of many."""
    compile_model = torch.compile

    def compile_without_inductor(model: torch.nn.Module, *, mode: str | None) -> object:
        return compile_model(model, backend="aot_eager")

    torch._dynamo.reset()
    with (
        mock.patch("dpscope.trainers.modes.torch.compile", compile_without_inductor),
        mock.patch("dpscope.trainers.modes.torch_folder", lambda: "/anywhere"),  # nothing is linked
    ):
        yield
    torch._dynamo.reset()
