# make demo | test | lint | bench | soak | schedulers | ray | gpu | clean      (all but the last install what they need into .venv)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TESTS ?= tests
GPU_PYTHON ?= python3

.PHONY: demo test lint bench soak schedulers ray gpu clean

demo: $(VENV)/.stamp-examples
	$(BIN)/unisono run -n 2 examples/digits.py

# Half of the time of the tests is waiting, so there are twice as many workers as cores.
test: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest -n 4 --dist worksteal -m "not soak" $(TESTS)

soak: $(VENV)/.stamp-dev
	FRESH_LAUNCHES=1 $(BIN)/python -m pytest -m soak --timeout 3600 $(TESTS)

# Real Slurm on this machine (needs root, and Debian's slurm-wlm, munge and iproute2), and real MPI (openmpi-bin, mpich).
schedulers: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest -rs -m "soak or not soak" tests/launch/test_slurm.py tests/job/test_mpi.py

# A real Ray cluster of several nodes on this machine.
ray: $(VENV)/.stamp-dev
	$(PIP) install --quiet --constraint constraints.txt --editable ".[ray]"
	$(BIN)/python -m pytest -rs tests/launch/test_ray.py

# Tests that need an NVIDIA GPU and a torch for CUDA: GPU_PYTHON is a Python that has it, with what pytest needs.
gpu:
	FRESH_LAUNCHES=1 PYTHONPATH=src $(GPU_PYTHON) -m pytest -rs tests/gpu tests/trainer/test_recovery.py tests/trainer/test_ranks_differ.py \
		-k "gpu or ranks_differ and not shared"

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.stamp-dev
	$(BIN)/python -m bench --all

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache

# Installed editable, so that the sources in this folder are the ones that run.
$(VENV)/.stamp-examples: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing unisono and PyTorch into $(VENV); this takes a while the first time."
	$(PIP) install --quiet --constraint constraints.txt --editable ".[examples]"
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing unisono, PyTorch and the tools for development into $(VENV); this takes a while the first time."
	$(PIP) install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@ $(VENV)/.stamp-examples

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
