"""Whatever a result's names and reasons hold is text on the page: nothing of it runs, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tests.browser import sweeps
from tests.browser.reading import drawings_of, tooltips

if TYPE_CHECKING:
    from playwright.sync_api import Page

    Reads = Callable[[Path], Page]
    Opens = Callable[..., Page]


def _is_unharmed(page: Page) -> bool:
    links = page.locator("a[href^='javascript:' i]").count()
    return not links and not page.locator("img").count() and page.evaluate("window.planted") is None


def test_markup_in_results_is_shown_and_not_run(hostile_page: Path, read_page: Reads) -> None:
    page = read_page(hostile_page)
    shown = page.locator("body").inner_text()
    for text in (sweeps.SCRIPT, sweeps.IMAGE, sweeps.CLOSING, sweeps.LINK, sweeps.BACKWARDS, sweeps.TEMPLATE):
        assert text in shown, f"not on the page as text: {text!r}"
    assert _is_unharmed(page)


def test_a_tooltip_shows_a_hostile_name_as_text(hostile_page: Path, read_page: Reads) -> None:
    page = read_page(hostile_page)
    told = {chart["key"]: "".join(tooltips(page, drawing, tries=9)) for chart, drawing in drawings_of(page)}
    for name in ("</script><script>", "'\"&{{ 7 * 191 }}"):
        assert name in told["step-time"]
    assert "onerror" in told["layers-memory"], "names of modules"
    assert _is_unharmed(page)


def test_two_hostile_sweeps_side_by_side_do_no_harm(hostile_against_page: Path, read_page: Reads) -> None:
    page = read_page(hostile_against_page)
    shown = page.locator("#against").inner_text()
    for text in (sweeps.FOLDER, sweeps.CLOSING, sweeps.TEMPLATE):
        assert text in shown, f"not on the page as text: {text!r}"
    told = "".join(text for _, drawing in drawings_of(page) for text in tooltips(page, drawing))
    assert "</script><script>" in told
    assert _is_unharmed(page)


def test_the_page_runs_no_script_but_its_own(cpu_page: Path, open_page: Opens, complaints: list[str]) -> None:
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


def test_the_page_may_load_nothing(cpu_page: Path, open_page: Opens, complaints: list[str]) -> None:
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
