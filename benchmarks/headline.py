"""The tables of the README, the site and lesson 5 (headline.json), and of engines.md and trainer.md (engines.json).

python benchmarks/rivals.py OUT --headline    # measures on a GPU; copy OUT/headline.json to benchmarks/results
python benchmarks/rivals.py OUT               # the same for OUT/engines.json
python benchmarks/headline.py                 # writes the pages
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from rows import CELLS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
COLUMNS = (  # of the README, as far as the run has them
    *("standard", "flat", "ghost", "flash", "standard graphed", "flash graphed"),
    *("standard compiled", "flash compiled"),
)
ENGINES = (  # lines of docs/engines.md
    *("standard", "flash", "flat", "functorch", "ghost", "opake", "standard tf32", "fastdp tf32"),
    *("standard compiled", "flash compiled", "opake compiled"),
)
BEGIN, END = "<!-- headline: begin -->", "<!-- headline: end -->"
STATUS_ZH = {"refused": "不支持", "oom": "显存不足", "failed": "出错", "not measured": "未测"}
STATUS = {"refused": "refused", "oom": "out of memory", "failed": "fails", "not measured": "not measured"}


NOTES = {
    "graphed": "CUDA graph: the whole step is replayed as one graph, also relative to eager ordinary training. Its "
    "peak is that of the capture.",
    "compiled": "Compiled flash is relative to compiled ordinary training.",
}
NOTES_ZH = {
    "graphed": "CUDA 图：整个训练步作为一个 CUDA 图重放，同样相对逐算子执行的普通训练，峰值取捕获时的值；其余",
    "compiled": "编译后的 flash 相对编译后的普通训练。",
}


def figure(cell: dict[str, Any] | None, *, chinese: bool) -> str:
    """Return a cell of the table: `1.08×, 0.98×`, or `127 ms, 30.2 GiB`, or why there is no figure."""
    cell = cell or {"status": "not measured"}
    comma = "，" if chinese else ", "
    if cell["status"] != "ok":
        return (STATUS_ZH if chinese else STATUS)[cell["status"]]
    if "time_ratio" not in cell:
        peak = cell["peak_bytes"]
        return f"{cell['ms']:.0f} ms" + ("" if peak is None else f"{comma}{peak / 2**30:.1f} GiB")
    peak_ratio = cell.get("peak_ratio")
    return f"{cell['time_ratio']:.2f}×" + ("" if peak_ratio is None else f"{comma}{peak_ratio:.2f}×")


def columns(run: dict[str, Any]) -> list[str]:
    return [key for key in COLUMNS if any(key in row["cells"] for row in run["rows"].values())]


def table(run: dict[str, Any], *, chinese: bool) -> list[str]:
    keys = columns(run)
    titles = [CELLS[key].title_zh if chinese else CELLS[key].title for key in keys]
    lines = [f"| {'模型，批大小' if chinese else 'model, batch'} | {' | '.join(titles)} |"]
    lines.append("| --- " * (1 + len(keys)) + "|")
    for row in run["rows"].values():
        figures = [figure(row["cells"].get(key), chinese=chinese) for key in keys]
        lines.append(f"| {row['label_zh' if chinese else 'label']} | {' | '.join(figures)} |")
    return lines


def engines_table(run: dict[str, Any]) -> list[str]:
    """Return the table of docs/engines.md: an engine a line, a model a column."""
    rows = engine_rows(run)
    lines = [f"| time, peak memory | {' | '.join(row['label'] for row in rows)} |", "| --- " * (len(rows) + 1) + "|"]
    for key in ENGINES:
        figures = [figure(row["cells"].get(key), chinese=False) for row in rows]
        lines.append(f"| {CELLS[key].title.replace('*', '')} | {' | '.join(figures)} |")
    return lines


def engine_rows(run: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in run["rows"].values() if "functorch" in row["cells"]]


def reasons(rows: Iterable[dict[str, Any]], keys: Sequence[str], *, chinese: bool) -> list[str]:
    """Return a sentence for each cell that was tried and has no figure."""
    return [
        f"{row['label_zh']}，{CELLS[key].title_zh}：{cell['reason'].rstrip('.')}。"
        if chinese
        else f"{row['label']}, {CELLS[key].title}: {cell['reason'].rstrip('.')}."
        for row in rows
        for key, cell in row["cells"].items()
        if key in keys and cell["status"] in ("refused", "failed", "oom")
    ]


def engines_block(run: dict[str, Any], link: Callable[[str], str]) -> str:
    """Return what stands between the markers of docs/engines.md."""
    used = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    head = (
        f"Step time and peak memory as multiples of ordinary training in the same number format and run. One "
        f"{run['device']}, bf16 unless it says TF32, {run['date']} ({used}). Compiled cells are relative to compiled "
        f"ordinary training. Command: `{run['command']}`; [raw figures]({link('benchmarks/results/engines.json')})."
    )
    without = [f"- {line}" for line in reasons(engine_rows(run), ENGINES, chinese=False)]
    return "\n".join(
        [head, "", *engines_table(run), *(["", "Cells without a figure:", "", *without] if without else [])]
    )


def trainer_block(run: dict[str, Any], link: Callable[[str], str]) -> str:
    """Return what stands between the markers of docs/trainer.md."""
    head = (
        f"Step time inside the private Trainer, next to a plain private loop of the same steps: LoRA of a 1.2B Llama, "
        f"bf16, one {run['device']}, {run['date']}. Blocks of steps alternate; the ratio is the median over pairs of "
        f"blocks, with its quartiles. Command: `{run['command']}`; "
        f"[raw figures]({link('benchmarks/results/engines.json')})."
    )
    lines = ["| step | plain loop | Trainer | ratio |", "| --- | --- | --- | --- |"]
    for row in run["trainer"]["rows"]:
        step = f"{row['logical']} samples × {row['length']} in batches of {row['physical']}"
        ratio = f"{row['ratio']:.2f}× ({row['low_ratio']:.2f}–{row['high_ratio']:.2f})"
        lines.append(f"| {step} | {row['loop_ms']:.0f} ms | {row['trainer_ms']:.0f} ms | {ratio} |")
    return "\n".join([head, "", *lines])


def block(run: dict[str, Any], link: Callable[[str], str], *, chinese: bool) -> str:
    """Return what stands between the markers: where the figures come from, the table, and how to read it."""
    used = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    raw = link("benchmarks/results/headline.json")
    peak, peak_zh = run.get("peak", "of a clear step"), run.get("peak_zh", "取首步校验之后的步")
    without = "".join(f"\n- {line}" for line in reasons(run["rows"].values(), COLUMNS, chinese=chinese))
    kind = "graphed" if "flash graphed" in columns(run) else "compiled"
    without = without and f"\n\n{'没有数字的格子：' if chinese else 'Cells without a figure:'}\n{without}"
    if chinese:
        head = (
            f"一块 {run['device']}，bf16，AdamW，{run['date']}（{used}）。"
            "每步时间和显存峰值，相对同一次运行的普通训练："
        )
        foot = (
            f"{NOTES_ZH[kind]}峰值{peak_zh}。数值大于 1 表示更慢或更占显存。波动见原始数据。"
            f"命令：`{run['command']}`；[原始数据]({raw})。{without}"
        )
    else:
        head = (
            f"One {run['device']}, bf16, AdamW, {run['date']} ({used}). Step time and peak memory relative to ordinary "
            "training in the same run:"
        )
        foot = (
            f"{NOTES[kind]} Peaks are {peak}. Above 1 is slower or larger. "
            f"Spread: in the raw figures. Command: `{run['command']}`; [raw figures]({raw}).{without}"
        )
    return "\n".join([head, "", *table(run, chinese=chinese), "", foot])


class Page(NamedTuple):
    """A file with markers, the way from its folder to the root of the repository, its language, and its table."""

    path: str
    root: str
    chinese: bool = False
    table: str = "headline"  # or "engines", or "trainer"

    @property
    def results(self) -> Path:
        """The file that the table is made of."""
        return RESULTS / ("headline.json" if self.table == "headline" else "engines.json")


# The landing pages of the site include the block of the READMEs.
PAGES = (
    Page("README.md", ""),
    Page("README.zh-CN.md", "", chinese=True),
    Page("tutorials/05-what-privacy-costs.py", "../"),
    Page("tutorials/zh/05-what-privacy-costs.py", "../../", chinese=True),
    Page("docs/engines.md", "../", table="engines"),
    Page("docs/trainer.md", "../", table="trainer"),
)


def written(page: Page, text: str, run: dict[str, Any]) -> str:
    """Return a page's text with the block between its markers made again."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page.path} has no {BEGIN} … {END}: put the markers back where the table belongs")
    link = lambda path: page.root + path  # noqa: E731
    tables = {"engines": engines_block, "trainer": trainer_block}
    made = tables[page.table](run, link) if page.table in tables else block(run, link, chinese=page.chinese)
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def write() -> list[str]:
    """Write the block of every page again; return the pages that have changed."""
    changed = []
    for page in PAGES:
        file = ROOT / page.path
        text = file.read_text(encoding="utf-8")
        run = json.loads(page.results.read_text(encoding="utf-8"))
        made = written(page, text, run)
        if made != text:
            file.write_text(made, encoding="utf-8")
            changed.append(page.path)
    return changed


def main() -> None:
    changed = write()
    print("\n".join(changed) or "nothing has changed")
    if any(page.startswith("tutorials") for page in changed):  # the notebooks beside the sources
        subprocess.run([sys.executable, str(ROOT / "tutorials" / "build.py"), "--text", "05"], check=True)


if __name__ == "__main__":
    main()
