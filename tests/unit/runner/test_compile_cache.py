"""What torch.compile makes for a sweep is kept in a folder of the sweep's own, empty where seconds are measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dpscope.runner.compile_cache import CACHE_FOLDER, compile_caches


def test_the_instruments_of_a_row_share_a_cache_that_is_gone_after_the_sweep(make_spec):
    time = make_spec(compile="default")
    memory = replace(time, instrument="memory")
    others = [replace(time, method="flash"), replace(time, batch_size=3), replace(time, compile="max-autotune")]
    with compile_caches([time, memory, *others]) as environment_of:
        folder = Path(environment_of(time)[CACHE_FOLDER])
        folder.mkdir()
        assert environment_of(memory)[CACHE_FOLDER] == str(folder)
        assert len({environment_of(spec)[CACHE_FOLDER] for spec in (time, *others)}) == 4
        assert environment_of(make_spec()) == {}
    assert not folder.parent.exists()


def test_a_sweep_that_compiles_nothing_has_none(make_spec):
    with compile_caches([make_spec()]) as environment_of:
        assert environment_of(make_spec()) == {}
