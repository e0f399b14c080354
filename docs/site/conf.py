"""The site of `make docs`: every page of the repository, where it lies, so that links work here and on GitHub."""

from __future__ import annotations

import html
import os
import re
import sys
from pathlib import Path
from typing import Any

import tomllib
from sphinx.application import Sphinx

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "src")]

from dpscope.vocabulary.version import __version__  # noqa: E402

project = "dpscope"
author = "the dpscope authors"
release = version = __version__
html_show_copyright = False

root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/zh/*.md",
    "benchmarks/results/*.md",
    "tutorials/**.ipynb",
    "tutorials/**.md",
]
# Folders that need no look. A notebook that is kept as text too is one page, the one with the outputs.
exclude_patterns = [".*", "node_modules", "site", "src", "tests"] + [
    str(text.relative_to(ROOT)) for text in ROOT.glob("tutorials/**/*.md") if text.with_suffix(".ipynb").exists()
]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.githubpages",
    "sphinx_click",
    "docstrings",
    "repository_files",
    "languages",
]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks carry their outputs

autodoc_member_order = "bysource"
napoleon_use_ivar = True  # attributes as a list, like arguments
autodoc_inherit_docstrings = False  # those of torch and Opacus are in another form
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80  # longer ones have a line for each argument
default_role = "literal"  # docstrings write `names` as Markdown does
smartquotes = False  # two hyphens begin a flag
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types in signatures: other projects', or the package's own business

html_theme = "furo"
html_title = f"dpscope {version}"
html_favicon = "static/favicon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["offline.js"]
html_extra_path = ["start"]
html_copy_source = False
html_show_sphinx = False
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/language.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
templates_path = ["templates"]
folder_pages = {"benchmarks/results": "docs/benchmarks", "examples": "docs/examples"}

# The repository's address, for "edit this page" and for files that are no pages: known where GitHub builds the site.
project_urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
if "GITHUB_REPOSITORY" in os.environ:
    repository = "{GITHUB_SERVER_URL}/{GITHUB_REPOSITORY}".format(**os.environ)
    repository_url = f"{repository}/tree/{os.environ['GITHUB_SHA']}/"
    owner, _, name = os.environ["GITHUB_REPOSITORY"].partition("/")
    html_baseurl = f"https://{owner}.github.io/{name}/"
else:
    repository = project_urls.get("Repository", "")
    html_baseurl = project_urls.get("Documentation", "")
if repository:
    html_theme_options = {"source_repository": repository, "source_branch": "main", "source_directory": ""}

DESCRIPTION = "See what differentially private training costs on a GPU, then stop paying it."


def add_social_preview(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Add the tags from which a link to the page gets its title and picture; pictures need the site's address."""
    title = html.escape(re.sub("<.*?>", "", context.get("title", project)))
    tags = {"title": title, "description": DESCRIPTION, "type": "website", "site_name": project}
    if html_baseurl:
        tags["image"] = f"{html_baseurl}_static/social.png"
    context["metatags"] = context.get("metatags", "") + "".join(
        f'<meta property="og:{name}" content="{text}" />\n' for name, text in tags.items()
    )


def keep_pictures_in_cache(app: Sphinx) -> None:
    """Keep pictures of notebooks out of the folder beside the site."""
    app.env.mystnb_config = app.env.mystnb_config.copy(output_folder=str(app.doctreedir / "notebooks"))


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", keep_pictures_in_cache, priority=900)  # after myst-nb
    app.connect("html-page-context", add_social_preview)
