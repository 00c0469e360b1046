# Each target does its own set-up. `make demo` and `make test` are all a new user needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: setup demo test lint types bench docs clean

setup: $(VENV)/.ready

# torch is pinned: an open range would pull a multi-gigabyte CUDA build where a CPU build is meant.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "hyflash needs Python 3.11 or newer, found " + sys.version.split()[0] + "; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/hyflash pull smollm2-135m
	$(BIN)/hyflash generate --compare -n 200 "A train leaves the station at 9 am and travels 60 miles per hour for 3 hours, then 40 miles per hour for 2 hours. How far does it travel in all? Explain step by step."
	$(BIN)/hyflash bench --prompts demo --limit 2 -n 128

test: setup
	$(BIN)/pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

bench: setup
	$(BIN)/hyflash pull smollm2-135m
	$(BIN)/hyflash bench --prompts demo

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
