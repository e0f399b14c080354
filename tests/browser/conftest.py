"""A real Chromium without a network, and pages of real results for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser import sweeps
from tests.browser.chromium import find_chromium
from tests.browser.reading import ALL_DRAWN_JS, STATE_JS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
DESKTOP = {"width": 1280, "height": 900}


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Of the package, not of the session: while it is open, no other test could run an event loop."""
    found = find_chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=list(FLAGS))
        yield chromium
        chromium.close()


def open_file(browser: Browser, path: Path, complaints: list[str], **options: Any) -> Page:
    """Open a file as a reader does, offline, and note what a page should not do: errors, dialogs, requests."""
    page = browser.new_context(**{"offline": True, "viewport": DESKTOP, **options}).new_page()
    page.set_default_timeout(20_000)
    page.on("console", lambda said: said.type in ("error", "warning") and complaints.append(said.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    # One file is all there is: neither the network nor a neighbour in the folder is asked for anything.
    allowed = (path.as_uri(), "data:", "blob:")
    page.on("request", lambda asked: asked.url.startswith(allowed) or complaints.append(f"asked for {asked.url}"))
    page.goto(path.as_uri())
    assert not complaints  # at once, rather than after waiting for what a broken page never shows
    return page


@pytest.fixture
def complaints() -> list[str]:
    """What a page should not have done in this test. It is empty at the end of the test."""
    return []


@pytest.fixture
def open_page(browser: Browser, complaints: list[str]) -> Iterator[Callable[..., Page]]:
    """A page of the test's own; keywords are the context's, such as `viewport` and `color_scheme`."""
    opened: list[Page] = []

    def open_own(path: Path, **options: Any) -> Page:
        opened.append(open_file(browser, path, complaints, **options))
        return opened[-1]

    yield open_own
    for page in opened:
        page.context.close()
    assert not complaints


@pytest.fixture(scope="package")
def open_once(browser: Browser) -> Iterator[Callable[[Path], tuple[Page, list[str]]]]:
    opened: dict[Path, tuple[Page, list[str]]] = {}

    def get(path: Path) -> tuple[Page, list[str]]:
        if path not in opened:
            complaints: list[str] = []
            opened[path] = open_file(browser, path, complaints), complaints
            opened[path][0].wait_for_function(ALL_DRAWN_JS)
        return opened[path]

    yield get
    for page, _ in opened.values():
        page.context.close()


@pytest.fixture
def read_page(open_once: Callable[[Path], tuple[Page, list[str]]]) -> Iterator[Callable[[Path], Page]]:
    """A page that is opened once for all tests that leave it as they found it."""
    used: list[tuple[Page, list[str], Any]] = []

    def get(path: Path) -> Page:
        page, complaints = open_once(path)
        page.mouse.move(0, 0)
        page.evaluate("() => (document.activeElement.blur(), scrollTo({ top: 0, behavior: 'instant' }))")
        used.append((page, complaints, page.evaluate(STATE_JS)))
        return page

    yield get
    for page, complaints, before in used:
        said, complaints[:] = list(complaints), []
        assert not said
        assert page.evaluate(STATE_JS) == before, "other tests read this page too: leave it as it was, or open your own"


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
    """Six rows measured here: two sizes, one of them by every instrument."""
    return page_from(measured)


@pytest.fixture(scope="package")
def h200_page(page_from: Callable[..., Path]) -> Path:
    """What an H200 gave: every kind of chart."""
    return page_from(sweeps.read_h200())


@pytest.fixture(scope="package")
def large_page(measured: list[Any], page_from: Callable[..., Path]) -> Path:
    """Two hundred rows, each with every instrument."""
    return page_from(sweeps.multiply(measured, sweeps.BATCHES))


@pytest.fixture(scope="package")
def hostile_page(measured: list[Any], page_from: Callable[..., Path]) -> Path:
    return page_from(sweeps.make_hostile(measured))


@pytest.fixture(scope="package")
def broken_page(measured: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows that failed, rows that nobody finished, and files that are no results."""
    folder = sweeps.write_sweep(tmp_path_factory.mktemp("sweep"), sweeps.break_some(measured))
    sweeps.add_damaged_files(folder, measured)
    return sweeps.page_of(folder)


@pytest.fixture(scope="package")
def against_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sweeps of an H200, before and after a change."""
    return sweeps.against_page_of(*sweeps.H200_TWICE, out=tmp_path_factory.mktemp("against"))


@pytest.fixture(scope="package")
def hostile_against_page(measured: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    now = sweeps.make_hostile(measured)
    folder = tmp_path_factory.mktemp(f"against {sweeps.FOLDER}")
    folders = [
        sweeps.write_sweep(folder / name, results)
        for name, results in (("now", now), ("before", sweeps.slow_down(now)))
    ]
    return sweeps.against_page_of(*folders, out=folder)


PAGES = ("cpu_page", "h200_page", "against_page")


@pytest.fixture(params=PAGES)
def any_page(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path
