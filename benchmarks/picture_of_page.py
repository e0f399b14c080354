"""A picture of a report.html as a reader sees it, at twice a screen's resolution: for the README.

python benchmarks/picture_of_page.py REPORT.html OUT.png [--dark] [--width 1280] [--height 800] [--full]

Needs Playwright (`pip install playwright`) and Debian's chromium.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

# A chart without figures at the chosen size is hidden, and one that cannot be drawn says so: neither is waited for.
ALL_DRAWN_JS = "() => !document.querySelector(\".drawing[aria-busy='true']:not([hidden])\")"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dark", action="store_true", help="as a reader who prefers dark pages sees it")
    parser.add_argument("--width", type=int, default=1280, help="of the window, in CSS pixels (default: 1280)")
    parser.add_argument("--height", type=int, default=800, help="of the window, in CSS pixels (default: 800)")
    parser.add_argument("--full", action="store_true", help="the whole page, not the first screen")
    asked = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        parser.error("there is no Chromium here: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(
            viewport={"width": asked.width, "height": asked.height},
            device_scale_factor=2,
            color_scheme="dark" if asked.dark else "light",
        )
        page.goto(asked.report.resolve().as_uri())
        page.wait_for_function(ALL_DRAWN_JS)
        page.screenshot(path=asked.out, full_page=asked.full)
        browser.close()


if __name__ == "__main__":
    main()
