"""Every storage once, from birth to death: what the tracker writes down of small steps whose bytes one can work out."""

from __future__ import annotations

import gc
import threading
from itertools import pairwise

import pytest
import torch
from torch import nn

from dpscope.instruments.memory import Tracker, model_holdings, track
from dpscope.vocabulary.phases import phase
from tests.unit.instruments.memory.tracked import linear_chain, use_of

KB = 1024


def bytes_of(count):
    return torch.empty(count, dtype=torch.uint8)


def levels(use):
    """Live bytes after every event, repeats left out."""
    return [total for i, total in enumerate(use.totals) if i == 0 or total != use.totals[i - 1]]


def test_live_bytes_rise_and_fall_as_storages_are_born_and_die():
    def step():
        kept = bytes_of(5 * KB)
        first = bytes_of(10 * KB)
        del first
        second = bytes_of(7 * KB)
        del second
        return kept

    use = use_of(step)
    assert levels(use) == [5 * KB, 15 * KB, 5 * KB, 12 * KB, 5 * KB, 0]
    assert use.peak_bytes == 15 * KB
    assert use.peak == 1


@pytest.mark.parametrize(
    "share",
    [
        lambda x: x.view(2, -1),
        lambda x: x[1:],
        lambda x: x.detach(),
        lambda x: x.t() if x.dim() == 2 else x.expand(3, -1),
        lambda x: x.add_(1),
        lambda x: x.mul_(2).view(-1),
        lambda x: torch.empty(0, dtype=x.dtype).set_(x),
        lambda x: nn.Parameter(x, requires_grad=False),
    ],
    ids=["view", "slice", "detach", "expand", "in-place", "in-place-view", "set_", "parameter"],
)
def test_what_shares_a_storage_is_counted_once(share):
    def step():
        x = bytes_of(4 * KB)
        shared = share(x)
        del x
        return shared.shape  # alive through the sharer

    use = use_of(step)
    assert max(use.totals) == 4 * KB
    assert levels(use) == [4 * KB, 0]


def test_a_view_keeps_the_whole_storage():
    seen = []

    def step():
        view = bytes_of(8 * KB)[:1]
        seen.append(tracker.live_bytes)
        del view
        seen.append(tracker.live_bytes)

    tracker = Tracker("cpu", nn.Identity(), lambda: ())
    with tracker.tracking():
        step()
    assert seen == [8 * KB, 0]


def test_resizing_a_tensor_or_its_storage_changes_its_bytes():
    def step():
        x = bytes_of(2 * KB)
        x.resize_(6 * KB)
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(3 * KB)
        del x

    assert levels(use_of(step)) == [2 * KB, 6 * KB, 0, 3 * KB, 0]


def test_setting_a_tensor_to_another_storage_lets_its_own_go():
    def step():
        x, y = bytes_of(2 * KB), bytes_of(3 * KB)
        x.set_(y)
        del x
        del y

    assert levels(use_of(step)) == [2 * KB, 5 * KB, 3 * KB, 0]


def test_replacing_data_moves_the_storage_without_an_operator():
    def step():
        x = bytes_of(2 * KB)
        x.data = bytes_of(3 * KB)
        del x

    assert levels(use_of(step)) == [2 * KB, 5 * KB, 3 * KB, 0]


def test_sparse_tensors_hold_their_indices_and_values():
    seen = []

    def step():
        sparse = torch.sparse_coo_tensor(torch.arange(10).view(1, 10), torch.ones(10), (1000,), check_invariants=False)
        doubled = sparse + sparse
        del sparse
        seen.append(tracker.live_bytes)
        return doubled

    tracker = Tracker("cpu", nn.Identity(), lambda: ())
    with tracker.tracking():
        step()
    assert seen == [2 * 10 * 8 + 2 * 10 * 4]  # of the sum, which is not coalesced


def test_nothing_of_the_step_is_kept_alive():
    kept = []
    x = torch.randn(64, 64, requires_grad=True)

    def step():
        y = (x @ x).relu()
        y.sum().backward()
        kept.append(y.untyped_storage()._weak_ref())

    record = track(step, device="cpu", model=nn.Identity(), holdings=lambda: ())
    assert len(record.lives) > 3
    assert torch.UntypedStorage._expired(kept[0])


def test_the_record_ends_with_the_step():
    left = []
    record = track(lambda: left.append(bytes_of(KB)), device="cpu", model=nn.Identity(), holdings=lambda: ())
    events = len(record.events)
    left.clear()
    bytes_of(KB)
    gc.collect()
    assert len(record.events) == events


def test_nothing_stays_patched_when_a_step_fails():
    original = torch.UntypedStorage.resize_
    model = nn.Linear(2, 2)

    def fail():
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        track(fail, device="cpu", model=model, holdings=lambda: ())
    assert torch.UntypedStorage.resize_ is original
    assert "resize_" not in vars(torch.UntypedStorage) or vars(torch.UntypedStorage)["resize_"] is original
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_only_the_asked_device_is_counted():
    assert use_of(lambda: (torch.empty(100, device="meta"), bytes_of(KB))).peak_bytes == KB


def test_of_several_owners_the_first_that_was_seen_has_it():
    weights = torch.zeros(100)
    use = use_of(lambda: None, holdings=[("inputs", "", weights), ("gradients", "late", weights.view(10, 10))])
    assert use.peak_components == {key: 400 if key == "inputs" else 0 for key in use.components}


# -- who asked for it ------------------------------------------------------------------------------------------------


def test_births_name_operator_phase_module_and_code():
    model, x = linear_chain(), torch.randn(4, 8)

    def step():
        with phase("forward"):
            y = model(x)
        with phase("backward"):
            y.sum().backward()

    use = use_of(step, model=model, holdings=lambda: model_holdings(model, torch.optim.SGD(model.parameters())))
    births = [life.birth for life in use.record.lives]
    relu = next(birth for birth in births if birth.operator == "aten::relu")
    assert (relu.phase, relu.module, relu.shape, relu.dtype) == ("forward", "1", (4, 32), "float32")
    assert relu.code == f"{__name__}:step"
    assert not relu.recomputed
    weight_gradient = next(b for b in births if b.shape == (32, 8) and b.phase == "backward")
    assert (weight_gradient.operator, weight_gradient.module) == ("aten::mm", "0")
    threshold = next(birth for birth in births if birth.operator == "aten::threshold_backward")
    assert threshold.module == "1"


def test_what_a_thread_of_the_users_own_makes_is_counted_when_an_operator_meets_it():
    """Autograd hands the mode on to its own threads (tests/gpu sees that), a plain thread has none."""
    x = torch.ones(1000, requires_grad=True)

    class Elsewhere(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            made = []
            thread = threading.Thread(target=lambda: made.append(g + 1))
            thread.start()
            thread.join()
            return made[0]

    use = use_of(lambda: Elsewhere.apply(x).sum().backward())
    assert use.points[-1][use.components.index("temp_matrices")] >= 4000


def test_phases_that_nest_are_cut_out_of_each_other():
    def step():
        with phase("backward"):
            first = bytes_of(1)
            with phase("clip"):
                second = bytes_of(2)
            third = bytes_of(3)
            return first, second, third

    phases = use_of(step).phases()
    assert [p["name"] for p in phases] == ["backward", "clip", "backward"]
    assert all(a["end"] == b["start"] for a, b in pairwise(phases))


def test_a_timeline_begins_with_everything_that_was_there_before():
    weights = torch.zeros(1000)
    use = use_of(lambda: -weights, holdings=[("model_parameters", "", weights), ("inputs", "", torch.zeros(3))])
    timeline = use.timeline()
    assert [point[0] for point in timeline["points"]] == [0, 1, 2]
    assert [sum(point[1:]) for point in timeline["points"]] == [4012, 8012, 4012]
    assert timeline["peak"] == 1


def test_a_long_timeline_is_thinned_and_keeps_its_peak_its_phases_and_its_highs():
    def step():
        held = []
        for i in range(3000):
            held.append(bytes_of(1))
            if i == 1234:
                bytes_of(10 * KB)
        with phase("clip"):
            held.append(bytes_of(7))
        held.extend([bytes_of(1) for _ in range(50)])
        bytes_of(4 * KB)
        held.extend([bytes_of(1) for _ in range(50)])

    use = use_of(step)
    timeline = use.timeline(limit=200)
    events = [point[0] for point in timeline["points"]]
    assert len(events) <= 200
    assert events == sorted(set(events))
    assert sum(timeline["points"][timeline["peak"]][1:]) == use.peak_bytes == 1235 + 10 * KB
    (clip,) = timeline["phases"]
    assert {clip["start"] - 1, clip["start"], clip["end"] - 1, clip["end"]} <= set(events)
    assert max(sum(point[1:]) for point in timeline["points"][len(events) // 2 :]) == 3057 + 4 * KB
    assert all(point[1:] == list(use.points[point[0]]) for point in timeline["points"])
