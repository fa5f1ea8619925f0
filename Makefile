# Everything runs from .venv, which `make setup` builds and every other verb keeps up to date.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# Some virtual machines advertise AMX without offering its tiles, and there a bfloat16 matmul dies
# with SIGILL. Keeping oneDNN to AVX-512 costs little and works everywhere.
test study train interpret: export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

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

# Tests that only compute, in one process, take what others leave of the processors: they run beside them with low
# priority, and speak when those are done. Tests that watch a clock come last, when nothing else runs.
COMPUTE := $(addprefix tests/,codecs core perf_model/test_simulation.py kernels laws engine topology) \
	$(patsubst %,tests/gossip/test_%.py,consensus equalities gamma stack state study)
CLOCKS := $(addprefix tests/,bench perf_model gossip/test_elastic.py gossip/test_peers.py comm network test_spawn.py)
IGNORED := $(addprefix --ignore=,$(COMPUTE))

test: setup  ## Run the tests
ifdef ARGS
	$(BIN)/python -m pytest $(ARGS)
else
	@status=0; said=$$(mktemp); \
	nice -n 10 $(BIN)/python -m pytest -p no:cacheprovider --timeout 300 $(COMPUTE) >$$said 2>&1 & beside=$$!; \
	trap 'kill $$beside; rm -f $$said; exit 130' INT TERM; \
	$(BIN)/python -m pytest $(IGNORED) $(addprefix --ignore=,$(CLOCKS)) || status=$$?; \
	wait $$beside || status=$$?; cat $$said; rm $$said; \
	$(BIN)/python -m pytest $(CLOCKS) $(IGNORED) || status=$$?; \
	exit $$status
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
