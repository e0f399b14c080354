"""Make the notebooks: run each tutorial's source from top to bottom and write the .ipynb beside it.

    python tutorials/build.py            # all of them
    python tutorials/build.py 01 03      # those

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


def build(source: Path) -> list[Path]:
    """Run one tutorial and write its notebook, and the Chinese one if there is one."""
    english = run(notebook_of(source))
    written = [source.with_suffix(".ipynb")]
    nbformat.write(english, written[0])
    chinese_source = TUTORIALS / "zh" / source.name
    if chinese_source.is_file():
        chinese = notebook_of(chinese_source)
        for cell, run_cell in zip(code_cells(chinese), code_cells(english), strict=True):
            cell.outputs, cell.execution_count = run_cell.outputs, run_cell.execution_count
        written.append(chinese_source.with_suffix(".ipynb"))
        nbformat.write(chinese, written[1])
    return written


if __name__ == "__main__":
    for each in sources():
        if len(sys.argv) == 1 or each.name[:2] in sys.argv[1:]:
            print(*(str(path.relative_to(TUTORIALS)) for path in build(each)))
