"""What is missing is named, with a command that installs it into the Python that asked."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from dpscope import packages
from dpscope.errors import UserError
from dpscope.packages import explain_import_error, install_command, require


def test_pip_beside_this_python_is_called_pip(monkeypatch, tmp_path):
    bin_folder = Path(sys.executable).parent
    monkeypatch.setattr(packages.shutil, "which", lambda name: str(bin_folder / name))
    assert install_command("transformers", "ncu_report") == "pip install transformers ncu-report"


@pytest.mark.parametrize("pip", [None, "/elsewhere/bin/pip"])
def test_a_python_whose_pip_is_not_on_the_path_is_named_in_full(monkeypatch, pip):
    monkeypatch.setattr(packages.shutil, "which", lambda name: pip)
    assert install_command("torch") == f"{shlex.quote(sys.executable)} -m pip install torch"


def test_an_environment_without_pip_is_one_that_uv_fills(monkeypatch):
    monkeypatch.setitem(sys.modules, "pip", None)
    assert install_command("torch") == f"uv pip install --python {shlex.quote(sys.executable)} torch"


def test_everything_that_is_missing_is_named_at_once(monkeypatch):
    for name in ("jinja2", "pandas"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"^not installed in this Python: jinja2, pandas\. .*install jinja2 pandas$"):
        require("torch", "jinja2", "pandas")
    require("torch")


def test_a_package_that_an_import_hook_refuses_counts_as_missing(monkeypatch):
    class Refusing:
        def find_spec(self, name, path=None, target=None):
            if name == "tomllib_of_old":
                raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(sys, "meta_path", [Refusing(), *sys.meta_path])
    with pytest.raises(UserError, match="tomllib_of_old"):
        require("tomllib_of_old")


def test_an_import_error_names_the_package_and_what_to_type():
    missing = ModuleNotFoundError("No module named 'torch'", name="torch")
    assert (
        explain_import_error(missing) == f"not installed in this Python: torch. To install: {install_command('torch')}"
    )
    old = ImportError("cannot import name 'OutOfMemoryError' from 'torch'", name="torch")
    assert "cannot import name 'OutOfMemoryError'" in explain_import_error(old)
    assert explain_import_error(old).endswith("install --upgrade torch")
    part = ModuleNotFoundError("No module named 'opacus.grad_sample.new'", name="opacus.grad_sample.new")
    assert explain_import_error(part).endswith("install --upgrade opacus")


def test_a_kernel_that_was_compiled_and_cannot_be_loaded_is_no_package_to_install():
    broken = ImportError("/tmp/kernels/main.so: undefined symbol: _ZTT", name="kernel")
    assert explain_import_error(broken) is None


def test_a_fault_of_dpscope_itself_is_not_blamed_on_a_package():
    assert explain_import_error(ModuleNotFoundError("No module named 'dpscope.gone'", name="dpscope.gone")) is None
    assert explain_import_error(ImportError("no name")) is None
