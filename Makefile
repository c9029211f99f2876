# Every target does the set-up it needs: a virtual environment in .venv with the pinned versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# The demo needs less: without a full set-up it gets by with the package and its corpus.
DEMO_READY := $(if $(wildcard $(READY)),$(READY),.venv/.ready-demo)

.PHONY: help setup test test-oldest quick lint results demo clean

help:
	@echo "make setup   a .venv with everything installed"
	@echo "make test    all tests (fast, slow, distributed)"
	@echo "make quick   the fast tests"
	@echo "make test-oldest   the tests of the transformers classes with the oldest transformers that is supported"
	@echo "make lint    ruff and mypy"
	@echo "make results   rebuild docs/results.md and the tables of docs/performance.md from what is kept"
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

# A second environment over the first, in which the oldest supported transformers stands before the pinned one.
.venv-oldest/.ready: $(READY) oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet --no-deps --requirement oldest.txt
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" \
	  > $$(.venv-oldest/bin/python -c "import site; print(site.getsitepackages()[0])")/pinned.pth
	touch $@

test-oldest: .venv-oldest/.ready
	.venv-oldest/bin/python -c "import transformers; print('transformers', transformers.__version__)"
	PYTHONPATH=src .venv-oldest/bin/python -m pytest tests/hub

quick: $(READY)
	$(BIN)/pytest --numprocesses 2 --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Tables and figures of docs/results.md, from the runs kept in results/; tables of docs/performance.md, from
# benchmarks/results/.
results: $(READY)
	$(BIN)/python results/build.py
	$(BIN)/python benchmarks/tables.py

demo: $(DEMO_READY)
	$(BIN)/rmt demo

clean:
	rm -rf .venv .venv-oldest .pytest_cache .mypy_cache .ruff_cache .hypothesis
