# Every target does the set-up it needs: a virtual environment in .venv with the pinned versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

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

test: $(READY)
	$(BIN)/pytest -m "" --numprocesses 2 --dist worksteal

quick: $(READY)
	$(BIN)/pytest --numprocesses 2 --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: $(READY)
	$(BIN)/rmt demo

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
