"""A component rule of the user's own, by where it is: `FILE.py:function` or `package.module:function`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpscope.errors import UserError


def load_rule(where: str) -> Callable[[Any], str | None]:
    source, _, name = where.rpartition(":")
    if not source or not name:
        raise UserError(f"--rule {where!r}: expected FILE.py:function or package.module:function")
    try:
        module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
        rule: Callable[[Any], str | None] = getattr(module, name)
    except FileNotFoundError:
        raise UserError(f"--rule {where!r}: there is no file {source}") from None
    except ModuleNotFoundError as error:
        raise UserError(f"--rule {where!r}: there is no module {error.name!r}") from None
    except AttributeError:
        raise UserError(f"--rule {where!r}: {source} has no {name!r}") from None
    if not callable(rule):
        raise UserError(f"--rule {where!r}: {name} is not a function")
    return rule


def _load_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"dpscope_rule_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
