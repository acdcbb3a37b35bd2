# `make demo` and `make test` need nothing before them but Python 3.10+, make and a C++ compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests wait for processes that start and end: two workers for each core, at most four.
WORKERS = $(shell $(PYTHON) -c 'import os; print(min(4, (os.cpu_count() or 1) * 2))')
PYTEST = $(BIN)/python -m pytest -q -n $(WORKERS)
# Some hundred processes import the same files: all but the first find them compiled.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help setup demo docs test test-all test-gpu test-machines test-slurm test-orders check lint mypy format bench clean

help:  ## Show the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## Create .venv and install everything pinned in constraints.txt

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "accelight needs Python 3.10 or newer: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)  ## Train a small language model on all GPUs or two CPU processes, merge its checkpoint, use it again, report
	$(BIN)/python examples/train_gpt.py

docs: $(STAMP)  ## Build the site into build/site (Python 3.11 or newer); a broken link or a missing docstring is an error
	$(BIN)/python -m sphinx -W -n --keep-going -q -b html docs build/site

test: $(STAMP)  ## Run the tests
	$(PYTEST) -m "not exhaustive and not machines"

test-all: $(STAMP)  ## Run what `make test` leaves out: the rest of each grid, twelve random orders for each engine
	ACCELIGHT_ORDERS=12 $(PYTEST) -m "exhaustive and not machines"

test-machines: $(STAMP)  ## Run what takes minutes each: launchers that lose machines, cut links, fifty kills, plans
	$(PYTEST) -m machines

test-gpu: $(STAMP)  ## Run the tests that need CUDA (ACCELIGHT_TRY_GPU_TESTS=1 tries most of them on the CPU)
	$(PYTEST) -n 1 -m gpu

test-slurm: $(STAMP)  ## Install SLURM (Debian, Ubuntu; as root) where there is none, and run jobs of it on this machine
	command -v slurmctld || { apt-get update && apt-get install --yes --no-install-recommends slurm-wlm; }
	$(PYTEST) -n 0 -m slurm

test-orders: $(STAMP)  ## Run a thousand random orders of events for each engine, other ones each time
	ACCELIGHT_ORDERS=500 ACCELIGHT_ORDERS_SEED=$$(date +%s) $(PYTEST) tests/strategies/test_orders.py -k random

check: lint mypy  ## Lint, format check and types

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

mypy: $(STAMP)
	$(BIN)/mypy -p accelight
	$(BIN)/mypy tests examples benchmarks tools

format: $(STAMP)  ## Format the code and apply safe lint fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## Measure against the peers (see benchmarks/)
	$(BIN)/python -m benchmarks

clean:  ## Remove what the other targets made
	rm -rf $(VENV) build dist demo_output .mypy_cache .ruff_cache .pytest_cache .torch_extensions
