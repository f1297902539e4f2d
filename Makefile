# Everything runs in .venv, which the first target makes. Stamp files keep what was done from being done again.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check -c constraints.txt
SETUP := pyproject.toml constraints.txt

.PHONY: help read test ready models lint types bench sweep sweep-pruning sweep-cost fuzz keras clean

help:
	@echo 'make read    read the heads of the built-in model on the built-in text; prints a table, writes heads.html'
	@echo 'make test    install what the tests need, fetch two real models (170 MB), run all tests (ARGS="-k masks")'
	@echo 'make lint    ruff        make types   mypy        make bench   the benchmarks        make clean   remove .venv'
	@echo 'make keras   the tests that Keras has for its attention, on ours, in an environment of their own'

read: $(VENV)/installed
	$(VENV)/bin/multihead read --page heads.html $(ARGS)

test: ready
	$(PY) -m pytest -n auto --dist worksteal $(ARGS)

# All that `make test` needs before its last line.
ready: $(VENV)/installed-test models

models: $(VENV)/installed-test
	$(PY) scripts/fetch_models.py

lint: $(VENV)/installed-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(VENV)/installed-dev
	$(PY) -m mypy

# Threads that spin while they wait take the cores from what is timed beside them.
bench: $(VENV)/installed-test
	OMP_WAIT_POLICY=passive $(PY) -m benchmarks.run $(ARGS)

# Every model type of the installed transformers against its own eager attention, pruned, and against its cost.
# Results are kept between runs; ARGS="llama --again" tries one again. Each writes its page in docs/.
sweep: $(VENV)/installed-test
	PYTHONPATH=tests $(PY) -m sweep.models --write docs/models.md $(ARGS)

sweep-pruning: $(VENV)/installed-test
	PYTHONPATH=tests $(PY) -m sweep.models --pruning --write docs/pruning-models.md $(ARGS)

sweep-cost: $(VENV)/installed-test
	PYTHONPATH=tests $(PY) -m sweep.cost --write docs/cost-models.md $(ARGS)

# Random inputs against the definition: ARGS="operator", "layers" or "readings", with --minutes or --seed and --cases.
fuzz: $(VENV)/installed-test
	PYTHONPATH=tests $(PY) -m fuzz.run $(ARGS)

# Keras is no dependency: its tests run in .venv-keras, which the script makes.
keras:
	$(PYTHON) scripts/keras_conformance.py

clean:
	rm -rf $(VENV) .venv-keras

$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "multihead needs Python 3.11 or later, and $(PYTHON) is: $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Install one, or name one that is there: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/installed: $(VENV)/made $(SETUP)
	$(PIP) -e '.[gguf]'
	@touch $@

$(VENV)/installed-test: $(VENV)/made $(SETUP)
	$(PIP) -e '.[test,gguf,pandas]'
	$(PIP) --no-deps timm
	@touch $@ $(VENV)/installed

$(VENV)/installed-dev: $(VENV)/made $(SETUP)
	$(PIP) -e '.[dev,test,gguf,pandas]'
	$(PIP) --no-deps timm
	@touch $@ $(VENV)/installed-test $(VENV)/installed
