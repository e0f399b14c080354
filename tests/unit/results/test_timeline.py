"""Few of a timeline's events, and none of those that matter left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dpscope.results.timeline import thin


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
