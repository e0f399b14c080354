"""Whatever a result's names and reasons hold is text on the page: nothing of it runs, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from . import sweeps
from .reading import drawings_of, hover, tooltips

if TYPE_CHECKING:
    from playwright.sync_api import Page


def test_markup_in_results_is_shown_and_not_run(hostile_page: Path, open_page: Callable[..., Page]) -> None:
    page = open_page(hostile_page)
    shown = page.locator("body").inner_text()
    for text in (sweeps.SCRIPT, sweeps.IMAGE, sweeps.CLOSING, sweeps.LINK, sweeps.BACKWARDS, sweeps.TEMPLATE):
        assert text in shown, f"not on the page as text: {text!r}"
    for _, drawing in drawings_of(page):
        hover(page, drawing)
    assert page.locator("img").count() == 0
    assert page.locator("a[href^='javascript:' i]").count() == 0
    assert page.evaluate("window.planted") is None


def test_a_tooltip_shows_a_hostile_name_as_text(hostile_page: Path, open_page: Callable[..., Page]) -> None:
    page = open_page(hostile_page)
    told = "".join(text for _, drawing in drawings_of(page) for text in tooltips(page, drawing))
    assert "</script><script>" in told
    assert "'\"&{{ 7 * 191 }}" in told


def test_a_hostile_page_fits_its_window(hostile_page: Path, open_page: Callable[..., Page]) -> None:
    page = open_page(hostile_page, viewport={"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_page_runs_no_script_but_its_own(
    cpu_page: Path, open_page: Callable[..., Page], complaints: list[str]
) -> None:
    page = open_page(cpu_page)
    page.evaluate("""() => {
      const script = document.createElement("script");
      script.textContent = "window.planted = 'script'";
      document.body.append(script);
      const button = document.createElement("button");
      button.setAttribute("onclick", "window.planted = 'handler'");
      document.body.append(button);
      button.click();
    }""")
    assert page.evaluate("window.planted") is None
    assert len(complaints) == 2
    assert all("Content Security Policy" in said for said in complaints)
    complaints.clear()


def test_the_page_may_load_nothing(cpu_page: Path, open_page: Callable[..., Page], complaints: list[str]) -> None:
    page = open_page(cpu_page, offline=False)
    page.evaluate("fetch('https://example.invalid/').catch(() => 0)")
    page.evaluate("""() => new Promise((refused) => {
      const image = new Image();
      image.onerror = refused;
      image.src = "https://example.invalid/pixel.png";
    })""")
    refused = [said for said in complaints if "Content Security Policy" in said]
    assert any("connect" in said.lower() for said in refused)
    assert any("image" in said.lower() for said in refused)
    complaints.clear()
