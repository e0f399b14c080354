"""The charting library is the one that was published, with its licences beside it."""

from __future__ import annotations

import hashlib
import re

from dpscope.reports.page.render import HERE

VENDOR = HERE / "vendor"


def test_the_library_is_what_its_authors_published():
    stated = re.search(r"sha256 `([0-9a-f]{64})`", (VENDOR / "README.md").read_text())
    assert hashlib.sha256((VENDOR / "echarts.common.min.js").read_bytes()).hexdigest() == stated.group(1)


def test_licences_come_with_it():
    assert "Apache License" in (VENDOR / "echarts.LICENSE").read_text()
    assert "Apache ECharts" in (VENDOR / "echarts.NOTICE").read_text()
    assert "Bostock" in (VENDOR / "echarts.LICENSE-d3").read_text()
