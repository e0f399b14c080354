"""`FILE.py:function` and `package.module:function`, read in one place."""

from __future__ import annotations

import json

import pytest

from dpscope.places import Place, load_at, parse_place


@pytest.mark.parametrize(
    ("text", "place", "is_file"),
    [
        ("mine.py:make", Place("mine.py", "make"), True),
        ("C:/odd folder/mine.py:make", Place("C:/odd folder/mine.py", "make"), True),
        ("folder/mine:make", Place("folder/mine", "make"), True),
        ("package.module:make", Place("package.module", "make"), False),
    ],
)
def test_a_place_is_a_file_or_a_module_and_a_name_in_it(text, place, is_file):
    assert parse_place(text) == place
    assert (place.is_file, str(place)) == (is_file, text)


@pytest.mark.parametrize("text", ["", "mine.py", ":make", "mine.py:", "mine.py:not a name", "mine.py:a.b"])
def test_what_names_no_place_is_none(text):
    assert parse_place(text) is None


def test_what_is_there_is_loaded(tmp_path):
    (tmp_path / "mine.py").write_text(
        "ran_as = __name__\nfrom dataclasses import dataclass\n@dataclass\nclass Made: x: int\n"
    )
    assert load_at("json:dumps") is json.dumps
    assert parse_place(f"{tmp_path}/mine.py:Made").load()(3).x == 3
    assert parse_place(f"{tmp_path}/mine.py:ran_as").load() != "__main__"
    with pytest.raises(FileNotFoundError):
        parse_place(f"{tmp_path}/nowhere.py:Made").load()
