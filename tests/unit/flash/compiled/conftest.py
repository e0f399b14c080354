from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_graphs_from_other_tests() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
