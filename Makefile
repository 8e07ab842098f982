# Every chore of the project; `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install bubblewrap demo test test-fast test-slow chaos lint format types bench goals scale bench-sandbox fuzz docs compose-test clean

help: ## List every chore.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-14s %s\n", $$1, $$2}'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,flower,otel]'
	@touch $@

$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,flower,otel,bench]'
	@touch $@

install: $(STAMP) bubblewrap ## Create .venv and install the project with its test tools.

bubblewrap:
	@scripts/ensure-bubblewrap

demo: install ## Run the scripted tour: sandbox, plugins, queue, follow-up rounds.
	$(BIN)/nekro demo

test: install ## Run the default test suite (SQLite and PostgreSQL, real Redis, real sandbox).
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow' $(PYTEST_ARGS)

test-slow: install ## Run the long proofs: crashes, soak, load.
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

chaos: install ## Run the reliability scenarios of docs/reliability.md: real processes, killed and frozen.
	$(BIN)/python -m pytest tests/chaos tests/system/test_rolling_restart.py tests/system/test_upgrade.py -m slow $(PYTEST_ARGS)

lint: install ## Check style and format.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install ## Rewrite files in the house format.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install ## Check types.
	$(BIN)/mypy

bench: $(BENCH_STAMP) bubblewrap ## Measure one call's round trip and calls per second beside other systems.
	$(BIN)/python -m benchmarks.rpc $(BENCH_ARGS)
	$(if $(BENCH_ARGS),,$(BIN)/python -m benchmarks.goals)

goals: $(BENCH_STAMP) bubblewrap ## Measure a call's road beside the goals that were set for it (GOALS_ARGS).
	$(BIN)/python -m benchmarks.goals $(GOALS_ARGS)

scale: $(BENCH_STAMP) bubblewrap ## Measure how calls scale here, and simulate larger fleets (SCALE_ARGS='--write docs/scaling.md').
	$(BIN)/python -m benchmarks.scale $(SCALE_ARGS)

bench-sandbox: install ## Measure sandbox starts, cold and warm.
	$(BIN)/python -m benchmarks.sandbox

fuzz: install ## Fuzz the argument decoder for a minute.
	$(BIN)/python tests/broker/fuzz_codec.py

docs: install ## Rewrite the generated reference pages.
	$(BIN)/python -m cli.reference

compose-test: install ## Prove compose.yaml on a Docker engine of its own (root, docker.io, docker-compose, debootstrap).
	$(BIN)/python tests/compose/prove.py

clean: ## Remove the environment and caches; data stays.
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist
