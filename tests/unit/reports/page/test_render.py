"""The page as a file: whole whatever the results are, and nothing in them is markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markupsafe import Markup

from dpscope.reports.page.chart import Chart, Table, View
from dpscope.reports.page.render import render_page
from dpscope.reports.report import Report
from dpscope.results.store import Skipped
from tests.unit.reports.traffic_results import results_for

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(1)">\'&'


class Reader(HTMLParser):
    """The text of a page without its scripts and styles, the tags that were opened, and their attributes."""

    def __init__(self, html):
        super().__init__()
        self.words, self.tags, self.data, self._within = [], [], None, None
        self.scripts = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._within = dict(attrs).get("id") or tag

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self._within = None

    def handle_data(self, data):
        if self._within == "data":
            self.data = json.loads(data)
        elif self._within == "script":
            self.scripts.append(data)
        elif self._within is None:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def ids(self):
        return [attributes["id"] for _, attributes in self.tags if "id" in attributes]


@pytest.fixture
def page_of():
    return lambda *results, **options: Reader(render_page(Report.of(results, options.pop("skipped", ())), **options))


def test_a_page_has_headline_charts_rows_gaps_and_settings(page_of, make_result):
    page = page_of(make_result(), make_result(method="flat", median=20.0))
    ids = page.ids()
    assert len(ids) == len(set(ids))
    assert {"theme", "headline", "step-time", "rows", "filter", "missing", "configuration", "data"} <= set(ids)
    assert "size" not in ids  # with one size there is nothing to choose
    assert "flat takes 2.00× the time and 1.00× the memory of ordinary training." in page.text


def test_nothing_in_a_result_is_markup(page_of, make_result):
    result = make_result()
    spec = {**result.spec, "workload": {**result.spec["workload"], "name": HOSTILE}}
    hostile = [
        replace(result, experiment=HOSTILE, spec=spec, environment={"gpu": HOSTILE, "torch": HOSTILE}),
        replace(make_result(status="failed", reason=HOSTILE, batch_size=4), experiment=HOSTILE),
    ]
    page = page_of(*hostile, skipped=[Skipped(Path(f"{HOSTILE[:20]}.json".replace("/", "")), HOSTILE)])
    assert not any(tag == "img" or any(name.startswith("on") for name in attributes) for tag, attributes in page.tags)
    assert [attributes.get("id") for tag, attributes in page.tags if tag == "script"] == ["data", None, None]
    assert page.text.count(" ".join(HOSTILE.split())) > 5
    assert HOSTILE in json.dumps(page.data, ensure_ascii=False).replace('\\"', '"')


def test_only_the_two_scripts_of_the_page_may_run_and_nothing_may_be_loaded(page_of, make_result):
    page = page_of(make_result())
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts]
    assert re.findall(r"'sha256-([^']+)'", policy) == digests
    assert policy.startswith("default-src 'none'")
    sources = [a.get("src") or a.get("href") for tag, a in page.tags if tag in ("script", "link", "img")]
    assert all(source is None or source.startswith("data:") for source in sources)


def test_a_page_of_failed_rows_is_whole_and_says_why(page_of, make_result):
    page = page_of(*(make_result(method=m, status="oom", reason=f"{m} needs 3 GiB") for m in ("standard", "flat")))
    assert page.data["charts"] == []
    assert "standard and flat ran out of memory here." in page.text
    assert "flat needs 3 GiB" in page.text


def test_a_page_without_results_is_a_page(page_of):
    assert "What privacy costs" in page_of().text


def test_without_standard_there_are_no_ratios_and_the_reason(page_of, make_result):
    text = page_of(make_result(method="flat")).text
    assert "There are no ratios: ordinary training (standard) was not measured at this size." in text


def test_the_reader_begins_with_the_largest_of_the_most_complete_sizes(page_of, make_result):
    results = [make_result(batch_size=size, method=m) for size in (2, 8, 4) for m in ("standard", "flat")]
    results += [make_result(batch_size=64), make_result(batch_size=64, method="flat", status="oom")]
    page = page_of(*results)
    selected = [a["value"] for tag, a in page.tags if tag == "option" and "selected" in a]
    assert [page.data["sizes"][int(index)]["size"] for index in selected] == ["batch 8, sequence 8"]
    shown = [a["data-size"] for _, a in page.tags if a.get("class") == "story" and "hidden" not in a]
    assert shown == selected


def test_sizes_of_unlike_settings_are_not_confused(page_of, make_result):
    page = page_of(make_result(), make_result(dtype="bf16", median=5.0))
    assert [(size["setting"], size["size"]) for size in page.data["sizes"]] == [
        ("fp32", "batch 2, sequence 8"),
        ("bf16", "batch 2, sequence 8"),
    ]
    (chart,) = page.data["charts"]
    assert [view["setting"] for view in chart["views"]] == ["fp32", "bf16"]


def test_a_method_has_one_colour_on_the_page_and_no_other_has_it(page_of, make_result):
    """Two of another package whose names ask for the same colour, in settings of their own."""
    methods = ("standard", "method_0", "method_5", "method_7")
    results = [
        replace(make_result(dtype=dtype), experiment=method)
        for dtype, some in (("fp32", methods[:3]), ("bf16", methods[1:]))
        for method in some
    ]
    page = page_of(*results)
    (chart, *_) = page.data["charts"]
    drawn = {(bar["method"], bar["colour"]) for view in chart["views"] for bar in view["data"]["bars"]}
    assert len(drawn) == len({colour for _, colour in drawn}) == len(methods)
    shown = {a["style"].removeprefix("--method: ") for _, a in page.tags if "--method" in a.get("style", "")}
    assert shown == {colour for _, colour in drawn}


def test_environments_that_differ_are_said_loudly(page_of, make_result):
    here, there = make_result(), make_result(method="flat")
    page = page_of(here, replace(there, environment={**there.environment, "torch": "2.6.0"}))
    assert "come from 2 environments, which differ in torch (2.13.0 / 2.6.0)" in page.text


def test_what_only_one_result_knows_of_its_environment_is_no_difference(page_of, make_result):
    here, there = make_result(), make_result(method="flat")
    page = page_of(here, replace(there, environment={**there.environment, "peft": "0.21.0"}))
    assert "environments" not in page.text
    assert "PEFT 0.21.0" in page.text


def test_a_caller_adds_sections_and_charts(page_of, make_result):
    view = View(size="", says="one", data={}, table=Table(columns=("a",), rows=[(1,)]))
    chart = Chart(key="mine", title="Mine", nav_label="Mine", kind="step-time", how="so", views=[view])
    page = page_of(make_result(), title="Two sweeps", before=[Markup('<section id="both">x</section>')], charts=[chart])
    assert [each["key"] for each in page.data["charts"]] == ["mine"]
    assert "both" in page.ids()
    assert page.text.startswith("Two sweeps")


def test_two_hundred_rows_stay_within_a_megabyte_and_a_half(make_result):
    methods = ("standard", "flat", "ghost", "flash")
    results = [make_result(method=m, batch_size=size) for size in range(1, 51) for m in methods]
    assert len(render_page(Report.of(results))) < 1.5e6


def test_estimated_bytes_are_marked_in_cards_and_rows():
    page = Reader(render_page(Report.of(results_for("standard", "flat", measured=False))))
    ratios = re.findall(r"(≈?)\d+\.\d+× ≈?\d", page.text)
    assert "≈" in ratios
    assert page.data["rows"]["columns"][-1] == "dram_bytes_source"
    assert {row[-1] for row in page.data["rows"]["rows"]} == {"estimate"}
