# `make help` lists the targets. Variables:
#
#   PYTHON  the Python to install with; if it has torch, that torch is used (default: the newest of python3.14 … python3)
#   VENV    the folder to install into (default: .venv)
#   ARGS    additional arguments for the command that the target runs:  make run ARGS="--plain"

VENV ?= .venv
PYTHON ?=
ARGS ?=
export VENV PYTHON

python := $(VENV)/bin/python
parallel := --numprocesses=3 --dist=loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help run demo install test test-exhaustive ready testbed check lint upgrade clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24

run: install ## train examples/digits.yaml elastically on this machine
	@$(VENV)/bin/elasticjob run examples/digits.yaml $(ARGS)

demo: install ## scale a job, kill its processes, and show how it recovers
	@$(VENV)/bin/elasticjob demo $(ARGS)

install: ## create the virtual environment that `make run` needs
	@scripts/bootstrap.sh local

test: ready ## run the checks and all tests, also those with real processes and a real Kubernetes
	$(python) -m pytest tests $(parallel) $(ARGS)

test-exhaustive: export TORCHELASTIC_EXHAUSTIVE = 1
test-exhaustive: ready ## run all tests with many more examples and servers, and a soak of 200 faults (hours)
	HYPOTHESIS_PROFILE=exhaustive $(python) -m pytest tests --timeout 3600 $(ARGS)
	$(python) -m benchmarks.soak --faults 200 --agents 4

# The checks take one core for a minute; meanwhile, the test bed is prepared.
ready:
	@scripts/bootstrap.sh dev
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=line lint testbed

testbed: ## build Kubernetes and the images for the tests, once, in the user's cache folder
	@scripts/bootstrap.sh dev
	$(python) -m testbed prepare

check: lint ## check format, lint, types and layers, and run the unit tests (under two minutes)
	$(python) -m pytest tests/unit --numprocesses=auto --maxprocesses=4 $(ARGS)

lint: ## check format, lint, types and layers only
	@scripts/bootstrap.sh dev
	$(python) -m ruff format --check .
	$(python) -m ruff check .
	$(python) -m mypy
	$(python) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

upgrade: ## pin the newest versions of all requirements in constraints.txt
	@scripts/bootstrap.sh dev
	$(python) scripts/update_constraints.py

clean: ## remove the virtual environment and the caches of the tools
	@if [ -e "$(VENV)" ] && [ ! -f "$(VENV)/elastic-operator.json" ]; then \
	    echo "$(VENV) was not created by this Makefile, so it is not removed."; else rm -rf "$(VENV)"; fi
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
