# The project's commands. Each sets up .venv first; that step is skipped while pyproject.toml and constraints.txt are
# unchanged. pip reads its usual configuration. Where that finds only torch's CUDA build (3 GB) and the CPU build is
# enough, set PIP_EXTRA_INDEX_URL to PyTorch's CPU index before the first run.
#
#   PYTHON=python3.12    the interpreter that .venv is made with (3.10 to 3.13)
#   VENV=path            another place for the environment
#   TEST_ARGS=...        more arguments for pytest
#   GPU_PYTHON=path      make test-gpu: an interpreter that has torch and pytest already; used as it is, no set-up

PYTHON ?= python3
VENV ?= .venv
TEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.k3dsl-installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/pytest

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-gpu check format golden

help: ## list these commands
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: $(STAMP) ## make .venv and install k3dsl into it, editable, with the pinned versions

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt setuptools
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[test,tilelang,report,postgresql]'
	touch $@

demo: $(STAMP) ## compile KDA for a GPU that need not be here; run it, tune and train on the CPU
	$(BIN)/k3dsl demo

test: $(STAMP) ## the default tests: no GPU, minutes
	$(PYTEST) -n 2 $(TEST_ARGS)

test-slow: $(STAMP) ## the tests that are left out of the default because they take long
	$(PYTEST) -n 2 -m "slow and not gpu" $(TEST_ARGS)

ifdef GPU_PYTHON
test-gpu:
	$(GPU_PYTHON) -m pytest -m gpu $(TEST_ARGS)
else
test-gpu: $(STAMP) ## the tests that need a GPU
	$(PYTEST) -m gpu $(TEST_ARGS)
endif

check: $(STAMP) ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## rewrite the sources in the one format, with the lint fixes that are safe
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

golden: $(STAMP) ## rewrite the golden files in tests/golden; read their diff before it is committed
	$(PYTEST) -n 2 --update-golden $(TEST_ARGS)
