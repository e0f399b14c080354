"""Build the site: `python docs/site/build.py FOLDER`. Every warning, a dead link among them, is an error."""

from __future__ import annotations

import gc
import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def build(folder: Path) -> int:
    """Write the site into `folder` and return Sphinx's exit code."""
    from sphinx.cmd.build import main

    work = folder.absolute().parent / ".sphinx_cache"  # beside the site, which holds pages only
    strict = ["--quiet", "--fail-on-warning", "--keep-going"]
    fresh = ["--fresh-env", "--write-all"]  # every page lists all others
    return main([*strict, *fresh, "-c", str(HERE), "-d", str(work), str(ROOT), str(folder)])


if __name__ == "__main__":
    if importlib.util.find_spec("sphinx") is None:
        sys.exit("Error: the site needs Sphinx, on Python 3.11 or newer: pip install '.[docs]'")
    folder = Path(sys.argv[1])
    gc.disable()  # a quarter of the time, in a process that ends with its work
    if code := build(folder):
        sys.exit(code)
    print(f"Open: {folder / 'index.html'}")
