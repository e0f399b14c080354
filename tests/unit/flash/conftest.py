from collections.abc import Iterator

import pytest
import torch

from tests.torch_here import CAN_COMPILE


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def fresh_graphs() -> Iterator[None]:
    """No graph of another test, and none for others."""
    if not CAN_COMPILE:
        pytest.skip("private training of compiled models takes a newer torch")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
