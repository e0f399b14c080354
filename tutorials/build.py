"""Make the notebooks: run each tutorial's source from top to bottom and write the .ipynb beside it.

    python tutorials/build.py            # all of them
    python tutorials/build.py 01 03      # those
    python tutorials/build.py --text     # only the prose: where no code has changed, outputs stay

The Chinese notebooks have the same code, cell by cell, so they take the outputs of the English ones.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jupytext
import nbclient
import nbformat

TUTORIALS = Path(__file__).resolve().parent
SECONDS = 120  # a tutorial may take


def sources() -> list[Path]:
    """The English tutorials in order."""
    return sorted(TUTORIALS.glob("[0-9][0-9]-*.py"))


def notebook_of(source: Path) -> Any:
    """A tutorial as a notebook, not yet run; ids follow the order of cells, so that equal sources give equal files."""
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = {}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata = nbformat.from_dict({"kernelspec": kernel, "language_info": {"name": "python"}})
    return notebook


def run(notebook: Any) -> Any:
    """Run all cells in the folder of the tutorials; an error in a cell is raised."""
    client = nbclient.NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(TUTORIALS)}}
    )
    client.execute()
    for cell in notebook.cells:
        cell.metadata = {}
    return notebook


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def with_outputs(notebook: Any, ran: Any) -> Any:
    """A notebook with the outputs of another that has the same code."""
    for cell, run_cell in zip(code_cells(notebook), code_cells(ran), strict=True):
        if cell.source != run_cell.source:
            raise SystemExit(f"other code than was run; build it without --text:\n{cell.source}")
        cell.outputs, cell.execution_count = run_cell.outputs, run_cell.execution_count
    return notebook


def build(source: Path, *, text_only: bool = False) -> list[Path]:
    """Run one tutorial and write its notebook, and the Chinese one if there is one."""
    target = source.with_suffix(".ipynb")
    notebook = notebook_of(source)
    english = with_outputs(notebook, nbformat.read(target, as_version=4)) if text_only else run(notebook)
    nbformat.write(english, target)
    chinese = TUTORIALS / "zh" / source.name
    if not chinese.is_file():
        return [target]
    nbformat.write(with_outputs(notebook_of(chinese), english), chinese.with_suffix(".ipynb"))
    return [target, chinese.with_suffix(".ipynb")]


if __name__ == "__main__":
    chosen = [word for word in sys.argv[1:] if word != "--text"]
    for each in sources():
        if not chosen or each.name[:2] in chosen:
            made = build(each, text_only="--text" in sys.argv)
            print(*(str(path.relative_to(TUTORIALS)) for path in made))
