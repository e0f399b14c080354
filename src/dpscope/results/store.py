"""A folder of results: written atomically, validated when read, never overwritten by accident.

DIR/results/*.json   one file a run spec
DIR/logs/*.log       what each child printed
DIR/files/*/         what a measurement left beside its figures: traces, reports
DIR/summary.txt      the table
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dpscope.errors import UserError
from dpscope.results.schema import Result, UnreadableResult, parse_result

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk, a quota or a limit on files is full


@dataclass(frozen=True)
class Skipped:
    """A file in the folder that is not one of its results."""

    path: Path
    reason: str


class ResultStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results = folder / "results"
        self.logs = folder / "logs"
        self.files = folder / "files"
        self.summary = folder / "summary.txt"

    def create(self) -> None:
        """Create the folder, or raise a sentence that says why it cannot be written."""
        try:
            self.results.mkdir(parents=True, exist_ok=True)
            self.logs.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=self.results):
                pass
        except OSError as error:
            raise UserError(
                f"cannot write to {self.folder}: {error.strerror}; choose another folder with --out"
            ) from None

    def holds_results(self) -> bool:
        return any(self.results.glob("*.json"))

    def remove_results(self) -> None:
        """Remove what dpscope wrote here, and nothing else."""
        ours, _ = self.read_all()
        for path in [*ours, *(self.log_of(path.name) for path in ours), self.summary]:
            path.unlink(missing_ok=True)
        for path in ours:
            shutil.rmtree(self.files_of(path.name), ignore_errors=True)

    def path_of(self, file_name: str) -> Path:
        return self.results / file_name

    def log_of(self, file_name: str) -> Path:
        return (self.logs / file_name).with_suffix(".log")

    def files_of(self, file_name: str) -> Path:
        return (self.files / file_name).with_suffix("")

    def make_way(self, file_name: str) -> None:
        """Make room for a row's file: a result is replaced, any other file is renamed."""
        path = self.path_of(file_name)
        try:
            read_result(path)
        except UnreadableResult:
            if path.exists():
                aside = path.with_suffix(".json.unreadable")
                places = (aside, *(aside.with_name(f"{aside.name}-{number}") for number in range(1, 1000)))
                path.rename(next(place for place in places if not place.exists()))
        else:
            path.unlink()
        shutil.rmtree(self.files_of(file_name), ignore_errors=True)

    def write(self, file_name: str, result: Result) -> Path:
        path = self.path_of(file_name)
        write_atomically(path, result.to_json())
        return path

    def read_all(self) -> tuple[dict[Path, Result], list[Skipped]]:
        """Return every result, and every other file with the reason. A bare folder of results works too."""
        folder = self.results if self.results.is_dir() else self.folder
        results: dict[Path, Result] = {}
        skipped: list[Skipped] = []
        for path in sorted(folder.glob("*.json")):
            try:
                results[path] = read_result(path)
            except UnreadableResult as error:
                skipped.append(Skipped(path, str(error)))
        return results, skipped

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second sweep out of the folder; the lock dies with the process that holds it."""
        import fcntl

        with (self.folder / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(
                    f"another dpscope is measuring into {self.folder}: wait for it, or choose another --out"
                ) from None
            yield


def read_result(path: Path) -> Result:
    try:
        return parse_result(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableResult(f"cannot be read ({error})") from None


def new_folder(command: str) -> Path:
    """Return where a sweep's results go by default."""
    return Path("dpscope-results") / f"{command}-{time.strftime('%Y%m%d-%H%M%S')}"


def require_writable(path: Path) -> None:
    """Raise `UserError` now rather than after a long measurement."""
    if path.is_dir():
        raise UserError(f"{path} is a folder: give the name of a file to write")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that readers see the old one or the whole new one, whenever this process dies.

    An `OSError` names the file, which errors of write() do not.
    """
    try:
        _write_beside_and_move(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _write_beside_and_move(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # noqa: PTH101  (mkstemp makes files for their owner alone)
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108
        raise
