"""Physical batches under BatchMemoryManager: whatever a loop leaves out, a step is of one draw."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.utils.data import DataLoader, TensorDataset

from dpscope.errors import UserError
from dpscope.flash.opacus.physical_batches import PhysicalBatches
from tests.unit.flash.private_training import clipped_mean, make_data, make_model, make_private, moved, sgd

DRAW, PART = 16, 6  # parts of 6, 5 and 5


class NumberedData(TensorDataset):
    """Samples of the small task, each with its number."""

    def __init__(self) -> None:
        task = make_data()
        super().__init__(*task.tensors, torch.arange(len(task)))


def parts(loader, optimizer):
    return BatchMemoryManager(data_loader=loader, max_physical_batch_size=PART, optimizer=optimizer)


def private(workers: int = 0, **options):
    model = make_model()
    loader = DataLoader(NumberedData(), batch_size=DRAW, num_workers=workers)
    return make_private(model, sgd(model), loader=loader, **options)


def train(model, optimizer, x, y) -> bool:
    """Take a step. Return whether it moved the model."""
    before = model[0].weight.detach().clone()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    return not torch.equal(before, model[0].weight)


def assert_step_is_of(numbers: list[int], model) -> None:
    x, y, _ = NumberedData()[numbers]
    step = moved(list(make_model().parameters()), model)
    torch.testing.assert_close(step, clipped_mean(x, y, divisor=DRAW), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_step_after_an_epoch_was_left_is_of_one_draw(workers: int) -> None:
    model, optimizer, loader = private(workers)
    with parts(loader, optimizer) as batches:
        for x, y, _ in batches:
            assert not train(model, optimizer, x, y)
            break
    seen: list[int] = []
    with parts(loader, optimizer) as batches, pytest.warns(UserWarning, match="a part of a draw was trained on"):
        for x, y, numbers in batches:
            seen += numbers.tolist()
            if train(model, optimizer, x, y):
                break
    assert seen == list(range(DRAW))
    assert_step_is_of(seen, model)


def test_sums_of_a_draw_that_was_left_are_not_added_to_a_whole_batch() -> None:
    model, optimizer, loader = private()
    with parts(loader, optimizer) as batches:
        x, y, _ = next(iter(batches))
        train(model, optimizer, x, y)
    x, y, numbers = next(iter(loader))
    with pytest.warns(UserWarning, match="a part of a draw was trained on"):
        train(model, optimizer, x, y)
    assert_step_is_of(numbers.tolist(), model)


def test_a_batch_that_the_loop_skips_moves_no_sample_to_another_draw() -> None:
    model, optimizer, loader = private()
    seen: list[int] = []
    with parts(loader, optimizer) as batches:
        for number, (x, y, numbers) in enumerate(batches):
            if number == 1:
                continue
            seen += numbers.tolist()
            if train(model, optimizer, x, y):
                break
    assert max(seen) == DRAW - 1  # the step ends with the draw
    assert_step_is_of(seen, model)


def test_a_look_into_the_loader_leaves_steps_as_they_are() -> None:
    model, optimizer, loader = private()
    seen: list[int] = []
    with parts(loader, optimizer) as batches:
        next(iter(batches))
        for x, y, numbers in batches:
            seen += numbers.tolist()
            if train(model, optimizer, x, y):
                break
    assert seen == list(range(DRAW))
    assert_step_is_of(seen, model)


def test_a_pass_whose_first_batch_is_skipped_is_refused() -> None:
    model, optimizer, loader = private()
    with parts(loader, optimizer) as batches, pytest.raises(UserError, match="BatchMemoryManager drew 1 more"):
        for number, (x, y, _) in enumerate(batches):
            if number:
                train(model, optimizer, x, y)


def test_batches_that_workers_draw_ahead_are_told_from_skipped_ones() -> None:
    announced = PhysicalBatches(ahead=2)
    goes_on = [True, True, False] * 3
    taken = []
    for number, each in enumerate(goes_on):
        announced.announce(each)
        if number >= 2 and number != 5:  # the loop skips a batch, the fourth
            taken.append(announced.take())
    taken += [announced.take() for _ in range(2)]
    assert taken == [each for number, each in enumerate(goes_on) if number != 3]
