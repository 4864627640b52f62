# Every target does its own set-up: a virtual environment in $(VENV), installed again when setup.cfg changes.
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3,$(shell \
	$(p) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(1)' >/dev/null 2>&1 && echo $(p))))
VENV ?= .venv
WORKERS ?= 2
ARGS ?=
TESTS ?= tests

BIN = $(VENV)/bin

.PHONY: quickstart test test-full lint install clean

quickstart: $(VENV)/.installed
	$(BIN)/python -m experiments.run quickstart $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow" $(ARGS) $(TESTS)

test-full: $(VENV)/.installed-full
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS) $(TESTS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .

install: $(VENV)/.installed-dev

clean:
	rm -rf $(VENV) .cache

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 found. Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment (Debian: apt-get install python3-venv)" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.installed: setup.cfg pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -qq --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-full: setup.cfg pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -qq --disable-pip-version-check -e ".[dev,real-model]"
	@touch $@ $(VENV)/.installed-dev $(VENV)/.installed

$(VENV)/.installed-dev: setup.cfg pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -qq --disable-pip-version-check -e ".[dev]"
	@touch $@ $(VENV)/.installed
