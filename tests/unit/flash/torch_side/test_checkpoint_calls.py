import functools
import threading

import pytest
import torch
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint

from dpscope.flash.torch_side.checkpoint_calls import can_be_watched, watching
from dpscope.flash.torch_side.torch_version import is_at_least

partial_call = functools.partial(checkpoint, use_reentrant=False)


def test_this_torch_can_be_watched():
    assert can_be_watched()


def test_calls_are_seen_through_any_reference_and_no_longer_afterwards():
    seen = []

    def watcher(original, function, args, kwargs):
        seen.append((function, kwargs["use_reentrant"]))
        return original(function, *args, **kwargs)

    x = torch.ones(2, requires_grad=True)
    before = [cell.cell_contents for cell in checkpoint.__closure__], vars(checkpoints).copy()
    with watching(watcher):
        checkpoint(torch.sin, x, use_reentrant=True)
        assert torch.equal(partial_call(torch.cos, x), x.cos())
    partial_call(torch.tan, x)
    assert seen == [(torch.sin, True), (torch.cos, False)]
    assert ([cell.cell_contents for cell in checkpoint.__closure__], vars(checkpoints)) == before


@pytest.mark.skipif(not is_at_least((2, 14)), reason="torch has this form from 2.14 on")
def test_calls_of_functions_that_checkpoint_has_wrapped_are_seen():
    seen = []

    def watcher(original, function, args, kwargs):
        seen.append((function, kwargs["use_reentrant"]))
        return original(function, *args, **kwargs)

    x = torch.ones(2, requires_grad=True)
    sine = checkpoint(use_reentrant=False)(torch.sin)
    with watching(watcher):
        assert torch.equal(sine(x), x.sin())
        assert torch.equal(checkpoint(use_reentrant=False, early_stop=False)(torch.add)(x, other=x), 2 * x)
    assert seen == [(torch.sin, False), (torch.add, False)]


def test_other_threads_are_not_watched():
    seen = []
    with watching(lambda original, function, args, kwargs: seen.append(function)):
        thread = threading.Thread(target=lambda: partial_call(torch.sin, torch.ones(1)))
        thread.start()
        thread.join()
    assert seen == []
