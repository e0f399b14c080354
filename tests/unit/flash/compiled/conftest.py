from collections.abc import Iterator

import pytest
import torch

from tests.torch_here import CAN_COMPILE


@pytest.fixture(autouse=True)
def _no_graphs_from_other_tests() -> Iterator[None]:
    if not CAN_COMPILE:
        pytest.skip("private training of compiled models takes a newer torch")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
