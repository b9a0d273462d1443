# Each target that runs Python makes its own virtual environment; all it needs is make and Python 3.11 or newer.
# pip takes its configuration from the machine (PIP_* variables, pip.conf), so mirrors and proxies just work.

PYTHON ?= python3
TORCH_PIN ?= torch==2.13.0
JAX_PIN ?= jax==0.10.*
JAX_LIBRARY_PINS ?= flax==0.12.* optax==0.2.* equinox==0.13.*
TENSORPLAY_PIN ?= tensorplay==1.0.*

# Two test processes; the tests of one file stay together, since some share a costly start.
PARALLEL ?= --numprocesses 2 --dist loadfile

PIP_INSTALL = -m pip install --quiet --disable-pip-version-check --editable
DEMO = .venv-demo/bin/python
TEST = .venv-test/bin/python
TEST_ALL = .venv-test-all/bin/python
BENCH = .venv-bench/bin/python

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-rest lint format docs bench clean check-python

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv-demo/stamp  ## train, kill the trainer in mid-save, resume, and compare bit for bit
	$(DEMO) examples/demo.py

test: .venv-test/stamp  ## linters and the light test suite, without any framework
	$(MAKE) --no-print-directory lint
	$(TEST) -m pytest $(PARALLEL) -x -m "not slow and not frameworks"

test-all: test test-rest  ## the whole test suite

test-rest: .venv-test-all/stamp  ## what 'make test' leaves out: slow tests, and those with PyTorch and JAX
	$(TEST_ALL) -m pytest $(PARALLEL) -m "slow or frameworks"

lint: .venv-test/stamp  ## ruff and mypy
	$(TEST) -m ruff check .
	$(TEST) -m ruff format --check .
	$(TEST) -m mypy

format: .venv-test/stamp  ## sort imports and format the code in place
	$(TEST) -m ruff check --fix .
	$(TEST) -m ruff format .

docs: .venv-test-all/stamp  ## write docs/supported-types.md anew, from what the tests try
	$(TEST_ALL) docs/generate_supported_types.py

bench: .venv-bench/stamp  ## throughput beside other libraries
	$(BENCH) -m benchmarks

clean:  ## remove everything that make and the tools created
	rm -rf .venv-demo .venv-test .venv-test-all .venv-bench
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist demo-checkpoints
	find . -name __pycache__ -type d -prune -not -path './.venv*' -exec rm -rf {} +

# A stamp is younger than pyproject.toml when everything that it asks for is installed.
.venv-demo/stamp: pyproject.toml | check-python
	rm -rf .venv-demo
	$(PYTHON) -m venv .venv-demo
	$(DEMO) $(PIP_INSTALL) '.[demo]'
	@touch $@

.venv-test/stamp: pyproject.toml | check-python
	rm -rf .venv-test
	$(PYTHON) -m venv .venv-test
	$(TEST) $(PIP_INSTALL) '.[dev]'
	@touch $@

.venv-test-all/stamp: pyproject.toml | check-python
	rm -rf .venv-test-all
	$(PYTHON) -m venv .venv-test-all
	$(TEST_ALL) $(PIP_INSTALL) '.[dev,torch,jax]' '$(TORCH_PIN)' '$(JAX_PIN)' 'safetensors>=0.6' '$(TENSORPLAY_PIN)' \
	  $(foreach pin,$(JAX_LIBRARY_PINS),'$(pin)')
	@touch $@

.venv-bench/stamp: pyproject.toml | check-python
	rm -rf .venv-bench
	$(PYTHON) -m venv .venv-bench
	$(BENCH) $(PIP_INSTALL) '.[bench]'
	@touch $@

check-python:
	@command -v $(PYTHON) >/dev/null || \
	  { echo "There is no '$(PYTHON)' here: install Python 3.11 or newer, or name one: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "'$(PYTHON)' is $$($(PYTHON) --version 2>&1); savestream needs Python 3.11 or newer." \
	         "Name a newer one: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	  { echo "'$(PYTHON)' cannot make virtual environments: install its venv module" \
	         "(on Debian and Ubuntu: the package python3-venv)."; exit 1; }
