"""A made-up sample stands in for none."""

from __future__ import annotations

import torch

from dpscope.flash.torch_side.arguments import make_up_sample, without_rows


def test_tensors_without_rows_get_one_of_zeros_and_others_stay() -> None:
    table = torch.ones(4, 2)
    call = make_up_sample((torch.empty(0, 3, dtype=torch.long),), {"mask": torch.empty(0, 5), "table": table})
    assert call is not None
    (ids,), kwargs = call
    assert ids.tolist() == [[0, 0, 0]]
    assert kwargs["mask"].shape == (1, 5)
    assert torch.equal(kwargs["table"], table)
    assert make_up_sample((table,), {}) is None


def test_outputs_are_cut_to_no_rows_and_give_no_gradient() -> None:
    x = torch.ones(1, 3, requires_grad=True)
    cut = without_rows({"logits": x * 2, "loss": torch.tensor(1.0)})
    assert cut["logits"].shape == (0, 3)
    assert cut["loss"] == 1
    cut["logits"].mean().backward()
    assert not x.grad.any()
