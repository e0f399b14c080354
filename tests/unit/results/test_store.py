"""A folder of results: nothing half written is seen, nothing foreign is lost, nobody measures in it twice at once."""

from __future__ import annotations

import errno
import os
import signal
import stat

import pytest

from dpscope.errors import UserError
from dpscope.results.schema import SCHEMA_VERSION
from dpscope.results.store import ResultStore, read_result, write_atomically


@pytest.fixture
def store(tmp_path):
    store = ResultStore(tmp_path / "out")
    store.create()
    return store


def fill_with_damage(store, make_result):
    """Every kind of file that is no result of this version, by name."""
    text = make_result().to_json()
    damage = {
        "truncated.json": text[: len(text) // 2].encode(),
        "other-version.json": text.replace(f'"schema_version": {SCHEMA_VERSION}', '"schema_version": 99').encode(),
        "foreign.json": b'{"name": "package", "version": "1.0"}',
        "binary.json": bytes(range(256)) * 10,
        "empty.json": b"",
    }
    for name, content in damage.items():
        (store.results / name).write_bytes(content)
    return damage


def test_results_are_read_and_everything_else_is_named_with_a_reason(store, make_result):
    store.write("good.json", make_result())
    damage = fill_with_damage(store, make_result)
    (store.results / "folder.json").mkdir()

    results, skipped = store.read_all()

    assert {path.name: result for path, result in results.items()} == {"good.json": make_result()}
    reasons = {item.path.name: item.reason for item in skipped}
    assert set(reasons) == {*damage, "folder.json"}
    assert "not complete JSON" in reasons["truncated.json"]
    assert "schema 99" in reasons["other-version.json"]
    assert "not a dpscope result" in reasons["foreign.json"]
    assert "cannot be read" in reasons["binary.json"]
    assert "not complete JSON" in reasons["empty.json"]


def test_a_bare_folder_of_result_files_can_be_read_too(tmp_path, make_result):
    write_atomically(tmp_path / "one.json", make_result().to_json())
    results, skipped = ResultStore(tmp_path).read_all()
    assert [path.name for path in results] == ["one.json"]
    assert skipped == []


def test_making_way_puts_aside_what_is_not_ours_and_keeps_every_byte(store, make_result):
    damage = fill_with_damage(store, make_result)
    for name, content in damage.items():
        store.make_way(name)
        assert not store.path_of(name).exists()
        assert store.path_of(name).with_name(f"{name}.unreadable").read_bytes() == content


def test_putting_aside_a_second_time_overwrites_nothing(store):
    for content in ("first", "second", "third"):
        store.path_of("row.json").write_text(content)
        store.make_way("row.json")
    assert sorted(path.read_text() for path in store.results.iterdir()) == ["first", "second", "third"]
    assert store.read_all() == ({}, [])


def test_making_way_for_a_row_removes_its_old_result_and_no_other(store, make_result):
    store.write("row.json", make_result())
    store.write("other.json", make_result())
    store.make_way("row.json")
    store.make_way("never-measured.json")
    assert [path.name for path in store.results.iterdir()] == ["other.json"]


def test_replacing_a_sweep_removes_results_and_leaves_foreign_files(store, make_result):
    damage = fill_with_damage(store, make_result)
    store.write("row.json", make_result())
    (store.folder / "notes.md").write_text("mine")
    store.remove_results()
    assert {path.name for path in store.results.iterdir()} == set(damage)
    assert (store.folder / "notes.md").read_text() == "mine"


def test_a_folder_under_a_file_cannot_be_made_and_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write to .*file/sub: Not a directory; choose another folder"):
        ResultStore(tmp_path / "file" / "sub").create()


def test_a_result_file_can_be_read_by_others_and_leaves_no_temporary_file(store, make_result):
    path = store.write("row.json", make_result())
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert list(store.results.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(store, make_result, monkeypatch):
    path = store.write("row.json", make_result(median=1.0))

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*/row\.json"):
        store.write("row.json", make_result(median=2.0))
    assert read_result(path) == make_result(median=1.0)
    assert list(store.results.iterdir()) == [path]


SIZE = 2**24

WRITER = f"""
import sys
from pathlib import Path
from dpscope.results.store import write_atomically
while True:
    for letter in "ab":
        write_atomically(Path(sys.argv[1]), letter * {SIZE})
"""


@pytest.mark.slow
def test_a_writer_killed_in_the_middle_leaves_the_old_file_or_the_new_one_whole(tmp_path, start, wait_until):
    target = tmp_path / "row.json"
    target.write_text("a" * SIZE)

    def half_written():
        """Some file in the folder is neither absent nor complete: the writer is in the middle."""
        for entry in os.scandir(tmp_path):
            try:
                if entry.stat().st_size != SIZE:
                    return True
            except FileNotFoundError:
                pass  # it was a temporary one that has just taken its place
        return False

    for _ in range(6):
        for leftover in tmp_path.glob(".*.tmp"):
            leftover.unlink()
        writer = start("-c", WRITER, target)
        wait_until(half_written, "the writer is in the middle of a file", pause=0)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        text = target.read_text()
        assert len(text) == SIZE
        assert len(set(text)) == 1


def test_what_a_killed_writer_leaves_behind_is_not_taken_for_a_result(store, make_result):
    store.path_of(".row.json.abc123.tmp").write_text(make_result().to_json())
    assert store.read_all() == ({}, [])
    assert not store.holds_results()


HOLDER = """
import sys
from pathlib import Path
from dpscope.results.store import ResultStore
with ResultStore(Path(sys.argv[1])).locked():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_sweeps_do_not_measure_into_one_folder_and_a_dead_one_holds_nothing(store, start, tmp_path):
    import subprocess

    holder = start("-c", HOLDER, store.folder, stdin=subprocess.PIPE)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=r"another dpscope is measuring into .*: wait for it"), store.locked():
        pytest.fail("the folder was locked twice")

    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with store.locked():
        pass
