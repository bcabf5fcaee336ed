# Loadlens: one command each. `make` alone lists them.

SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
RUN := $(BIN)/python

# Nothing here downloads a model or reports usage; widgets, bars and debuggers keep quiet in logs and notebooks.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export VLLM_NO_USAGE_STATS := 1
export PYDEVD_DISABLE_FILE_VALIDATION := 1

.PHONY: help env workbook test lab notebooks bench clean
.DEFAULT_GOAL := help

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

env: ## make .venv with the pinned CPU environment (once; PYTHON=python3.12 picks the Python)
	@command -v $(PYTHON) >/dev/null || \
		{ echo "loadlens: no $(PYTHON) here; install Python 3.11 or newer, or name one: make PYTHON=..." >&2; exit 2; }
	@$(PYTHON) requirements/install.py

workbook: env ## execute every notebook into build/ and write the site build/index.html
	@$(RUN) -m loadlens.workbook build

test: env ## run the tests
	@$(RUN) -m pytest

lab: env ## open JupyterLab on the first notebook (LAB=--allow-root and the like are passed on)
	@$(BIN)/jupyter lab $(LAB) notebooks/00_start_here.ipynb

notebooks: env ## maintainers: execute the tracked notebooks in place
	@$(RUN) -m loadlens.workbook refresh

bench: env ## measure what tracing and a cold start cost
	@$(RUN) -m loadlens.bench

clean: ## remove build/ and caches (.venv stays: rm -r .venv)
	@rm -rf build dist .pytest_cache .hypothesis
	@find lib tests notebooks requirements -name __pycache__ -prune -exec rm -rf {} +
