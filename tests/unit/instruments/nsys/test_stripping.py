"""A capture can be shared after stripping: figures stay, everything else is gone."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from dpscope.instruments.nsys.reading import UnreadableCapture, read_timeline
from dpscope.instruments.nsys.stripping import strip
from dpscope.instruments.nsys.summary import summarise_timeline
from tests import DATA
from tests.fake_tools.nsys_exports import a_step


@pytest.fixture
def telling(tmp_path):
    """An export with a token in the environment, in what the program printed, and in a string nobody refers to."""
    export = a_step(tmp_path / "telling.sqlite")
    export.tell(HF_TOKEN="planted-token", HOSTNAME="planted-host")
    export.string("planted-process of another user")
    return export.write()


def test_nothing_but_names_of_kernels_calls_and_ranges_is_left(telling, tmp_path):
    assert b"planted" in telling.read_bytes()
    strip(telling, tmp_path / "stripped.sqlite")
    stripped = (tmp_path / "stripped.sqlite").read_bytes()
    assert b"planted" not in stripped
    assert b"stdout.log" not in stripped
    with closing(sqlite3.connect(tmp_path / "stripped.sqlite")) as database:
        strings = {value for (value,) in database.execute("SELECT value FROM StringIds")}
    assert strings == {
        *("cudaLaunchKernel_v7000", "cudaMemcpyAsync_v3020", "backward"),
        *(text for name in ("gemm", "norms", "add", "adam") for text in (name, f"void {name}<float>(int)")),
    }


def test_the_figures_stay_as_they_were(telling, tmp_path):
    strip(telling, tmp_path / "stripped.sqlite")
    assert summarise_timeline(read_timeline(tmp_path / "stripped.sqlite")) == summarise_timeline(read_timeline(telling))


def test_stripping_replaces_an_older_copy_and_leaves_the_original(telling, tmp_path):
    before = telling.read_bytes()
    target = tmp_path / "stripped.sqlite"
    target.write_text("something old")
    strip(telling, target)
    strip(telling, target)
    assert telling.read_bytes() == before
    read_timeline(target)


def test_what_is_no_export_is_refused_before_anything_is_written(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("notes")
    target = tmp_path / "stripped.sqlite"
    target.write_text("keep me")
    with pytest.raises(UnreadableCapture):
        strip(text, target)
    assert target.read_text() == "keep me"


def test_it_is_a_command(telling, tmp_path):
    command = [sys.executable, "-m", "dpscope.instruments.nsys.stripping", telling, tmp_path / "shared.sqlite"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert "shared.sqlite" in said
    read_timeline(tmp_path / "shared.sqlite")


@pytest.mark.parametrize("path", sorted(DATA.glob("nsys*.sqlite")), ids=lambda path: path.stem)
def test_captures_in_this_repository_are_stripped(path, tmp_path):
    strip(path, tmp_path / "again.sqlite")

    def tables(database_path):
        with closing(sqlite3.connect(database_path)) as database:
            names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            return {name: sorted(database.execute(f"SELECT * FROM {name}"), key=repr) for name in names}

    assert tables(path) == tables(tmp_path / "again.sqlite")
