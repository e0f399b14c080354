"""Links to files that measurements left beside the page: traces, captures and reports of profilers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from dpscope.reports.report import Report


@dataclass(frozen=True)
class FileBeside:
    row: str  # method and size
    instrument: str
    name: str
    link: str  # relative to the page


def files_beside(report: Report) -> list[FileBeside]:
    """Those that are there now. A page that is sent alone has none, nor has one whose folder is not known."""
    found = [
        FileBeside(f"{row.method}, {size.label}", instrument, PurePosixPath(path).name, quote(path))
        for size in report.sizes
        for row in size.rows
        for instrument, result in row.measured.items()
        for path in result.files.values()
        if _is_below(path, report.folder)
    ]
    return list(dict.fromkeys(found))


def _is_below(path: object, folder: Path | None) -> bool:
    """Paths come from results, which may be anybody's: only what is a file in the folder itself is linked."""
    if folder is None or not isinstance(path, str) or "\0" in path:
        return False
    pure = PurePosixPath(path)
    return not pure.is_absolute() and ".." not in pure.parts and (folder / pure).is_file()
