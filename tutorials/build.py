"""Make the notebooks: run each lesson's source from top to bottom and write the .ipynb beside it, in both languages.

    python tutorials/build.py            # all of them
    python tutorials/build.py 01 03a     # those
    python tutorials/build.py --text     # only the prose: where no code has changed, outputs stay
    python tutorials/build.py --numbers  # write the numbers in the prose again from the recordings

The Chinese notebooks have the same code, cell by cell, but for the language that their first cell asks for.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbclient
import nbformat
import tomllib

TUTORIALS = Path(__file__).resolve().parent
SECONDS = 120  # a lesson may take
NUMBERED = re.compile(r"([\d,]*\.?\d+)([^\d<>|]{0,16}<!-- = (.+?) -->)")
WORDS, CHARACTERS, LINES = 150, 250, 20  # read in a minute: English words, Chinese characters, lines of code


def sources() -> list[Path]:
    """Return the English lessons in order."""
    return sorted(TUTORIALS.glob("[0-9][0-9]*-*.py"))


def in_both_languages(source: Path) -> list[Path]:
    return [path for path in (source, TUTORIALS / "zh" / source.name) if path.is_file()]


def repository() -> str:
    """Return the public address of the repository, from pyproject.toml; empty as long as there is none."""
    project = tomllib.loads((TUTORIALS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project.get("urls", {}).get("Repository", ""))


def notebook_of(source: Path, address: str | None = None) -> Any:
    """Return a lesson as a notebook, not yet run; ids follow the order of cells: equal sources give equal files.

    Where the repository has a public address, the first cell can clone it, and a badge opens the lesson in Colab.
    """
    address = repository() if address is None else address
    notebook = jupytext.read(source)
    if address:
        place = source.relative_to(TUTORIALS.parent).with_suffix(".ipynb")
        link = (
            f"https://colab.research.google.com/github/{address.removeprefix('https://github.com/')}/blob/main/{place}"
        )
        badge = f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({link})"
        notebook.cells[0].source = f"{badge}\n\n{notebook.cells[0].source}"
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = {}
        if cell.cell_type == "code" and address:
            cell.source = cell.source.replace('REPOSITORY = ""', f'REPOSITORY = "{address}"')
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata = nbformat.from_dict({"kernelspec": kernel, "language_info": {"name": "python"}})
    return notebook


def run(notebook: Any, folder: Path = TUTORIALS) -> Any:
    """Run all cells in the folder of the lesson; an error in a cell is raised."""
    client = nbclient.NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    for cell in notebook.cells:
        cell.metadata = {}
        if "outputs" in cell:  # warnings of libraries, which differ from machine to machine, are no part of a lesson
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def with_outputs(notebook: Any, ran: Any) -> Any:
    """Return a notebook with the outputs of another that has the same code."""
    for cell, run_cell in zip(code_cells(notebook), code_cells(ran), strict=True):
        if cell.source != run_cell.source:
            raise SystemExit(f"The code has changed; build it without --text:\n{cell.source}")
        cell.outputs, cell.execution_count = run_cell.outputs, run_cell.execution_count
    return notebook


def build(source: Path, *, text_only: bool = False) -> list[Path]:
    """Run one lesson in each language and write its notebooks."""
    made = []
    for path in in_both_languages(source):
        target, notebook = path.with_suffix(".ipynb"), notebook_of(path)
        if text_only:
            notebook = with_outputs(notebook, nbformat.read(target, as_version=4))
        else:
            notebook = run(notebook, path.parent)
        nbformat.write(notebook, target)
        made.append(target)
    return made


def reading_minutes(source: Path) -> float:
    """Return how long reading a lesson takes, by its words and lines of code."""
    cells = jupytext.read(source).cells
    prose = " ".join(re.sub(r"<!--.*?-->", "", c.source, flags=re.S) for c in cells if c.cell_type == "markdown")
    code = sum(bool(line.strip()) for c in cells if c.cell_type == "code" for line in c.source.splitlines())
    if source.parent.name == "zh":
        latin = len(re.findall(r"[A-Za-z][\w.\-]*", prose))
        return len(re.findall(r"[\u4e00-\u9fff]", prose)) / CHARACTERS + latin / WORDS + code / LINES
    return len(re.findall(r"[\w'’.\-]+", prose)) / WORDS + code / LINES


def write_numbers(source: Path) -> int:
    """Write each number that carries an expression again, with as many digits; return how many have changed."""
    sys.path.insert(0, str(TUTORIALS / "programs"))
    import recorded

    changed = 0

    def again(match: re.Match[str]) -> str:
        nonlocal changed
        shown, rest, expression = match.groups()
        value = eval(expression, dict(vars(recorded)))
        text = f"{value:,.{len(shown.partition('.')[2])}f}"
        text = text if "," in shown or "," not in text or value >= 10_000 else text.replace(",", "")
        changed += text != shown
        return text + rest

    text = source.read_text(encoding="utf-8")
    written = NUMBERED.sub(again, text)
    source.write_text(written, encoding="utf-8")
    return changed


if __name__ == "__main__":
    chosen = [word for word in sys.argv[1:] if not word.startswith("--")]
    for each in sources():
        if chosen and each.name.partition("-")[0] not in chosen:
            continue
        if "--numbers" in sys.argv:
            for path in in_both_languages(each):
                print(f"{path.relative_to(TUTORIALS)}: {write_numbers(path)} numbers have changed")
        else:
            print(*(str(path.relative_to(TUTORIALS)) for path in build(each, text_only="--text" in sys.argv)))
