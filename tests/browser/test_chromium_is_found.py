"""Where there is no Chromium these tests are skipped with a sentence, except where one has to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.chromium import NAMES, find_chromium

WHAT_TO_TYPE = "there is no Chromium here: apt-get install chromium"


@pytest.fixture
def empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("DPSCOPE_REQUIRE_CHROMIUM", raising=False)
    return tmp_path


def test_without_chromium_a_test_is_skipped_with_what_to_type(empty_path: Path) -> None:
    with pytest.raises(pytest.skip.Exception, match=WHAT_TO_TYPE):
        find_chromium()


def test_where_chromium_has_to_be_its_absence_is_a_failure(empty_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPSCOPE_REQUIRE_CHROMIUM", "1")
    with pytest.raises(pytest.fail.Exception, match=WHAT_TO_TYPE):
        find_chromium()


@pytest.mark.parametrize("name", NAMES)
def test_it_is_found_by_each_of_its_names(name: str, empty_path: Path) -> None:
    program = empty_path / name
    program.touch(mode=0o755)
    assert find_chromium() == str(program)
