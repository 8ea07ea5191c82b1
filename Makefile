# Everything runs in a virtual environment in this folder. A CUDA user: `make CONSTRAINTS= ...`, after installing the
# torch of their choice into .venv (see README.md, "Install").
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= -c constraints-cpu.txt
PYTEST := $(BIN)/python -m pytest

.PHONY: help train test test-all lint types bench real-model gpu-check equivalence clean

help:
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/'

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Two stamps: training needs less than developing.
$(VENV)/.examples: $(VENV)/bin/python pyproject.toml constraints-cpu.txt
	$(BIN)/pip install -q $(CONSTRAINTS) -e '.[examples]'
	$(BIN)/python .ci/check_torch.py --warn
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints-cpu.txt
	$(BIN)/pip install -q $(CONSTRAINTS) -e '.[dev]'
	$(BIN)/python .ci/check_torch.py --warn
	touch $@ $(VENV)/.examples

train: $(VENV)/.examples  ## train the reference example on the embedded corpus (under 10 minutes on 2 cores)
	$(BIN)/python examples/train.py

test: lint types  ## lint, strict types, tests, docs blocks
	$(PYTEST)
	$(PYTEST) README.md docs

test-all: test  ## and the slow sweeps
	$(PYTEST) -m slow --timeout 1800

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

equivalence: $(VENV)/.dev  ## print the table: each mesh against one process
	$(BIN)/python tests/equivalence.py

bench: $(VENV)/.dev  ## time and memory, as ratios to a floor measured in the same run
	$(PYTEST) -m bench tests/bench --timeout 1800 -s

real-model: $(VENV)/.dev  ## a pretrained SmolLM2-135M: convert, load on two ranks, fine-tune, export (downloads 93 MB)
	$(BIN)/pip install -q $(CONSTRAINTS) gguf
	$(BIN)/python tests/real_model.py all .cache/real-model

gpu-check:  ## what needs an accelerator, on the torch that is installed (no network, no virtual environment)
	PYTHONPATH=src $(PYTHON) -m pytest -o addopts=--import-mode=importlib -W ignore::pytest.PytestConfigWarning \
		--continue-on-collection-errors -m gpu tests

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache runs
