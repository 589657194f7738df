# Everything runs in .venv, which `make install` creates; the other targets run it first.
PYTHON_BIN := .venv/bin

.PHONY: help install quickstart test lint format

help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 20

install: ## create .venv and install verl-opd for the CPU, with the packages of its tests
	@scripts/install.sh

quickstart: install ## the whole loop on the CPU: prepare a small target, train a new draft for it
	$(PYTHON_BIN)/verl-opd prepare
	$(PYTHON_BIN)/verl-opd train quickstart

test: install ## the whole test suite, lint included
	$(PYTHON_BIN)/python -m pytest

lint: install ## ruff and mypy
	$(PYTHON_BIN)/ruff check .
	$(PYTHON_BIN)/ruff format --check .
	$(PYTHON_BIN)/mypy

format: install ## let ruff rewrite what it can
	$(PYTHON_BIN)/ruff check --fix .
	$(PYTHON_BIN)/ruff format .
