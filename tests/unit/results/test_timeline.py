"""Few of a timeline's events, and none of those that matter left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dpscope.results.derived import PhaseSpan, Timeline, thin
from tests.unit.memory_results import MIB

MOMENTS = 400
PEAK, ACTIVATIONS, MATRICES, GRADIENTS = 1500, 1777, 2222, 2600  # events of the highest total, and of each component


def jagged(count=3000):
    """Highs of a single event, each component's at another than the peak; that of gradients hidden in the total."""
    spikes = {PEAK: 600 * MIB, ACTIVATIONS: 1000 * MIB, MATRICES: 0, GRADIENTS: 500 - 777 - (GRADIENTS * 7919) % 1000}
    levels = {
        "model_parameters": [7 * MIB] * count,
        "gradients": [777 * (n == GRADIENTS) for n in range(count)],
        "activations": [MIB + (n * 7919) % 1000 + spikes.get(n, 0) for n in range(count)],
        "temp_matrices": [{PEAK: 600 * MIB + 1, MATRICES: 1000 * MIB}.get(n, 0) for n in range(count)],
    }
    return Timeline(list(range(count)), levels, [PhaseSpan("forward", 0, 1003), PhaseSpan("backward", 1003, 2501)])


@given(st.lists(st.integers(0, 10**12), min_size=2, max_size=300), st.integers(4, 100), st.data())
def test_what_has_to_stay_stays_and_so_do_the_highest_and_the_lowest(totals, most, data):
    kept = data.draw(st.sets(st.sampled_from(range(len(totals))), max_size=most // 2))
    chosen = thin(totals, kept, most)
    assert kept <= set(chosen)
    assert {max(totals), min(totals)} <= {totals[place] for place in chosen}
    assert chosen == sorted(set(chosen))
    assert len(chosen) <= most


def test_every_stretch_keeps_its_own_peak():
    totals = [0, 5, 0, 0, 7, 0, 0, 9, 0]
    assert {1, 4, 7} <= set(thin(totals, (), 6))


def test_thinning_keeps_the_peak_and_every_components_maximum_exact():
    timeline = jagged()
    kept = timeline.moments(MOMENTS)
    assert 0.5 * MOMENTS < len(kept) <= MOMENTS
    assert {0, PEAK, ACTIVATIONS, MATRICES, GRADIENTS, 2999} <= set(kept)
    assert max(timeline.totals[n] for n in kept) == max(timeline.totals)
    for level in timeline.levels.values():
        assert max(level[n] for n in kept) == max(level)


def test_thinning_keeps_the_borders_of_phases_and_the_order():
    kept = jagged().moments(MOMENTS)
    assert {1003, 2501} <= set(kept)
    assert kept == sorted(set(kept))


def test_what_runs_in_clip_inside_backward_is_clips():
    timeline = Timeline([0, 101], {"gradients": [0, 0]}, [PhaseSpan("backward", 0, 100), PhaseSpan("clip", 40, 50)])
    assert [timeline.phase_at(event) for event in (39, 45, 50, 100)] == ["backward", "clip", "backward", None]


def test_an_event_on_a_border_of_phases_is_the_later_ones_and_the_last_event_is_in_the_phase_it_ends():
    phases = [PhaseSpan("forward", 0, 4), PhaseSpan("backward", 4, 10), PhaseSpan("clip", 6, 8)]
    timeline = Timeline(list(range(11)), {"gradients": [0] * 11}, phases)
    assert [timeline.phase_at(event) for event in (3, 4, 7, 8, 10)] == [
        "forward",
        "backward",
        "clip",
        "backward",
        "backward",
    ]
