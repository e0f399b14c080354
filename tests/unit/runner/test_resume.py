"""Which rows a resumed sweep keeps: nothing that finished is lost, nothing stale survives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpscope.errors import UserError
from dpscope.results.identity import MUST_BE_EQUAL
from dpscope.results.store import ResultStore
from dpscope.runner import sweep
from dpscope.runner.measure import collect
from dpscope.runner.sweep import Limits, finished_rows, open_store, run_sweep, still_valid
from dpscope.vocabulary.statuses import FAILED, OK, OOM, SKIPPED, TIMEOUT


@pytest.fixture
def store(tmp_path):
    store = ResultStore(tmp_path / "out")
    store.create()
    return store


@pytest.fixture
def here(make_result, monkeypatch):
    """The environment of this run: the one that `make_result` measures in."""
    environment = make_result().environment
    monkeypatch.setattr(sweep, "collect_in_child", lambda device: environment)
    return environment


class Observer:
    """Writes down what a sweep reports."""

    def __init__(self):
        self.measured, self.kept = [], []

    def row_started(self, row, spec):
        self.measured.append(spec.method)

    def row_progress(self, row, stage, done, total):
        pass

    def row_finished(self, row, result, *, kept):
        if kept:
            self.kept.append(result.experiment)


@pytest.mark.parametrize(
    ("status", "kept"), [(OK, True), (OOM, False), (SKIPPED, True), (FAILED, False), (TIMEOUT, False)]
)
def test_what_would_come_out_the_same_is_kept_and_what_may_have_been_mended_is_not(
    make_spec, make_result, here, status, kept
):
    assert still_valid(make_result(status=status), make_spec(), here) is kept


@pytest.mark.parametrize(
    ("device", "part", "kept"),
    [
        ("cuda", {"source": "measured"}, True),
        ("cuda", {"source": "estimate"}, False),
        ("cuda", {}, False),
        ("cpu", {"source": "estimate"}, True),
    ],
)
def test_an_estimate_where_ncu_could_not_count_is_measured_again(make_spec, make_result, here, device, part, kept):
    """The permission may have been given since; a CPU will never count."""
    result = replace(make_result(device=device, instrument="ncu"), ncu=part)
    assert still_valid(result, make_spec(device=device, instrument="ncu"), here) is kept


def test_running_out_of_gpu_memory_would_happen_again(make_spec, make_result, here):
    assert still_valid(make_result(status=OOM, device="cuda"), make_spec(device="cuda"), here)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dpscope", "0.0.9"),
        ("torch", "2.6.0"),
        ("opacus", "1.5.0"),
        ("gpu", "NVIDIA H200"),
        ("driver", "570.1"),
        ("cuda", "12.8"),
        ("cpu", "another processor"),
        ("threads", 64),
    ],
)
def test_a_result_from_another_environment_is_measured_again(make_spec, make_result, here, key, value):
    elsewhere = replace(make_result(), environment={**here, key: value})
    assert not still_valid(elsewhere, make_spec(), here)


def test_a_result_without_an_environment_is_measured_again(make_spec, make_result, here):
    assert not still_valid(replace(make_result(), environment={}), make_spec(), here)


def test_what_does_not_change_a_measurement_does_not_bring_it_about_again(make_spec, make_result, here):
    earlier = replace(make_result(), environment={**here, "git_commit": "0123456789ab", "platform": "Linux"})
    assert still_valid(earlier, make_spec(), here)


def test_the_environment_that_is_compared_is_recorded_in_full():
    assert set(MUST_BE_EQUAL) <= set(collect("cpu"))


def test_a_result_of_another_spec_under_this_rows_name_is_measured_again(make_spec, make_result, here, store):
    store.write(make_spec().file_name, make_result(steps=5))
    assert finished_rows(store, [make_spec()]) == {}


def test_finished_rows_are_found_among_damaged_and_foreign_files(make_spec, make_result, here, store):
    rows = {method: make_spec(method=method) for method in ("standard", "flat", "ghost")}
    store.write(rows["flat"].file_name, make_result(method="flat"))
    store.path_of(rows["standard"].file_name).write_text(make_result().to_json()[:100])
    store.path_of(rows["ghost"].file_name).write_bytes(b"\xff\xfe\x00")
    store.path_of("package.json").write_text("{}")
    assert finished_rows(store, rows.values()) == {rows["flat"]: make_result(method="flat")}


def test_nothing_is_asked_of_the_machine_when_no_row_is_there(make_spec, store, monkeypatch):
    monkeypatch.setattr(sweep, "collect_in_child", lambda device: pytest.fail("a process was started for nothing"))
    assert finished_rows(store, [make_spec()]) == {}


def test_a_resumed_sweep_measures_the_rest_and_gives_every_row_in_order(
    make_spec, make_result, here, store, monkeypatch
):
    specs = [make_spec(method=method) for method in ("standard", "flat", "ghost")]
    kept = store.write(specs[1].file_name, make_result(method="flat", median=77.0))
    before = (kept.read_bytes(), kept.stat().st_mtime_ns)
    monkeypatch.setattr(
        sweep, "launch", lambda spec, store, **_: make_result(method=spec.method)
    )  # what a child gives is test_launcher's subject
    observer = Observer()

    results = run_sweep(specs, store, resume=True, limits=Limits(), observer=observer)

    assert [result.experiment for result in results] == ["standard", "flat", "ghost"]
    assert results[1].timing["median_ms"] == 77.0
    assert (observer.measured, observer.kept) == (["standard", "ghost"], ["flat"])
    assert (kept.read_bytes(), kept.stat().st_mtime_ns) == before


def test_without_resume_every_row_is_measured(make_spec, make_result, here, store, monkeypatch):
    store.write(make_spec().file_name, make_result())
    monkeypatch.setattr(sweep, "launch", lambda spec, store, **_: make_result())
    observer = Observer()
    run_sweep([make_spec()], store, resume=False, limits=Limits(), observer=observer)
    assert (observer.measured, observer.kept) == (["standard"], [])


def test_a_folder_with_results_is_refused_unless_one_says_what_to_do_with_them(store, make_spec, make_result):
    path = store.write(make_spec().file_name, make_result())
    with pytest.raises(UserError, match=r"already holds results: add --resume .* --overwrite"):
        open_store(store, resume=False, overwrite=False)
    open_store(store, resume=True, overwrite=False)
    assert path.exists()
    open_store(store, resume=False, overwrite=True)
    assert not path.exists()


def test_damaged_and_foreign_results_count_as_results_that_are_in_the_way(store):
    store.path_of("old.json").write_text("{")
    with pytest.raises(UserError, match="already holds results"):
        open_store(store, resume=False, overwrite=False)


def test_a_second_sweep_in_the_folder_is_refused_and_removes_nothing(store, make_spec, make_result):
    path = store.write(make_spec().file_name, make_result())
    with store.locked():
        with pytest.raises(UserError, match="another dpscope is measuring"):
            run_sweep([make_spec()], ResultStore(store.folder), resume=False, limits=Limits(), observer=Observer())
        with pytest.raises(UserError, match="another dpscope is measuring"):
            open_store(ResultStore(store.folder), resume=False, overwrite=True)
    assert path.exists()
