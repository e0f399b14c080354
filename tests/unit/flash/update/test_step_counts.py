"""Step counters: known without reading them, advanced at once, and never out of step with torch's own."""

from __future__ import annotations

import copy

import torch

from dpscope.flash.update.captured_update import StepCounts


def counters_at(*values: float) -> list[torch.Tensor]:
    return [torch.tensor(value) for value in values]


def take_step(counts: StepCounts, counters: list[torch.Tensor]) -> list[int]:
    counts.begin_step()
    values = list(counts.next_values(counters))
    counts.advance(counters, values[0])
    return values


def test_counters_stay_the_tensors_they_were_and_count_on() -> None:
    counts, counters = StepCounts(), counters_at(3.0, 3.0, 3.0)
    assert [take_step(counts, counters) for _ in range(3)] == [[4] * 3, [5] * 3, [6] * 3]
    assert counters == counters_at(6.0, 6.0, 6.0)
    assert len({counter.untyped_storage().data_ptr() for counter in counters}) == 1
    assert [counter.shape for counter in counters] == [torch.Size(())] * 3


def test_known_counters_are_not_read(monkeypatch) -> None:
    counts, counters = StepCounts(), counters_at(1.0, 1.0)
    take_step(counts, counters)
    monkeypatch.setattr(torch.Tensor, "__int__", lambda counter: 1 / 0)
    assert take_step(counts, counters) == [3, 3]
    assert take_step(counts, counters[::-1]) == [4, 4]  # in another order they are known as well


def test_a_counter_that_somebody_else_advanced_is_read() -> None:
    counts, counters = StepCounts(), counters_at(1.0, 1.0)
    take_step(counts, counters)
    counters[1].add_(10)
    assert list(counts.next_values(counters)) == [3, 13]


def test_two_counts_of_the_same_counters_see_each_other() -> None:
    one, other, counters = StepCounts(), StepCounts(), counters_at(0.0, 0.0)
    assert [take_step(each, counters)[0] for each in (one, other, one, one, other)] == [1, 2, 3, 4, 5]
    assert counters == counters_at(5.0, 5.0)


def test_a_counter_that_was_moved_counts_on_where_it_is() -> None:
    counts, counters = StepCounts(), counters_at(0.0, 0.0)
    take_step(counts, counters)
    counters[0].data = counters[0].data.clone()
    assert [take_step(counts, counters), take_step(counts, counters)] == [[2, 2], [3, 3]]
    assert counters == counters_at(3.0, 3.0)


def test_counters_that_are_not_alike_are_advanced_one_by_one() -> None:
    counters = [torch.tensor(0.0), torch.tensor(0.0, dtype=torch.float64), torch.zeros(1)]
    counts = StepCounts()
    assert [take_step(counts, counters)[0] for _ in range(2)] == [1, 2]
    assert [float(counter) for counter in counters] == [2.0] * 3


def test_a_part_of_the_counters_is_advanced_alone() -> None:
    counts, counters = StepCounts(), counters_at(0.0, 0.0, 0.0)
    take_step(counts, counters)
    assert take_step(counts, counters[:2]) == [2, 2]
    assert counters == counters_at(2.0, 2.0, 1.0)


def test_copies_of_counters_are_counters_of_their_own() -> None:
    counts, counters = StepCounts(), counters_at(0.0, 0.0)
    take_step(counts, counters)
    copied = copy.deepcopy(counters)
    take_step(counts, counters)
    assert (copied, counters) == (counters_at(1.0, 1.0), counters_at(2.0, 2.0))
