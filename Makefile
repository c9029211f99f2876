# Every target does the set-up it needs: a virtual environment in .venv with the pinned versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# The demo needs less: without a full set-up it gets by with the package and its corpus.
DEMO_READY := $(if $(wildcard $(READY)),$(READY),.venv/.ready-demo)

.PHONY: help setup test quick lint demo clean

help:
	@echo "make setup   a .venv with everything installed"
	@echo "make test    all tests (fast, slow, distributed)"
	@echo "make quick   the fast tests"
	@echo "make lint    ruff and mypy"
	@echo "make demo    train a mirrored RMT / transformer pair, about five minutes; writes demo/report.html"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(READY)

.venv/.ready-demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[demo]"
	touch $@

test: $(READY)
	$(BIN)/pytest -m "" --numprocesses 2 --dist worksteal

quick: $(READY)
	$(BIN)/pytest --numprocesses 2 --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: $(DEMO_READY)
	$(BIN)/rmt demo

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
