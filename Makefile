# `make demo` shows what torchtrim does, `make test` checks it in minutes, `make test-all`, which CI runs, with
# all that there is. They set up .venv when it is missing or out of date, and need Python 3.11+ and make.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TRAINERS := $(VENV)/trainers/.ready
INSTALLED := $(VENV)/.installed
CANDIDATES := python3 python3.12 python3.11 python3.13
IS_NEW := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in $(CANDIDATES); do $$p -c "$(IS_NEW)" 2>/dev/null && echo $$p && break; done)
# Where the CPU build of torch is. Without it pip would fetch gigabytes of CUDA on Linux.
# For the CUDA build: make demo TORCH_INDEX=https://pypi.org/simple
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.DELETE_ON_ERROR:
.PHONY: demo test test-all test-rest coverage test-gpu bench clean help
.DEFAULT_GOAL := help

$(INSTALLED): constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "torchtrim needs Python 3.11 or later: make PYTHON=/path/to/python"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --retries 1 --no-deps --extra-index-url $(TORCH_INDEX) -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[solver]'
	@touch $@

$(READY): $(INSTALLED)
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

# transformers, trl, Lightning and accelerate, for examples/trainers/ alone: without dependencies, since pip would
# fetch another torch. Where they are not to be had, those examples are skipped.
$(TRAINERS): tests/integrations/requirements.txt $(READY)
	@rm -rf $(@D)
	@$(PIP) install --no-deps --target $(@D) -r $< && touch $@ \
		|| { rm -rf $(@D); echo "examples/trainers/ are skipped: their libraries could not be installed"; }

demo: $(INSTALLED)
	$(BIN)/torchtrim optimize examples/segmentation.py --memory 60%
	$(BIN)/torchtrim optimize examples/charlm.py --memory 60% --device cpu
	@echo "To have torchtrim on your path: source $(BIN)/activate"

# One thread each: two test processes share the cores. They keep what they compile of Python.
TESTS := test test-all test-rest coverage
$(TESTS): export OMP_NUM_THREADS := 1
$(TESTS): export PYTHONDONTWRITEBYTECODE :=
$(TESTS): export TORCHTRIM_TEST_SEED := $(or $(TORCHTRIM_TEST_SEED),$(strip $(shell od -An -N4 -tu4 /dev/urandom)))
# No test takes fifteen minutes: one that does hangs.
PYTEST := $(BIN)/pytest -n 2 --dist worksteal --durations 10 --timeout 900
# What failed runs once more with the same draws and nothing beside it. What passes then depends on the moment or on
# the tests before it: it is named, does not fail the build, and is to be mended.
AGAIN := echo "== again, alone:" && $(BIN)/pytest -rA -q --lf --lfnf none --timeout 900
FLAKY := echo "== passed alone, so each of these is flaky, and is to be mended"

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(PYTEST) || { $(AGAIN) && $(FLAKY); }

test-all: test test-rest

# What `make test` leaves out: slow tests, and those that draw, with all their cases.
test-rest: $(READY) $(TRAINERS)
	$(PYTEST) --full --rest || { $(AGAIN) --full && $(FLAKY); }

coverage: $(READY)
	$(PYTEST) --cov

# Where there is a GPU: the battery, whose file can be attached to an issue, and the tests that need one.
test-gpu: $(READY)
	$(BIN)/torchtrim doctor --gpu torchtrim-gpu.json $(addprefix examples/,charlm.py gan.py resnet.py segmentation.py vit.py) || true
	$(BIN)/pytest tests/gpu

# Every file of bench/ that can be run is a benchmark; one alone: python -m bench.recorder
bench: $(READY)
	@for file in $$(grep -l '^if __name__ == "__main__"' bench/*.py); do \
		name=$$(basename $$file .py); echo "== bench.$$name"; $(BIN)/python -m bench.$$name || exit; \
	done

clean:
	rm -rf $(VENV) build dist torchtrim-out .coverage* .hypothesis .*_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

help:
	@echo "make demo      fit two example scripts into 60% of their memory"
	@echo "make test      lint, types, import contracts, and tests that take minutes"
	@echo "make test-all  every test, with all its random draws"
	@echo "make coverage  lines that the tests of make test run, at least 90 %"
	@echo "make test-gpu  the emulated device against this machine's GPU, and the tests that need one"
	@echo "make bench     the benchmarks of bench/"
	@echo "make clean     remove .venv and all that was made"
