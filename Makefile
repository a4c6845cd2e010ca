# Everything runs in its own virtual environment; a file .venv/<extra>.done says that this extra of pyproject.toml is installed.
# Options: PYTHON=python3.12, WORKERS=8, TORCH_INDEX=https://download.pytorch.org/whl/cpu, BENCH="--threads 1,2 --problems mlp"

PYTHON  ?= python3
WORKERS ?= 2
VENV    := .venv
BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip install --quiet --disable-pip-version-check
AGAINST := $(VENV)/against

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow fuzz bench lint format docs examples clean

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/examples.done  ## train on handwritten digits and show what the extra quantities tell (under a minute)
	$(BIN)/python examples/digits.py

test: $(VENV)/test.done  ## run the tests, except the slow ones
	$(BIN)/pytest -n $(WORKERS) -m "not slow" test

test-slow: $(VENV)/test.done  ## run the slow tests
	$(BIN)/pytest -n $(WORKERS) -m slow test

fuzz: $(VENV)/test.done  ## compare random models with the oracle for FUZZ_MINUTES (10 by default)
	PYTHONPATH=.:test $(BIN)/python test/fuzz.py

bench: $(VENV)/examples.done $(AGAINST)/done  ## measure what each quantity costs, here and elsewhere, and write docs/benchmarks.md (on a quiet machine)
	$(BIN)/python test/benchmark/run.py --against torch.func,opacus,backpack,curvlinops,by_hand,hooks_only --python $(AGAINST)/bin/python $(BENCH)
	$(BIN)/python test/benchmark/report.py

lint: $(VENV)/lint.done  ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/lint.done  ## repair style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/docs.done  ## build the documentation and run changed examples for it; warnings are errors
	rm -rf docs/api docs/generated
	$(BIN)/sphinx-build -E -W --keep-going -q docs docs/_build
	@echo "open docs/_build/index.html"

examples: $(VENV)/examples.done  ## run all examples
	@for script in examples/[!_]*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

clean:  ## remove the virtual environment and everything that was built
	rm -rf $(VENV) build dist *.egg-info docs/_build docs/api docs/generated docs/gallery examples/output .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("backpack needs Python >= 3.10, this is " + sys.version)'
	@echo "creating $(VENV) ..."
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/lint.done: requirements/lint.txt | $(BIN)/python
	@echo "installing the linter ..."
	@$(PIP) --requirement $<
	@touch $@

$(VENV)/torch.done: requirements/torch.txt | $(BIN)/python
	@echo "installing torch (may take minutes) ..."
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) --requirement $<
	@touch $@

# The released BackPACK is imported by the same name as this package, so what the benchmark compares with has an environment of its own.
$(AGAINST)/done: requirements/torch.txt requirements/against.txt | $(BIN)/python
	@echo "installing what the benchmark compares with (may take minutes) ..."
	@$(BIN)/python -m venv $(AGAINST)
	@$(AGAINST)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) --requirement requirements/torch.txt
	@$(AGAINST)/bin/python -m pip install --quiet --no-deps --requirement requirements/against.txt
	@touch $@

$(VENV)/%.done: $(VENV)/torch.done pyproject.toml backpack/__init__.py
	@echo "installing backpack[$*] ..."
	@$(PIP) --constraint requirements/torch.txt --editable ".[$*]"
	@touch $@
