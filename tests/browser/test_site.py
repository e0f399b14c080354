"""The site that `make docs` builds: whole, in both languages, and readable from the disk without a network."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urldefrag

import pytest

import dpscope
import dpscope.flash
from dpscope.cli import COMMANDS, main
from tests import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytest.importorskip("sphinx", reason="the site needs Sphinx, on Python 3.11 or newer: pip install '.[docs]'")

PHONE = {"width": 390, "height": 844}
# What is loaded with a page, by tag; `href` of a link that a reader follows is not.
LOADED = {("script", "src"), ("link", "href"), ("img", "src"), ("source", "srcset"), ("iframe", "src")}


class Reader(HTMLParser):
    """The links, places and language of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[tuple[str, str, str]] = []  # tag, attribute, address
        self.in_text: set[str] = set()  # addresses that the page's own text links to
        self.places: set[str] = set()
        self.language = ""
        self.is_text = False
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.is_text |= tag == "article"
        for name, value in attributes:
            if name in ("id", "name") and value:
                self.places.add(value)
            elif name in ("href", "src", "srcset") and value:
                self.links.append((tag, name, value))
                if self.is_text and name == "href":
                    self.in_text.add(urldefrag(value)[0])
            elif tag == "html" and name == "lang":
                self.language = value or ""

    def handle_endtag(self, tag: str) -> None:
        self.is_text &= tag != "article"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")}
    command = [sys.executable, str(ROOT / "docs" / "site" / "build.py"), str(folder)]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert built.stdout == f"Open: {folder / 'index.html'}\n"
    assert {path.name for path in folder.parent.iterdir()} == {"site", ".sphinx_cache"}
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Reader]:
    """Every page of the site but the example report, which has tests of its own."""
    return {path: Reader(path) for path in sorted(site.rglob("*.html")) if path.name != "example-report.html"}


def test_no_link_inside_the_site_is_dead(site, pages):
    dead = []
    for page, read in pages.items():
        for _, _, link in read.links:
            address, place = urldefrag(unquote(link.split("?")[0] if not link.startswith("#") else link))
            if ":" in address or address.startswith("//"):
                continue
            target = (page.parent / address).resolve() if address else page
            if not target.is_file() or (place and target in pages and place not in pages[target].places):
                dead.append(f"{page.relative_to(site)}: {link}")
    assert dead == []


def test_every_link_between_pages_is_a_link_on_the_site(site, pages):
    lost = []
    for page, read in pages.items():
        source = ROOT / page.relative_to(site).with_suffix(".md")
        if not source.is_file():
            continue
        for link in re.findall(r"\]\(([\w./-]+)\.(?:md|ipynb)(?:#[\w-]+)?\)", source.read_text(encoding="utf-8")):
            address = os.path.relpath(page.parent / f"{link}.html", page.parent)
            if address not in read.in_text and address != page.name:
                lost.append(f"{source.relative_to(ROOT)}: {link}")
    assert lost == []


def test_every_page_shows_the_version_an_icon_and_a_preview(site, pages):
    for page in pages:
        if page != site / "index.html":  # it leads on
            text = page.read_text(encoding="utf-8")
            assert f'brand-text">dpscope {dpscope.__version__}<' in text, page
            assert 'icon" href=' in text and 'property="og:title"' in text, page
    home = (site / "docs" / "index.html").read_text(encoding="utf-8")
    assert "pip install" in re.sub("<[^>]+>", "", home)


def test_pages_can_be_edited_where_the_repository_is_known(monkeypatch):
    for name, value in {"REPOSITORY": "someone/dpscope", "SERVER_URL": "https://github.com", "SHA": "0" * 40}.items():
        monkeypatch.setenv(f"GITHUB_{name}", value)
    settings = runpy.run_path(str(ROOT / "docs" / "site" / "conf.py"))
    assert settings["html_theme_options"]["source_repository"] == "https://github.com/someone/dpscope"
    assert settings["html_baseurl"] == "https://someone.github.io/dpscope/"
    assert (ROOT / "docs" / "site" / "static" / "social.png").is_file()


def test_pages_load_nothing_from_a_network(site, pages):
    loaded = {
        (str(page.relative_to(site)), link)
        for page, read in pages.items()
        for tag, name, link in read.links
        if (tag, name) in LOADED and (":" in link.split("/")[0] or link.startswith("//"))
    }
    assert {(page, link) for page, link in loaded if not link.startswith("data:")} == set()


def test_every_page_of_the_repository_is_in_the_table_of_contents(site, pages):
    patterns = ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "tutorials/**/*.md", "tutorials/**/*.ipynb")
    written = {file.relative_to(ROOT).with_suffix(".html") for pattern in patterns for file in ROOT.glob(pattern)}
    homes = [site / "docs" / "index.html", site / "docs" / "zh" / "index.html"]
    links = {(home.parent / urldefrag(link)[0]).resolve() for home in homes for _, _, link in pages[home].links}
    contents = {*homes, *links}
    assert [str(page) for page in sorted(written) if site / page not in contents] == []


def test_every_command_and_flag_is_there(site):
    text = (site / "docs" / "commands.html").read_text(encoding="utf-8")
    context = main.make_context("dpscope", ["doctor"])
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None and f">{name}<" in text
        flags = [flag for option in command.params for flag in option.opts if flag.startswith("--")]
        assert [flag for flag in flags if f'id="cmdoption-dpscope-{name}{flag[1:]}"' not in text] == []


@pytest.mark.parametrize("module", [dpscope, dpscope.flash], ids=lambda module: module.__name__)
def test_every_public_name_is_there(pages, site, module):
    places = pages[site / "docs" / "api.html"].places
    assert [
        name for name in module.__all__ if name != "__version__" and f"{module.__name__}.{name}" not in places
    ] == []


def test_docstrings_are_shown_as_they_are_meant(site):
    text = (site / "docs" / "api.html").read_text(encoding="utf-8")
    assert "<pre><span></span>p ← p − scale" in text, "an indented block is code"
    assert re.search(r"<strong>accountant</strong>", text), "arguments of a class are listed"
    assert "Example" in text and "&gt;&gt;&gt; " in text


def test_pages_say_their_language_and_lead_to_their_counterpart(site, pages):
    for english, chinese in (("docs/index", "docs/zh/index"), ("README", "README.zh-CN")):
        for page, language, other in ((english, "en", chinese), (chinese, "zh-CN", english)):
            read = pages[site / f"{page}.html"]
            assert read.language == language
            leads_to = {((site / page).parent / link).resolve() for tag, _, link in read.links if tag == "a"}
            assert (site / f"{other}.html").resolve() in leads_to


def test_chinese_pages_list_what_is_translated_once(site, pages):
    linked = {link for _, _, link in pages[site / "docs" / "zh" / "index.html"].links}
    assert "../../tutorials/zh/01-how-a-gpu-step-works.html" in linked
    assert "../../tutorials/01-how-a-gpu-step-works.html" not in linked
    assert "flash.html" in linked and "../flash.html" not in linked
    assert "../distributed.html" in linked


@pytest.fixture
def open_site(browser: Browser, site: Path) -> Iterator[Callable[..., Page]]:
    complaints: list[str] = []
    opened: list[Page] = []

    def open_page(name: str, **options: Any) -> Page:
        page = browser.new_context(offline=True, **options).new_page()
        page.on("console", lambda said: said.type in ("error", "warning") and complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        inside = (site.as_uri(), "data:", "blob:", "about:")
        page.on("request", lambda asked: asked.url.startswith(inside) or complaints.append(f"asked for {asked.url}"))
        page.goto((site / name).as_uri())
        opened.append(page)
        return page

    yield open_page
    for page in opened:
        page.context.close()
    assert not complaints


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("ERR_NVGPUCTRPERM", "docs/sharp-edges.html"),
        ("FlashEngine", "docs/api.html"),
        ("--per-kernel", "docs/commands.html"),
        ("显存", "docs/zh/index.html"),
        ("可选依赖", "docs/zh/getting-started.html"),
    ],
)
def test_search_works_from_the_disk_in_both_languages(open_site, words, found):
    page = open_site("docs/index.html")
    page.fill(".sidebar-search", words)
    page.press(".sidebar-search", "Enter")
    page.wait_for_selector("#search-results .search-summary")
    page.wait_for_function("() => !document.querySelector('#search-progress')?.textContent.includes('.')")
    page.wait_for_selector(f"#search-results a[href*='{found}']", timeout=30_000)


@pytest.mark.parametrize(("locale", "home"), [("en-GB", "docs/index.html"), ("zh-CN", "docs/zh/index.html")])
def test_the_first_page_is_the_home_in_the_readers_language(open_site, locale, home):
    page = open_site("index.html", locale=locale)
    page.wait_for_url(f"**/{home}")
    assert page.inner_text("h1").startswith("dpscope")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_home_shows_the_picture_of_its_theme(open_site, scheme):
    page = open_site("docs/index.html", color_scheme=scheme)
    shown = page.evaluate("""() => Array.from(document.querySelectorAll("article img"))
        .filter((image) => image.getBoundingClientRect().width > 0 && image.naturalWidth > 0)
        .map((image) => image.src.split("/").pop())""")
    assert shown == ["report.png" if scheme == "light" else "report-dark.png"]


def test_nothing_is_wider_than_a_phone(open_site, site, pages):
    page = open_site("docs/index.html", viewport=PHONE)
    wide = {}
    for path in pages:
        if path != site / "index.html":  # it leads on
            page.goto(path.as_uri(), wait_until="domcontentloaded")
            wide[str(path.relative_to(site))] = page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
    assert {name: beyond for name, beyond in wide.items() if beyond > 0} == {}
