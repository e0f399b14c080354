"""Links to the files that measurements left beside the page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpscope.reports.page.render import PAGE, render_page
from dpscope.reports.page.table import files_beside
from dpscope.reports.report import Report


def with_files(result, **files):
    return replace(result, spec={**result.spec, "instrument": "trace"}, files=files)


def test_a_file_that_is_there_is_linked_by_a_path_that_works_wherever_the_folder_is(make_result, tmp_path):
    name = "files/flat tiny #1/trace 100%.json.gz"
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_bytes(b"")
    results = [with_files(make_result(), trace=name, gone="files/gone.json.gz")]
    (page,) = PAGE.write(Report.of(results, folder=tmp_path), tmp_path, ())
    assert 'href="files/flat%20tiny%20%231/trace%20100%25.json.gz">trace 100%.json.gz</a>' in page.read_text()
    assert "gone.json.gz" not in page.read_text()
    assert str(tmp_path) not in page.read_text()


def test_a_page_without_files_beside_it_has_no_such_section(make_result, tmp_path):
    results = [with_files(make_result(), trace="files/gone.json.gz")]
    (page,) = PAGE.write(Report.of(results, folder=tmp_path), tmp_path, ())
    assert 'id="files"' not in page.read_text()
    assert 'href="#files"' not in page.read_text()
    assert 'id="files"' not in render_page(Report.of(results))


@pytest.mark.parametrize(
    "path", ["../secret", "/etc/passwd", "javascript:alert(1)", "a/../../secret", "", "\0", 3, None]
)
def test_nothing_outside_the_folder_is_linked_whatever_a_result_says(path, make_result, tmp_path):
    (tmp_path / "secret").write_text("")
    folder = tmp_path / "sweep"
    folder.mkdir()
    assert files_beside(Report.of([with_files(make_result(), trace=path)], folder=folder)) == []


def test_a_file_whose_name_is_a_scheme_is_a_file(make_result, tmp_path):
    (tmp_path / "javascript:alert(1)").write_text("")
    (found,) = files_beside(Report.of([with_files(make_result(), trace="javascript:alert(1)")], folder=tmp_path))
    assert found[-1] == "javascript%3Aalert%281%29"
