"""`dpscope report DIR`: results that exist, shown again."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from dpscope.commands.console import make_console
from dpscope.errors import UserError
from dpscope.reports.text import summary
from dpscope.results.store import ResultStore


@click.command(name="report")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
def command(folder: Path) -> None:
    """Show the results in DIR again. Reads them and measures nothing; files that are no results are named."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give the --out folder of a `dpscope compare`")
    found, skipped = ResultStore(folder).read_all()
    if not found:
        reasons = "".join(f"\n  {item.path.name}: {item.reason}" for item in skipped)
        raise UserError(f"no dpscope results in {folder}{reasons}")
    results = sorted(found.values(), key=_order)
    console = make_console()
    console.print(summary(results, skipped, width=console.width))
    sys.exit(0 if all(result.ok for result in results) else 1)


def _order(result: object) -> tuple[object, ...]:
    from dpscope.results.schema import Result
    from dpscope.trainers.registry import methods

    assert isinstance(result, Result)
    names = list(methods())
    place = names.index(result.experiment) if result.experiment in names else len(names)
    spec = result.spec
    return (spec["workload"]["name"], spec["dtype"], spec["batch_size"], spec["seq_len"] or 0, place)
