# Everything runs in .venv, which the first target to need it makes from pinned constraints.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Most tests keep one core busy, or wait for ranks that do. A file stays with one worker: its tests share what is costly.
WORKERS := --numprocesses=2 --dist=loadfile

.PHONY: demo test test-all lint bench clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: lint
	$(BIN)/python -m pytest $(WORKERS) -m "not full" tests/pure tests/cpu tests/fuzz

test-all: lint
	$(BIN)/python -m pytest $(WORKERS) tests/pure tests/cpu tests/fuzz

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python benchmarks/step_overhead.py
	$(BIN)/python -m benchmarks.loop_overhead

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fullshard needs Python 3.11 or newer: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
