# Everything runs in .venv; `make` alone says what there is.
PYTHON ?= python3
BIN := .venv/bin
# Modules are compiled when they are first imported; all of them would take a minute, and most are never imported.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
QUICKSTART ?=
# Arguments of the proofs: `--part 0/2` runs half of them.
PROVE ?=
# Arguments of `make fuzz`: how many settings, and the options that `python -m tests.fuzz --help` lists.
FUZZ ?= 20
# One test runner a core, four at most: tests start processes of their own. Tests that share a fixture stay together.
PYTEST := $(BIN)/pytest -n auto --maxprocesses 4 --dist worksteal

.PHONY: help quickstart test test-oldest prove fuzz commands lint bench gpu-mock clean

help:
	@echo "make quickstart   install, train a small model on this machine, show what it learned"
	@echo "make test         install with the test tools and run the tests; 6 minutes on 2 cores"
	@echo "make test-oldest  what depends on the version of PyTorch, on the oldest version allowed; 3 minutes on 2 cores"
	@echo "make prove        matrices of layouts, mutations, kill trials, planner accuracy; about 40 minutes"
	@echo "make fuzz         random models and layouts against one process, failures shrunk; 3 minutes on 2 cores"
	@echo "make commands     every command of README and docs, run as typed; most of an hour"
	@echo "make lint         ruff, mypy, import-linter, names"
	@echo "make bench        CPU-seconds a step beside hand-written loops, printed"
	@echo "make gpu-mock     the whole CUDA path on a mock of the GPU: 6 GB of packages, no GPU, half an hour on 2 cores"
	@echo "make clean        remove .venv and what quickstart wrote"

# Tests start many processes: without compiled files in __pycache__ each of them compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

# torch comes first and pinned: asked for as a range, pip may take a build with several GB of CUDA.
.venv/.base: constraints.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shardwright needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	$(PIP) -e .
	@touch $@

.venv/.dev: .venv/.base
	$(PIP) -e '.[dev]'
	@touch $@

# lm-eval brings 29 packages, 146 MB: only `make prove` runs it; in `make test` tests/generation/lm_eval_interface.py does.
# MLflow's client, 22 MB, is slow to import: tests/training/test_mlflow.py is part of `make prove`.
# Playwright, 46 MB, drives the machine's Chromium in tests/explore/test_browser.py; it downloads no browser itself.
.venv/.prove: .venv/.dev
	$(PIP) -e '.[lm-eval,mlflow]' playwright
	@touch $@

quickstart: .venv/.base
	$(BIN)/shardwright quickstart $(QUICKSTART)

test: .venv/.dev
	@echo "unit tests, one parity case a feature, each verb end to end: 6 minutes on 2 cores; the rest: make prove"
	$(PYTEST) -m "not prove and not commands"

# The oldest PyTorch that pyproject.toml allows, and the tests of all that differs between versions. PyPI has no CPU
# build of it for Linux: pip downloads 2.5 GB of CUDA libraries, 5 GB on the disk.
OLDEST := .venv-oldest/bin
OLDEST_TORCH := $(shell sed -n 's/^ *"torch>=\([0-9.]*\),.*/\1/p' pyproject.toml)
OLDEST_TESTS := tests/test_torch_private.py tests/model/test_documents.py tests/model/test_fp8.py \
	tests/parallel/test_apply.py tests/parallel/test_secondary.py tests/dryrun/test_program.py \
	tests/training/test_compression.py tests/training/test_offload_parameters.py

.venv-oldest/.dev: constraints.txt pyproject.toml
	test -x $(OLDEST)/python || $(PYTHON) -m venv .venv-oldest
	sed 's/^torch==.*/torch==$(OLDEST_TORCH).*/' constraints.txt > .venv-oldest/constraints.txt
	$(OLDEST)/pip install --quiet --disable-pip-version-check --no-compile -c .venv-oldest/constraints.txt \
		-e . pytest pytest-timeout hypothesis
	@touch $@

test-oldest: .venv-oldest/.dev
	@echo "tests of what differs between versions of PyTorch, on $(OLDEST_TORCH)"
	$(OLDEST)/python -c 'import torch; assert torch.__version__.startswith("$(OLDEST_TORCH)."), torch.__version__'
	$(OLDEST)/pytest -m "not prove and not commands" $(OLDEST_TESTS)

prove: .venv/.prove
	@echo "matrices of layouts, mutations, kill trials, planner accuracy: about 40 minutes on 2 cores"
	$(PYTEST) -m prove $(PROVE)

fuzz: .venv/.dev
	@echo "random models and layouts, each compared with one process: 20 take 3 minutes on 2 cores, more if some fail"
	$(BIN)/python -m tests.fuzz $(FUZZ)

commands: .venv/.dev
	@echo "every command of README and docs, as typed, in copies of this checkout: most of an hour on 2 cores"
	$(BIN)/pytest -m commands

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python benchmarks/names.py

bench: .venv/.dev
	$(BIN)/python benchmarks/overhead.py

# The CUDA build of the PyTorch of the GPU machine, in an environment of its own; ONLY names some configurations.
GPU_PYTHON ?= python3.12
GPU_MOCK := build/gpu-mock
ONLY ?=

$(GPU_MOCK)/venv/.made: pyproject.toml
	$(GPU_PYTHON) -m venv $(GPU_MOCK)/venv
	$(GPU_MOCK)/venv/bin/pip install --quiet --disable-pip-version-check torch==2.11.0
	$(GPU_MOCK)/venv/bin/pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(GPU_MOCK)/mock/libcuda.so.1: $(GPU_MOCK)/venv/.made $(wildcard benchmarks/gpu/mock/*.cpp) benchmarks/gpu/mock/mock.h benchmarks/gpu/mock/build.py
	$(GPU_MOCK)/venv/bin/python benchmarks/gpu/mock/build.py $(GPU_MOCK)/mock

gpu-mock: $(GPU_MOCK)/mock/libcuda.so.1
	$(GPU_MOCK)/venv/bin/python benchmarks/gpu/mock/check.py $(GPU_MOCK)/mock $(if $(ONLY),--only $(ONLY))

clean:
	rm -rf .venv .venv-oldest quickstart
