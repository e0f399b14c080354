import functools
import threading

import torch
from torch.utils.checkpoint import checkpoint

from dpscope.flash.torch_side.checkpoint_calls import can_be_watched, watching

partial_call = functools.partial(checkpoint, use_reentrant=False)


def test_this_torch_can_be_watched():
    assert can_be_watched()


def test_calls_are_seen_through_any_reference_and_no_longer_afterwards():
    seen = []

    def watcher(original, function, args, kwargs):
        seen.append((function, kwargs))
        return original(function, *args, **kwargs)

    x = torch.ones(2, requires_grad=True)
    closure = [cell.cell_contents for cell in checkpoint.__closure__]
    with watching(watcher):
        checkpoint(torch.sin, x, use_reentrant=True)
        assert torch.equal(partial_call(torch.cos, x), x.cos())
    partial_call(torch.tan, x)
    assert seen == [(torch.sin, {"use_reentrant": True}), (torch.cos, {"use_reentrant": False})]
    assert [cell.cell_contents for cell in checkpoint.__closure__] == closure


def test_other_threads_are_not_watched():
    seen = []
    with watching(lambda original, function, args, kwargs: seen.append(function)):
        thread = threading.Thread(target=lambda: partial_call(torch.sin, torch.ones(1)))
        thread.start()
        thread.join()
    assert seen == []
