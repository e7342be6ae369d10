# Each target brings the environment up to date first; setup_cutile.sh decides in a moment whether
# there is anything to do.
VENV ?= .venv
export VENV
BIN := $(VENV)/bin
PYTEST_WORKERS ?= 2
MARKS ?= not slow
ARGS ?=
ENGINES_VENV ?= .venv-engines

.DEFAULT_GOAL := help
.PHONY: help setup run test test-slow fuzz test-engines test-gpu lint format docs clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  VENV=<folder> and PYTHON=<interpreter> choose the environment; ARGS='...' goes to run and test."

setup: ## Make the virtual environment, or bring it up to date
	@./setup_cutile.sh

run: setup ## Run the main job: mla_var6_plus end to end, with a report
	@$(BIN)/hyper-mla run $(ARGS)

test: setup ## Run the quick tests, without a GPU; with MARKS= all of them
	@$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal -m "$(MARKS)" $(ARGS)

test-slow: setup ## Run the others: kernels compiled for every target, the tutorial, the examples
	@$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal -m slow $(ARGS)

fuzz: setup ## Draw random calls and compare with float64: half a minute each of a fixed seed and of the commit's own
	@$(BIN)/python -m tests.fuzz --seconds=30 --seed=7 $(ARGS)
	@$(BIN)/python -m tests.fuzz --seconds=30 --seed=$$((0x$$(git rev-parse --short=7 HEAD))) $(ARGS)

test-engines: ## Run vLLM, SGLang and transformers with this package, on the CPU, in an environment of their own
	@ENGINES_VENV=$(ENGINES_VENV) tests/engines/setup.sh
	@$(ENGINES_VENV)/bin/python -m pytest -p no:cacheprovider tests/engines $(ARGS)

test-gpu: setup ## Run the tests that need a GPU
	@$(BIN)/python -m pytest tests/gpu $(ARGS)

lint: setup ## Check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## Format the code and fix what can be fixed safely
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup ## Build the documentation site into site/
	@$(BIN)/mkdocs build --strict --quiet
	@echo "documentation: site/index.html"

clean: ## Remove build products and caches of the tools; keeps .venv, out and cache
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
