"""Where Chromium is, on this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str:
    """Skips the test that asks where there is none; where there has to be one (in CI), fails it."""
    refuse = pytest.fail if os.environ.get("DPSCOPE_REQUIRE_CHROMIUM") else pytest.skip
    if importlib.util.find_spec("playwright") is None:
        refuse("report.html is tested in a browser, which Playwright drives: pip install playwright")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        refuse("report.html is tested in a browser, and there is no Chromium here: apt-get install chromium")
    return found
