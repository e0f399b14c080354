"""The packages that dpscope imports: which are missing, and what to type to install them. Imports none of them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from dpscope.errors import UserError

# Import name -> what pip calls it, where the two differ.
DISTRIBUTIONS = {"ncu_report": "ncu-report"}

# What a sweep needs before its first row and after its last: to measure, and to write the page and the figures.
REPORTING = ("jinja2", "matplotlib")
MEASURING = ("torch", *REPORTING)
TABLE_PACKAGES = ("pandas",)  # CSV and LaTeX


def install_command(*packages: str, upgrade: bool = False) -> str:
    """Return what to type, in any folder, to install packages (by import name) for the Python that runs this.

    The packages are named one by one, because dpscope with its extras is on no index. The installer is `pip` if it is
    this Python's own; an environment that uv made has none.
    """
    names = [DISTRIBUTIONS.get(package, package) for package in packages]
    pip = shutil.which("pip")
    beside = pip is not None and os.path.realpath(Path(pip).parent) == os.path.realpath(Path(sys.executable).parent)
    installer = ["pip", "install"] if beside else [sys.executable, "-m", "pip", "install"]
    if not _is_there("pip"):
        installer = ["uv", "pip", "install", "--python", sys.executable]
    return shlex.join([*installer, *(["--upgrade"] if upgrade else []), *names])


def require(*packages: str) -> None:
    """Raise `UserError` that names every package that is not installed, before any work is done."""
    if missing := [package for package in packages if not _is_there(package)]:
        raise UserError(_missing(missing))


def import_for(user: str, package: str) -> Any:
    """Return a package of Hugging Face, imported; raise `UserError` that says who needs it if it is not installed."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise UserError(f"{user} needs Hugging Face's {package}: {install_command(package)}") from None


def explain_import_error(error: ImportError) -> str | None:
    """Return the sentence for a package that is missing or broken; None if the module is dpscope's own, or no package.

    A kernel that torch.compile built is no package: nothing is to be installed if it cannot be loaded.
    """
    name = error.name or ""
    package = name.partition(".")[0]
    if not package or package == "dpscope":
        return None
    if isinstance(error, ModuleNotFoundError) and name == package:
        return _missing([package])
    if not _is_there(package):
        return None
    return f"{package} cannot be used as it is installed here ({error}): {install_command(package, upgrade=True)}"


def version_of(package: str) -> str | None:
    """Return the version of an installed package (by its import name); None if there is none."""
    from importlib.metadata import PackageNotFoundError, version  # which few commands need

    try:
        return version(DISTRIBUTIONS.get(package, package))
    except PackageNotFoundError:
        return None


def release_of(version: str) -> tuple[int, ...]:
    """Return (2, 8) of "2.8.0a0+git1234": a pre-release counts as the release that is named after it."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _missing(packages: list[str]) -> str:
    names = ", ".join(DISTRIBUTIONS.get(package, package) for package in packages)
    return f"not installed in this Python: {names}. To install: {install_command(*packages)}"


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # something on the import path refuses it, or it was loaded without a spec
        return package in sys.modules and sys.modules[package] is not None
