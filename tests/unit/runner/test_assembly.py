"""From a spec to a trainer and its batch: what a batch has to hold."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch

from dpscope.errors import UserError
from dpscope.trainers.base import require_batch_of


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(4, 2),
        (torch.zeros(4, 2), torch.zeros(4)),
        {"x": [torch.zeros(4, 2)]},
        UserDict(input_ids=torch.zeros(4, 2), attention_mask=None),  # as tokenizers give it
    ],
)
def test_samples_are_counted_in_whatever_holds_the_tensors(batch):
    require_batch_of(batch, 4)
    with pytest.raises(UserError, match="has 4 samples where --batch-size says 3"):
        require_batch_of(batch, 3)


def test_a_batch_without_tensors_is_refused():
    with pytest.raises(UserError, match="holds no tensor whose first dimension is the sample"):
        require_batch_of({"x": 3}, 4)
