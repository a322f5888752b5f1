# `make help` lists what can be made.
#
#   PYTHON  the Python to install on; if it has torch, that torch is used (default: the newest of python3.14 … python3)
#   VENV    where to install (default: .venv)
#   ARGS    more arguments for what is run:  make run ARGS="--plain"

VENV ?= .venv
PYTHON ?=
ARGS ?=
export VENV PYTHON

python := $(VENV)/bin/python
parallel := --numprocesses=3 --dist=loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help run demo install test test-exhaustive testbed check lint upgrade clean

help: ## say what can be made
	@sed -n 's/^\([a-z-]*\):[^#]*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24

run: install ## train examples/digits.yaml elastically on this machine
	@$(VENV)/bin/elasticjob run examples/digits.yaml $(ARGS)

demo: install ## see a job scaled, killed and recovering, by itself
	@$(VENV)/bin/elasticjob demo $(ARGS)

install: ## make the virtual environment that `make run` needs, and nothing else
	@scripts/bootstrap.sh local

test: lint testbed ## everything: the checks, and all tests on real processes and a real Kubernetes
	$(python) -m pytest tests $(parallel) $(ARGS)

test-exhaustive: export TORCHELASTIC_EXHAUSTIVE = 1
test-exhaustive: lint testbed ## all tests with far more examples and servers, and a soak of 200 random faults (hours)
	HYPOTHESIS_PROFILE=exhaustive $(python) -m pytest tests --timeout 3600 $(ARGS)
	$(python) -m benchmarks.soak --faults 200 --agents 4

testbed: ## build the Kubernetes and the images that the tests run on, once, into the user's cache folder
	@scripts/bootstrap.sh dev
	$(python) -m tests.support.testbed prepare

check: lint ## format, lint, types, layers and unit tests (under two minutes)
	$(python) -m pytest tests/unit --numprocesses=auto --maxprocesses=4 $(ARGS)

lint: ## format, lint, types and layers only
	@scripts/bootstrap.sh dev
	$(python) -m ruff format --check .
	$(python) -m ruff check .
	$(python) -m mypy
	$(python) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

upgrade: ## pin the newest versions of everything in constraints.txt
	@scripts/bootstrap.sh dev
	$(python) scripts/upgrade.py

clean: ## remove the virtual environment and what the tools have left
	@if [ -e "$(VENV)" ] && [ ! -f "$(VENV)/elastic-operator.json" ]; then \
	    echo "$(VENV) was not made by this Makefile, so it stays."; else rm -rf "$(VENV)"; fi
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
