# Everything here works from a bare clone with Python 3.11 and make.
PYTHON ?= python3.11
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH_JSON ?= bench.json

.PHONY: help setup demo test lint bench clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-6s %s\n", $$1, $$2}'

setup: $(READY) ## make .venv with everything, pinned

$(READY): requirements/dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)" -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(READY) ## train three models plain and under two budgets, and compare
	$(BIN)/ebbtide demo

test: $(READY) ## run all tests
	$(BIN)/python -m pytest

lint: $(READY) ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY) ## measure five models against plain PyTorch and two peers
	$(BIN)/python -m benchmarks.overhead --json $(BENCH_JSON)

clean: ## remove what the other targets made
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis src/ebbtide.egg-info bench.json
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +
