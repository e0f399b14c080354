"""A page of results that are not whole is whole, and says what is missing and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dpscope.results.schema import result_for
from dpscope.vocabulary.statuses import STATUSES
from tests.browser.reading import ALL_DRAWN_JS, data_of, drawings_of, hover

if TYPE_CHECKING:
    from playwright.sync_api import Page

    Reads = Callable[[Path], Page]
    Opens = Callable[..., Page]


def test_failed_rows_are_named_with_their_reasons(broken_page: Path, read_page: Reads) -> None:
    page = read_page(broken_page)
    said = page.locator("#missing").inner_text()
    for words in ("flat", "oom", "12.0 GiB asked for", "flash", "failed", "no norm for a layer of this kind"):
        assert words in said
    table = page.locator("#rows tbody tr").filter(has_text="out of memory: 12.0 GiB asked for")
    assert table.count() == 1
    assert table.is_visible()


def test_files_that_are_no_results_are_named_with_the_reason(broken_page: Path, read_page: Reads) -> None:
    said = read_page(broken_page).locator("#missing").inner_text()
    reasons = {
        "truncated.json": "not complete JSON",
        "later.json": "result schema 99",
        "foreign.json": "not a dpscope result",
        "empty.json": "not complete JSON",
    }
    lines = said.splitlines()
    for name, reason in reasons.items():
        assert any(name in line and reason in line for line in lines), name


def test_what_was_not_measured_is_said_with_the_command_that_would(broken_page: Path, read_page: Reads) -> None:
    page = read_page(broken_page)
    commands = [each.inner_text() for each in page.locator("#missing code").all()]
    assert any("--instruments memory" in command and "--seq-len 32" in command for command in commands), commands


def test_every_size_of_a_broken_sweep_can_be_looked_at(broken_page: Path, open_page: Opens) -> None:
    page = open_page(broken_page)
    drawn = []
    for size in range(len(data_of(page)["sizes"])):
        page.locator("#size").select_option(index=size)
        page.wait_for_function(ALL_DRAWN_JS)
        figures = page.locator("figure.chart").evaluate_all(LOOKED_AT_JS)
        for figure in figures:
            assert figure["shapes"] >= 2 if figure["shown"] else "Not measured at" in figure["says"], figure
        drawn.append(sum(figure["shown"] for figure in figures))
    assert max(drawn) == len(figures)
    assert 0 < min(drawn) < len(figures)


LOOKED_AT_JS = """figures => figures.map((figure) => ({
  key: figure.id,
  says: figure.querySelector(".says").innerText,
  shown: figure.querySelector(".drawing").checkVisibility(),
  shapes: figure.querySelectorAll(".drawing svg path").length,
}))"""


def _only(measured: Iterable[Any], **wanted: Any) -> list[Any]:
    return [
        r for r in measured if all({**r.spec, "method": r.experiment}[name] == value for name, value in wanted.items())
    ]


def _all_failed(measured: list[Any]) -> list[Any]:
    endings = [status for status in STATUSES if status != "ok"]
    timed = [result for result in measured if result.instrument == "time"]
    return [
        result_for(result.spec, status=status, reason=f"it was {status}, and why", environment=result.environment)
        for result, status in zip(timed, endings, strict=False)
    ]


ODD_SWEEPS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "only failed rows": _all_failed,
    "no standard": lambda measured: [r for r in measured if r.experiment != "standard"],
    "one result": lambda measured: _only(measured, method="standard", batch_size=4, instrument="time"),
    "only memory": lambda measured: _only(measured, instrument="memory"),
    "only traces": lambda measured: _only(measured, instrument="trace"),
    "only bytes": lambda measured: _only(measured, instrument="ncu"),
    "no sequence": lambda measured: [
        replace(r, spec={**r.spec, "seq_len": None}) for r in _only(measured, batch_size=2)
    ],
    "nothing filled in": lambda measured: [
        replace(r, timing={}, memory={}, timeline={}, trace={}, ncu={}) for r in measured
    ],
}


@pytest.mark.parametrize("kind", ODD_SWEEPS)
def test_an_odd_sweep_makes_a_whole_page(
    kind: str, measured: list[Any], page_from: Callable[..., Path], open_page: Opens
) -> None:
    results = ODD_SWEEPS[kind](measured)
    assert results
    page = open_page(page_from(results))
    assert page.locator("h1").is_visible()
    rows = page.locator("#rows tbody tr")
    assert rows.count() == len({(r.experiment, r.spec["batch_size"], r.spec["seq_len"]) for r in results})
    shown = page.locator("body").inner_text()
    for nonsense in ("NaN", "undefined", "null", "None", "Infinity", "[object"):
        assert nonsense not in shown
    for result in results:
        assert result.reason is None or result.reason in shown
    if data_of(page)["charts"]:
        for chart, drawing in drawings_of(page):
            assert "NaN" not in hover(page, drawing), chart["key"]
