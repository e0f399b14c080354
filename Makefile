# Two commands do everything: `make demo` shows what privacy costs, `make test` proves that dpscope works.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
DEMO   := dpscope-results/demo

.PHONY: help demo test wheel clean

help:  ## what can be made
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 8

$(READY): pyproject.toml constraints.txt
	@echo "==> making $(VENV) and installing dpscope with its pinned dependencies (a minute or two, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)  ## compare standard, flat, ghost and flash training of a small model and show what privacy costs
	@echo "==> comparing standard, flat, ghost and flash training, each in a process of its own"
	@$(BIN)/dpscope compare --methods standard,flat,ghost,flash --model tiny --batch-size 4 --seq-len 128 \
		--out $(DEMO) --overwrite

test: $(READY)  ## lint, types and tests
	@echo "==> ruff"; $(BIN)/ruff check . && $(BIN)/ruff format --check .
	@echo "==> mypy"; $(BIN)/mypy
	@echo "==> pytest"; $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

wheel: $(READY)  ## build dist/dpscope-VERSION-py3-none-any.whl, to install anywhere
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
