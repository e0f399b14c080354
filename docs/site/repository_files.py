"""Links to what lies in the repository and is no page: sources are shown as pages, other files are copied, and folders
lead to the page that speaks of them.

The site mirrors the repository, so a link is the same here and on GitHub.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util import logging

SHOWN_AS = {".py": "python", ".sh": "bash", ".toml": "toml", ".cff": "yaml", ".yml": "yaml"}
OUTSIDE = re.compile(r"[a-z]+:|//|#", re.IGNORECASE)  # another site, or a place on the same page
log = logging.getLogger(__name__)


def path_in_repository(link: str, page: str) -> str:
    """`../examples/lora.py` on the page `docs/examples` is `examples/lora.py`."""
    return os.path.normpath(PurePosixPath(page).parent / link.partition("#")[0])


def address_of(app: Sphinx, path: str) -> str:
    """Where a file or folder is shown, from the site's own root or on the repository's; empty where it is not."""
    if Path(app.srcdir, path).is_file():
        return f"{path}.html" if Path(path).suffix in SHOWN_AS else path
    if page := app.config.folder_pages.get(path):
        return f"{page}.html"
    return app.config.repository_url and app.config.repository_url + path


def link_to_files(app: Sphinx, doctree: nodes.document) -> None:
    """Replace links that MyST takes for downloads, and links to folders, which it does not know."""
    page = app.env.docname
    for node in list(doctree.findall(addnodes.download_reference)) + list(doctree.findall(addnodes.pending_xref)):
        path = path_in_repository(node["reftarget"], page)
        if isinstance(node, addnodes.pending_xref):
            # A link to a page, which MyST knows, may have the name of a folder beside it.
            if node.get("reftype") != "myst" or node.get("refdomain") == "doc" or not Path(app.srcdir, path).is_dir():
                continue
        elif not Path(app.srcdir, path).is_file():
            continue  # Sphinx says so
        address = address_of(app, path)
        if address and not OUTSIDE.match(address):
            address = os.path.relpath(address, PurePosixPath(page).parent)
        link = nodes.reference(refuri=address, file=path) if address else nodes.inline()
        link += node.children
        node.replace_self(link)


def collect_files(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Note the files that this page links to or, in HTML of its own, shows."""
    files = {node["file"] for node in doctree.findall(nodes.reference) if "file" in node}
    for raw in doctree.findall(nodes.raw):
        for link in re.findall(r'(?:src|srcset|href)="([^"]+)"', raw.astext()):
            if not OUTSIDE.match(link):
                files.add(path_in_repository(link, page))
    for file in sorted(files):
        if Path(app.srcdir, file).is_file():
            app.env.linked_files.add(file)
        elif not Path(app.srcdir, file).is_dir():
            log.warning("there is no %s in the repository", file, location=page)


def write_files(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    for file in sorted(app.env.linked_files):
        source = Path(app.srcdir, file)
        if language := SHOWN_AS.get(source.suffix):
            code = app.builder.highlighter.highlight_block(source.read_text(encoding="utf-8"), language)
            yield file, {"title": file, "body": f"<h1>{file}</h1>\n{code}"}, "page.html"
        else:
            copy = Path(app.outdir, file)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)


def begin(app: Sphinx) -> None:
    app.env.linked_files = getattr(app.env, "linked_files", set())


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("repository_url", "", "env")
    app.add_config_value("folder_pages", {}, "env")
    app.connect("builder-inited", begin)
    app.connect("doctree-read", link_to_files, priority=100)  # before Sphinx collects downloads
    app.connect("doctree-resolved", collect_files)
    app.connect("html-collect-pages", write_files)
    return {"parallel_read_safe": False, "parallel_write_safe": False}
