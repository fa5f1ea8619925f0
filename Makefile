# Everything runs from .venv, which `make setup` builds and every other verb keeps up to date.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# Some virtual machines advertise AMX without offering its tiles, and there a bfloat16 matmul dies
# with SIGILL. Keeping oneDNN to AVX-512 costs little and works everywhere.
test study train interpret: export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16
# Tests start hundreds of processes. Byte code is written, whatever the environment says, so that they share it.
test study interpret: export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup train test study interpret check format docs

help:  ## Show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1	\2/p' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Build or refresh .venv

# Torch goes first and pinned, so that nothing later chooses a build of its own. Pip compiles what it installs, but not
# what lies here; where Python may not write byte code, every process of a test would do so anew.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	$(BIN)/python -m compileall -q src
	@touch $@

train: setup  ## Train on the digits with compressed gradients
	$(BIN)/gradwire demo $(ARGS)

# Tests that mostly compute in one process run with low priority beside those that start many ranks. Tests that watch a
# clock come last, beside those of network hosts, which mostly wait.
CLOCKS := $(addprefix tests/,comm/test_throttled.py gossip/test_elastic.py gossip/test_peers.py \
	perf_model/test_auto.py perf_model/test_probe.py test_spawn.py)
HOSTS := $(addprefix tests/network/test_,hosts.py lost_host.py)
LAST := $(addprefix --ignore=,$(CLOCKS) $(HOSTS))
COMPUTE := $(addprefix tests/,bench codecs comm core engine kernels laws network perf_model topology) \
	$(patsubst %,tests/gossip/test_%.py,consensus equalities gamma stack state study) \
	$(patsubst %,tests/local/test_%.py,handle rounds) tests/optim/test_adamw.py tests/optim/test_adaptive_methods.py \
	tests/cli/test_sentences.py
PYTEST := $(BIN)/python -m pytest

test: setup  ## Run the tests
ifdef ARGS
	$(PYTEST) $(ARGS)
else
	@status=0; log=$$(mktemp); trap 'kill $$other; rm -f $$log; exit 130' INT TERM; \
	together() { \
		nice -n 10 $(PYTEST) -p no:cacheprovider --timeout 300 $$1 >$$log 2>&1 & other=$$!; \
		$(PYTEST) $$2 || status=$$?; \
		wait $$other || status=$$?; cat $$log; \
	}; \
	together "$(COMPUTE) $(LAST)" "$(addprefix --ignore=,$(COMPUTE)) $(LAST)"; \
	together "$(HOSTS)" "$(CLOCKS)"; \
	rm $$log; exit $$status
endif

study: setup  ## Run the tests that take long
	$(BIN)/python -m pytest -m study $(ARGS)

interpret: setup  ## Run all tests of the Triton kernels on the CPU, under Triton's interpreter
	TRITON_INTERPRET=1 $(BIN)/python -m pytest --timeout 600 tests/kernels/test_cuda_*.py $(ARGS)

check: setup  ## Check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup  ## Rewrite the code in the one format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup  ## Regenerate docs/codecs.md from the registry
	$(BIN)/gradwire codecs --markdown > docs/.codecs.partial
	@mv docs/.codecs.partial docs/codecs.md
