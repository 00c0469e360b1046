# Each target does its own set-up. `make demo` and `make test` are all a new user needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: setup demo test lint types kernels-test kernels-sanitize bench study peers docs clean

setup: $(VENV)/.ready $(VENV)/.kernels

# torch is pinned: an open range would pull a multi-gigabyte CUDA build where a CPU build is meant.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "hyflash needs Python 3.11 or newer, found " + sys.version.split()[0] + "; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $@

# The CPU kernels are built here where a C++ compiler is found; all else works without them.
$(VENV)/.kernels: $(VENV)/.ready kernels/CMakeLists.txt kernels/pyproject.toml $(wildcard kernels/include/* kernels/src/* kernels/tests/*.cpp kernels/tests/*.h)
	@if $(CXX) --version > /dev/null 2>&1; then \
	  $(BIN)/pip install --quiet -e ./kernels -C cmake.define.HK_TESTS=ON; \
	else \
	  echo 'No C++ compiler ($(CXX)): the CPU kernels are left out and models run on torch alone, which is several times slower. Install g++ or clang++ and run make setup again.' >&2; \
	fi
	@if $(CXX) --version > /dev/null 2>&1; then touch $@; fi

# On torch, as any model runs, and on the CPU kernels, where forwards are so short that drafts pay less.
DEMO := "A train leaves the station at 9 am and travels 60 miles per hour for 3 hours, then 40 miles per hour for 2 hours. How far does it travel in all? Explain step by step."
demo: setup
	$(BIN)/hyflash pull smollm2-135m
	$(BIN)/hyflash generate --compare --backend torch -n 200 $(DEMO)
	$(BIN)/hyflash generate --compare -n 200 $(DEMO)
	$(BIN)/hyflash bench --prompts demo --limit 2 -n 128

# Side by side on up to four cores: a process holds about 1 GB.
test: setup
	$(BIN)/pytest --numprocesses auto --maxprocesses 4

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# Part of `make test` too.
kernels-test: setup
	$(BIN)/pytest kernels/tests

# The kernels' tests once more, built to notice reads out of bounds, undefined behaviour and races.
SANITIZED := kernels/build/sanitize
kernels-sanitize: setup
	PYTHON=$(BIN)/python sh kernels/tests/sanitize.sh $(SANITIZED)

bench: setup
	$(BIN)/hyflash pull smollm2-135m
	$(BIN)/hyflash bench --prompts demo

# The long-context study (docs/study.md), hours, in stages that go on where they stopped: make study DATA=folder
STUDY ?= benchmarks/study.toml
study: setup
	@test -n "$(DATA)" || { echo 'Say where the public data lies: make study DATA=folder (see docs/study.md).' >&2; exit 1; }
	$(BIN)/pip install --quiet -e '.[report]'
	$(BIN)/hyflash pull smollm2-135m
	$(BIN)/python benchmarks/study.py $(STUDY) --data $(DATA)

# llama.cpp is built from source for this very machine: its prebuilt wheels leave the faster instructions unused. GCC
# takes parts of its AMX set-up for dead stores and drops them (llama.cpp's pull request 26954), hence the flags.
peers: setup
	CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" CXXFLAGS="-fno-tree-dse -fno-dse" \
		$(BIN)/pip install --no-cache-dir --no-binary llama-cpp-python -e '.[peers]'

clean:
	rm -rf $(VENV) kernels/build .pytest_cache .mypy_cache .ruff_cache
