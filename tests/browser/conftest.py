"""A real Chromium without a network, and pages of real results for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from . import sweeps

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
DESKTOP = {"width": 1280, "height": 900}


def _missing(what: str) -> None:
    if os.environ.get("DPSCOPE_REQUIRE_CHROMIUM"):
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Of the package, not of the session: while it is open, no other test could run an event loop."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("report.html is tested in a browser: pip install playwright")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        _missing("report.html is tested in a browser, and there is no Chromium here: apt-get install chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture
def complaints() -> list[str]:
    """What a page should not have done in this test: errors, dialogs, requests. It is empty at the end of the test."""
    return []


@pytest.fixture
def open_page(browser: Browser, complaints: list[str]) -> Iterator[Callable[..., Page]]:
    """Open a file as a reader does, offline; keywords are the context's, such as `viewport` and `color_scheme`."""
    contexts = []

    def open_file(path: Path, **options: Any) -> Page:
        context = browser.new_context(**{"offline": True, "viewport": DESKTOP, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(5_000)
        page.on("console", lambda said: said.type in ("error", "warning") and complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        # One file is all there is: neither the network nor a neighbour in the folder is asked for anything.
        allowed = (path.as_uri(), "data:", "blob:")
        page.on("request", lambda asked: asked.url.startswith(allowed) or complaints.append(f"asked for {asked.url}"))
        page.goto(path.as_uri())
        assert not complaints  # at once, rather than after waiting for what a broken page never shows
        return page

    yield open_file
    for context in contexts:
        context.close()
    assert not complaints


@pytest.fixture(scope="package")
def measured(browser: Browser, make_spec: Callable[..., Any]) -> list[Any]:
    """A real sweep, measured once. (After the browser is known to be there: without one nothing is measured.)"""
    return sweeps.measure_sweep(make_spec)


@pytest.fixture(scope="package")
def page_from(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def make(results: list[Any]) -> Path:
        return sweeps.page_of(sweeps.write_sweep(tmp_path_factory.mktemp("sweep"), results))

    return make


@pytest.fixture(scope="package")
def cpu_page(measured: list[Any], page_from: Callable[..., Path]) -> Path:
    """Twelve rows measured here by every instrument."""
    return page_from(measured)


@pytest.fixture(scope="package")
def h200_page(page_from: Callable[..., Path]) -> Path:
    """What an H200 gave."""
    return page_from(sweeps.read_h200())


@pytest.fixture(scope="package")
def large_page(measured: list[Any], page_from: Callable[..., Path]) -> Path:
    """Two hundred rows, each with every instrument."""
    return page_from(sweeps.multiply(measured))


@pytest.fixture(scope="package")
def hostile_page(measured: list[Any], page_from: Callable[..., Path]) -> Path:
    return page_from(sweeps.make_hostile(measured))


@pytest.fixture(scope="package")
def broken_page(measured: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows that failed, rows that nobody finished, and files that are no results."""
    folder = sweeps.write_sweep(tmp_path_factory.mktemp("sweep"), sweeps.break_some(measured))
    sweeps.add_damaged_files(folder, measured)
    return sweeps.page_of(folder)
