# Two commands do everything: `make demo` shows what privacy costs, `make test` proves that dpscope works.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
DEMO   := dpscope-results/demo
MAKEFLAGS += --jobs=2  # mypy, which takes one core, beside the tests
# On every core, a file of tests at a time, those that take longest first (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --no-loadscope-reorder

.PHONY: help demo lint test-fast test all-tests docs matrix wheel clean

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt package.json
	@echo "==> making $(VENV) and installing dpscope with its pinned dependencies (a minute or two, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@if ! command -v npm >/dev/null; then echo "==> no npm here: the JavaScript of report.html is not linted (apt-get install npm)"; \
	elif ! npm install --silent --no-package-lock --fetch-retries 0; then \
		echo "==> npm could not install its linter: the JavaScript of report.html is not linted (npm install)"; fi
	@touch $@

demo: $(READY)  ## compare standard, flat, ghost and flash training of a small model and show what privacy costs
	@echo "==> comparing standard, flat, ghost and flash training, each in a process of its own"
	@$(BIN)/dpscope compare --methods standard,flat,ghost,flash --model small --batch-size 8 --seq-len 64 \
		--out $(DEMO) --overwrite

lint: $(READY)  ## ruff and mypy, also before each commit after `.venv/bin/pre-commit install`
	@echo "==> ruff"; $(BIN)/ruff check . && $(BIN)/ruff format --check .
	@echo "==> mypy"; $(BIN)/mypy

test-fast: $(READY)  ## the tests that start no process and take no seconds: for the loop while working
	@$(PYTEST) -m 'not slow'

test: lint all-tests  ## lint, types and all tests

all-tests: $(READY)  ## all tests, without lint and types
	@echo "==> pytest"; $(PYTEST)

docs: $(READY)  ## the site, as plain files that need no network: site/index.html
	@$(BIN)/python benchmarks/headline.py
	@echo "==> sphinx"; $(BIN)/python docs/site/build.py site

matrix:  ## the tests in the oldest and newest versions of Python and torch that can be had here
	@.ci/matrix

BUILD  := $(if $(wildcard $(READY)),$(VENV),.build-venv)

.build-venv/.installed: constraints.txt
	@$(PYTHON) -m venv .build-venv
	@.build-venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt hatchling
	@touch $@

wheel: $(if $(wildcard $(READY)),,.build-venv/.installed)  ## build dist/dpscope-VERSION-py3-none-any.whl, to install anywhere
	@$(BUILD)/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

clean:  ## remove the virtual environments and caches
	rm -rf $(VENV) .build-venv .matrix node_modules .mypy_cache .pytest_cache .ruff_cache .sphinx_cache site
