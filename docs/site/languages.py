"""One site in two languages: which page is in which, its counterpart, the theme's words, and search for Chinese."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urljoin

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish

ENGLISH_HOME, CHINESE_HOME = "docs/index", "docs/zh/index"
IDEOGRAPHS = "\u3400-\u4dbf\u4e00-\u9fff"
FULL_WIDTH = "\u3000-\u303f\uff00-\uffef"  # punctuation
# An entry of the sidebar that has none below it.
ENTRY = re.compile(r'<li class="toctree-l1[^>]*><a [^>]*href="(?P<link>[^"#]+)">(?:(?!</li>|<ul).)*</li>')
# What the theme says, in Chinese.
WORDS = {
    "Search": "搜索",
    "Next": "下一页",
    "Previous": "上一页",
    "Home": "首页",
    "On this page": "本页内容",
    "Back to top": "回到顶部",
    "Skip to content": "跳到正文",
}


def is_chinese(page: str) -> bool:
    return "/zh/" in page or page.endswith(".zh-CN")


def counterpart(page: str) -> str:
    """The page that says the same in the other language, if somebody wrote it."""
    if is_chinese(page):
        return page.replace("/zh/", "/").removesuffix(".zh-CN")
    folder, _, name = page.rpartition("/")
    return f"{folder}/zh/{name}" if folder else f"{name}.zh-CN"


def join_lines(app: Sphinx, doctree: nodes.document) -> None:
    """A line break within Chinese is no space, though a browser would show one."""
    if not is_chinese(app.env.docname):
        return
    for paragraph in doctree.findall(nodes.TextElement):
        parts = [part for part in paragraph.findall(nodes.Text) if not isinstance(part.parent, nodes.literal_block)]
        for before, part, after in zip(parts, parts[1:], parts[2:], strict=False):
            around = str(before)[-1:] + str(after)[:1]
            if str(part) == "\n" and re.fullmatch(f"[{IDEOGRAPHS}]{{2}}|.?[{FULL_WIDTH}].?", around):
                part.parent.replace(part, nodes.Text(""))


def speak(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """What a page says around its text: the theme's words, the sidebar, and the way to the other language."""
    chinese = is_chinese(page)
    other = counterpart(page)
    if other not in app.env.all_docs:
        other = ENGLISH_HOME if chinese else CHINESE_HOME
    context["other_language"] = {"address": context["pathto"](other), "name": "English" if chinese else "中文"}
    context["other_language"]["code"] = "en" if chinese else "zh-CN"

    def page_at(link: str) -> str:
        return urljoin(f"/{page}", link).removeprefix("/").removesuffix(".html")

    def unless_translated(entry: re.Match[str]) -> str:
        return "" if counterpart(page_at(entry["link"])) in app.env.all_docs else entry[0]

    sections = re.split(r'(?=<p class="caption")', context["furo_navigation_tree"])
    in_chinese = [section for section in sections if re.search(f'caption-text">[^<]*[{IDEOGRAPHS}]', section)]
    shown = [section for section in sections if section not in in_chinese]
    if chinese:
        others = [ENTRY.sub(unless_translated, section) for section in shown]
        shown = in_chinese + [section for section in others if "<li" in section]
    context["furo_navigation_tree"] = "".join(shown)
    for way in ("next", "prev"):
        if context.get(way) and is_chinese(page_at(context[way]["link"])) != chinese:
            context[way] = None

    if chinese:
        context["language"] = "zh-CN"
        context["master_doc"] = CHINESE_HOME
        context["_"] = context["gettext"] = lambda text: WORDS.get(text.strip(), text)


class EnglishAndChinese(SearchEnglish):
    """Words are found as in English, ideographs by pairs of neighbours, since Chinese has no spaces between words."""

    js_splitter_code = f"""
function splitQuery(query) {{
  const runs = query.match(/[{IDEOGRAPHS}]+|(?:(?![{IDEOGRAPHS}])[\\p{{Letter}}\\p{{Number}}_])+/gu) || [];
  return runs.flatMap((run) =>
    /[{IDEOGRAPHS}]{{2}}/.test(run) ? Array.from(run).slice(1).map((each, at) => Array.from(run)[at] + each) : run);
}}
"""

    def split(self, input: str) -> list[str]:
        words = re.findall(rf"[{IDEOGRAPHS}]|(?:(?![{IDEOGRAPHS}])\w)+", input)
        return words + re.findall(rf"(?=([{IDEOGRAPHS}]{{2}}))", input)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_search_language(EnglishAndChinese)
    app.connect("doctree-read", join_lines)
    app.connect("html-page-context", speak, priority=900)  # after the theme
    return {"parallel_read_safe": True, "parallel_write_safe": True}
