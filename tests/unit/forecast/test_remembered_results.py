"""An operator's result that is made anew is the one that torch made."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dpscope.forecast import remembered_results
from dpscope.forecast.cards import CARDS
from dpscope.forecast.fake_device import DEVICE, open_device
from dpscope.forecast.remembered_results import RememberedResults

CALLS = {
    "a product": lambda x: x @ x.mT,
    "a view": lambda x: x[1:, ::2],
    "a transposed view": lambda x: x.mT,
    "another dtype": lambda x: x.to(torch.bfloat16),
    "a view of another dtype": lambda x: x.view(torch.int32),
    "in place": lambda x: x.add_(1),
    "into a given one": lambda x: torch.mul(x, 2, out=torch.empty_like(x)),
    "into itself": lambda x: torch.mul(x, 2, out=x),
    "another number": lambda x: [torch.full_like(x, number) for number in (1, 2)],
    "parts": lambda x: x.chunk(3, dim=1),
    "several results": lambda x: torch.var_mean(x, dim=1),
    "a list": lambda x: torch._foreach_mul([x, x], 2.0),
    "nothing": lambda x: torch._foreach_zero_([x]),
    "values and places": lambda x: x.max(dim=1),
    "a factory": lambda x: torch.zeros(3, 2, device=DEVICE),
    "numbers of other types": lambda x: (x * 2, x * True, x.sum(0), x.sum(0, dtype=torch.float64)),
    "another shape in place": lambda x: x.unsqueeze_(0).squeeze_(0),
    "an expanded one": lambda x: x[:, :1].expand(4, 6),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 4, 6)] * 3),
}


def looks(result, x):
    """What can be seen of a result, and whether it is a view of x."""
    if isinstance(result, tuple | list):
        return type(result), [looks(each, x) for each in result]
    if not isinstance(result, Tensor):
        return result
    is_view = result.untyped_storage()._cdata == x.untyped_storage()._cdata
    size = result.untyped_storage().nbytes()
    return (
        result.dtype,
        result.shape,
        result.stride(),
        result.storage_offset(),
        result.device,
        size,
        is_view,
        result is x,
    )


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_repeated_gives_what_torch_gives(name, monkeypatch):
    computed = []
    plain = RememberedResults.call

    def call(self, func, args, kwargs, compute):
        def counted(*given):
            computed.append(func)
            return compute(*given)

        return plain(self, func, args, kwargs, counted)

    monkeypatch.setattr(RememberedResults, "call", call)
    found, counts, taken = [], [], []
    with open_device(CARDS["h200"]) as device:
        for _ in range(2):
            x = torch.empty(4, 6, device=DEVICE)
            before = device.allocator.current
            result = CALLS[name](x)
            found.append(looks(result, x))
            taken.append(device.allocator.current - before)
            del result
            counts.append(len(computed))
            computed.clear()
    assert found[0] == found[1]
    assert taken[0] == taken[1]
    if name not in ("values and places", "another shape in place"):  # named tuples and changed shapes are torch's
        assert counts[1] == 0


def test_results_of_other_sizes_strides_and_numbers_are_not_mixed_up():
    with open_device(CARDS["h200"]):
        x, y = torch.empty(4, 6, device=DEVICE), torch.empty(6, 4, device=DEVICE).mT
        assert (x + 1).stride() != (y + 1).stride()
        assert x.sum(0).shape != x.sum(1).shape
        whole, real = torch.full((2,), 1, device=DEVICE), torch.full((2,), 1.0, device=DEVICE)
        assert whole.dtype != real.dtype
        key = remembered_results.key_of(torch.ops.aten.set_.source_Tensor, (x, y), {})
        x.set_(y)
        assert RememberedResults._recipes[key] is None
