# Everything runs in .venv, made from pinned constraints. A stamp .venv/.NAME adds the packages of EXTRAS_NAME, so any
# target can come first and a later one completes what is there. HOLDS_NAME: the stamps that this installation serves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS_demo := torch
EXTRAS_install := data,hf,page,plot,migrate
EXTRAS_dev := dev,jax
EXTRAS_docs := docs
EXTRAS_versions := torch,jax,data,hf
HOLDS_demo := demo
HOLDS_install := demo install
HOLDS_dev := demo install dev
HOLDS_docs := docs
# Three workers keep two cores busy: many tests wait. A file stays with one worker: its tests share what is costly. Files
# begin in the order that is given, those of minutes first: at the end no worker is left alone with one.
WORKERS := --numprocesses=3 --dist=loadfile --no-loadscope-reorder
TORCH := tests/cpu tests/fuzz tests/pure
# The files with tests for the lowest torch. Others import what its environment lacks.
OLDEST := $(addprefix tests/cpu/test_,any_model.py planner.py recipes.py unused_parameters.py)

# Compiled once, modules of torch and transformers import twice as fast.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test test-torch test-float8 test-all test-jax test-versions lint style types bench docs clean

# What a user needs: training, Hugging Face models, data preparation, benchmark plots, the page, migration.
install: $(VENV)/.install

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py --steps 200 --rows 4 --sample 100

# Two at a time: mypy, then JAX's compiler, fill the cores while tests of torch wait. Each of the four can fail it.
test: style
	$(MAKE) --no-print-directory --jobs=2 types test-torch test-jax test-float8

test-torch: $(VENV)/.dev
	$(BIN)/python -m pytest $(WORKERS) -m "not full" $(TORCH)

# Apart: where torchao is installed, transformers imports it with every model, for seconds and with warnings.
test-float8: $(VENV)/.dev $(VENV)/.float8
	PYTHONPATH=$(CURDIR)/$(VENV)/float8 $(BIN)/python -m pytest -m "not full" tests/cpu/test_float8.py

test-all: lint $(VENV)/.float8
	$(BIN)/python -m pytest $(WORKERS) $(TORCH)
	$(BIN)/python -m pytest $(WORKERS) tests/jax
	PYTHONPATH=$(CURDIR)/$(VENV)/float8 $(BIN)/python -m pytest tests/cpu/test_float8.py

# All that is quick of the JAX engine. By itself: a process that has used JAX must not fork, as loaders of torch do.
test-jax: $(VENV)/.dev
	$(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder -m "not full" tests/jax

# The lowest versions that pyproject.toml declares, all at once, and the newest that pip finds. Each end has an environment.
test-versions: build/versions/lowest/.made build/versions/newest/.made
	build/versions/lowest/bin/python -m pytest tests/versions
	build/versions/lowest/bin/python -m pytest -m oldest_torch $(OLDEST)
	build/versions/newest/bin/python -m pytest tests/versions

build/versions/%/.made: pyproject.toml constraints.txt tests/versions/bounds.py
	mkdir -p build/versions
	$(PYTHON) tests/versions/bounds.py $* $(EXTRAS_versions) > build/versions/$*.txt
	$(PYTHON) -m venv --clear build/versions/$*
	build/versions/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint build/versions/$*.txt --editable '.[$(EXTRAS_versions)]' pytest
	touch $@

lint: style types

style: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/step_overhead.py
	$(BIN)/python -m benchmarks.loop_overhead

# The documentation as a site, in build/docs. A broken link, a missing anchor or a page outside the navigation fails.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -W --keep-going -q -E -c docs . build/docs

$(VENV)/.float8: $(VENV)/.dev constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --target $(VENV)/float8 --constraint constraints.txt torchao
	touch $@

$(VENV)/.%: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fullshard needs Python 3.11 or newer: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[$(EXTRAS_$*)]'
	touch $(addprefix $(VENV)/.,$(HOLDS_$*))

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
