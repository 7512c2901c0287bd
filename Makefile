# Everything from a bare clone with Python 3.11 or newer and make:
#   make setup    .venv with flashdraft in it (editable), and what its server needs
#   make dev      the same with the tools of the targets below but demo
#   make demo     an answer from the default model with live statistics, then plain beside drafted
#   make check    format, lint, types, layering and house rules
#   make test     check, then every test; CI runs exactly this. Where vLLM for the CPU cannot be
#                 installed (no build, no network) it says so
#   make test-vllm  the tests against a real vLLM alone, in an environment of its own (2 GB)
#   make clients  the clients of other projects, at exact versions, against a server: installs them
#                 (1.4 GB, in .clients; node 20 or newer), and fails where they cannot be had
#   make wheel    a wheel in dist/ for every machine of this architecture, its contents checked; with
#                 a manylinux tag where auditwheel and patchelf are installed
#   make format   rewrite the sources in the one format
#   make clean    remove what was built; .venv stays, the next target refreshes it
#
# PYTHON picks the interpreter that makes .venv, TORCH the torch that goes into it first. Where that
# is the wrong build for a CUDA machine: make setup TORCH="torch>=2.11,<2.14"

PYTHON ?= python3
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
DEV_STAMP := $(VENV)/.stamp-dev
NATIVE := $(wildcard flashdraft/*/native/*.[ch] flashdraft/kernels/cpu/native/*.[ch])
PROMPT := Write a Python function that reverses a string, and explain how it works.

.PHONY: setup dev demo check test test-vllm clients wheel format clean

setup: $(STAMP)

dev: $(DEV_STAMP)

# An existing .venv, with or without torch, is completed and never rebuilt. torch goes in first and
# by itself, so that its build is chosen here and not by the resolver of everything else.
$(STAMP): pyproject.toml $(wildcard setup.py) $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	  "flashdraft needs Python 3.11 or newer, this is %d.%d; name another one: make setup PYTHON=python3.11" \
	  % sys.version_info[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=77"
	$(BIN)/python -m pip show --quiet torch 2>/dev/null || $(BIN)/python -m pip install "$(TORCH)"
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[serve]"
	@touch $@

$(DEV_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[dev]"
	@touch $@

demo: setup
	$(BIN)/flashdraft generate "$(PROMPT)" --model smollm2-135m
	$(BIN)/flashdraft generate "$(PROMPT)" --model smollm2-135m --compare

check: dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest tests/unit/test_layering.py tests/unit/test_house.py

# Two processes, one thread each, the longest files first. Then, one after the other, what measures
# time, and what runs the default pair as users do, with every processor.
test: check
	$(BIN)/python -m tests.vllm.make_environment --if-installable
	$(BIN)/pytest -m "not (alone or gpu)" -n 2 --dist loadfile --no-loadscope-reorder
	$(BIN)/pytest -m "alone or gpu"

test-vllm: dev
	$(BIN)/python -m tests.vllm.make_environment
	$(BIN)/pytest -m vllm tests/vllm

clients: dev
	$(BIN)/python -m tests.clients.make_environment
	$(BIN)/pytest tests/clients

# Without build/, where what was deleted from the source lives on.
wheel: dev
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/python -m tests.wheel dist

format: dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache $(STAMP) $(DEV_STAMP)
	find flashdraft tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
	find flashdraft -name '*.so' -delete
