# Each verb sets up what it needs, once: `demo` less than the others. Wanted beforehand: Python 3.11 or newer, git, make.
#   make test ARGS="-k loader"     make bench ARGS=--quick     PYTHON=python3.12 make setup

SHELL := /bin/bash
BIN := .venv/bin
READY := .venv/ready
# The demo needs a part of that, which is enough as long as nothing else was asked for.
DEMO_READY := $(if $(wildcard $(READY)),$(READY),.venv/ready-for-demo)
ARGS ?=
# Which tests: `fast`, `slow` or `all`. One run of pytest has them all, and none of them twice.
TESTS ?= fast
MARKS_fast := -m "not slow"
MARKS_slow := -m "slow"
MARKS_all :=
# Two processes share the tests, file by file, in the order of `tests/conftest.py`.
SHARED ?= --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: help setup demo test evidence lint docs bench results dist
.DELETE_ON_ERROR:

help:
	@echo "make setup   .venv with the pinned, tested versions; the other verbs do this themselves"
	@echo "make demo    train on four workers of different speeds: equal batches against balanced ones"
	@echo "make test    lint, then the fast tests: every promise, in minutes"
	@echo "              TESTS=all: long variants too, and properties on more cases"
	@echo "make evidence  what takes hours: races, every fault, broken code; goes on where it was"
	@echo "make lint    style, types and import layers"
	@echo "make docs    the documentation as web pages, in site/"
	@echo "make bench   every figure that the documentation claims"
	@echo "make results the figures of evidence/results.md, from the races in evidence/arena/"
	@echo "make dist    sdist and wheel in dist/, after their tests and a type check for each Python"

setup: $(READY)

$(READY): .ci/setup constraints.txt pyproject.toml
	@.ci/setup .venv
	@touch $@

.venv/ready-for-demo: .ci/setup constraints.txt pyproject.toml
	@.ci/setup .venv demo
	@touch $@

demo: $(DEMO_READY)
	$(BIN)/evenstep demo $(ARGS)

# As under torchrun: several processes with a thread for each core stand in each other's way.
test: export OMP_NUM_THREADS := $(or $(OMP_NUM_THREADS),1)
# Tests start hundreds of processes: each would compile the whole tree where no bytecode is kept.
test: export PYTHONDONTWRITEBYTECODE :=
test: lint
	$(BIN)/python -m pytest $(MARKS_$(TESTS)) $(SHARED) $(ARGS)

# One result for each benchmark, in evidence/; what is there for this source is kept.
evidence: $(READY)
	$(BIN)/python -m benchmarks._evidence $(ARGS)

lint: $(READY)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports

docs: $(READY)
	$(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html"

# One benchmark that misses its bar must not hide the figures of those after it.
bench: $(READY)
	@missed=; \
	for file in benchmarks/[a-z]*.py benchmarks/[a-z]*/__main__.py; do \
		name=$${file%/__main__.py}; name=$$(basename "$$name" .py); \
		echo "== python -m benchmarks.$$name $(ARGS)"; \
		$(BIN)/python -m "benchmarks.$$name" $(ARGS) || missed="$$missed $$name"; \
	done; \
	if [ -n "$$missed" ]; then echo "short of a bar:$$missed"; exit 1; fi

# Which races there are: `make evidence ARGS="--only arena"`.
results: $(READY)
	$(BIN)/python -m benchmarks._results $(ARGS)

dist: $(READY)
	rm -rf dist
	$(BIN)/python -m pytest tests/form/test_wheel.py tests/form/test_typing.py tests/form/test_repository.py
	$(BIN)/python -m build --no-isolation --outdir dist
