# Everything runs from .venv, which `make setup` builds and every other verb keeps up to date.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
KERNELS := .venv/.kernels

# Some virtual machines advertise AMX without offering its tiles, and there a bfloat16 matmul dies
# with SIGILL. Keeping oneDNN to AVX-512 costs little and works everywhere.
$(KERNELS) test study faults train interpret: export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16
# Tests start hundreds of processes. Byte code is written, whatever the environment says, so that they share it.
$(KERNELS) test study faults interpret: export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup train test study faults interpret check format docs

help:  ## Show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1	\2/p' $(MAKEFILE_LIST)

setup: $(STAMP) $(KERNELS)  ## Build or refresh .venv, and compile the CPU kernels

# Packages are compared with the hashes of the lock. Torch is only pinned, since its builds for the CPU and for each CUDA
# have one version and different hashes; pip chooses the build, and what that needs beyond the lock. Pip compiles what
# it installs, but not what lies here; where Python may not write byte code, every process of a test would do so again.
$(STAMP): pyproject.toml constraints.txt requirements.lock
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-deps -e .
	$(BIN)/python -m pip check
	$(BIN)/python -m compileall -q src
	@touch $@

# Numba compiles a kernel at its first use and caches it. Processes that start together would each compile all of them.
$(KERNELS): $(STAMP) $(wildcard src/gradwire/kernels/cpu/*.py)
	$(BIN)/gradwire bench kernels --size 3000 --repeats 1 --json >/dev/null
	@touch $@

train: setup  ## Train on the digits with compressed gradients
	$(BIN)/gradwire demo $(ARGS)

# Four parts run beside each other, so that both cores have work while one part waits. Those that mostly compute in one
# process have low priority; the two others start ranks and commands. Tests that watch a clock come last. They mostly wait,
# so three parts of them run beside each other.
CLOCKS := $(addprefix tests/,perf_model/test_auto.py perf_model/test_probe.py test_spawn.py)
PEERS := $(addprefix tests/,comm/test_throttled.py gossip/test_elastic.py gossip/test_peers.py local/test_elastic.py)
HOSTS := $(addprefix tests/network/test_,hosts.py lost_host.py)
LAST := $(addprefix --ignore=,$(CLOCKS) $(PEERS) $(HOSTS))
KERNEL_TESTS := $(addprefix tests/,bench comm core engine kernels network perf_model topology cli/test_sentences.py)
METHOD_TESTS := $(addprefix tests/,codecs laws optim/test_adamw.py optim/test_adaptive_methods.py) \
	$(patsubst %,tests/gossip/test_%.py,consensus equalities gamma stack state study) \
	$(patsubst %,tests/local/test_%.py,handle rounds)
RANK_TESTS := $(addprefix tests/,distributed gossip local optim sharded trainers wire test_examples.py)
PYTEST := $(BIN)/python -m pytest

test: setup  ## Run the tests
ifdef ARGS
	$(PYTEST) $(ARGS)
else
	@status=0; logs=$$(mktemp -d); others=; trap 'kill $$others; rm -rf $$logs; exit 130' INT TERM; \
	beside() { \
		priority=$$1; shift; log=$$(mktemp $$logs/XXXXXX); \
		nice -n $$priority $(PYTEST) -p no:cacheprovider $$* >$$log 2>&1 & others="$$others $$!"; \
	}; \
	finish() { \
		for other in $$others; do wait $$other || status=$$?; done; others=; cat $$logs/*; rm $$logs/*; \
	}; \
	beside 10 $(KERNEL_TESTS) $(LAST); beside 10 $(METHOD_TESTS) $(LAST); \
	beside 0 $(RANK_TESTS) $(addprefix --ignore=,$(METHOD_TESTS)) $(LAST); \
	$(PYTEST) $(addprefix --ignore=,$(KERNEL_TESTS) $(METHOD_TESTS) $(RANK_TESTS)) $(LAST) || status=$$?; finish; \
	beside 0 $(HOSTS); beside 0 $(PEERS); \
	$(PYTEST) $(CLOCKS) || status=$$?; finish; \
	rmdir $$logs; exit $$status
endif

study: setup  ## Run the tests that take long
	$(BIN)/python -m pytest -m study $(ARGS)

# Every campaign writes its counts to faults/. Options: ARGS="payloads --count 1000000 --seed 1", or "--minutes 120".
faults: setup  ## Run the fault campaigns, within ten minutes
	PYTHONPATH=tests:. $(BIN)/python -m faults $(ARGS)

interpret: setup  ## Run all tests of the Triton kernels on the CPU, under Triton's interpreter
	TRITON_INTERPRET=1 $(BIN)/python -m pytest --timeout 600 tests/kernels/test_cuda_*.py $(ARGS)

check: $(STAMP)  ## Check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)  ## Rewrite the code in the one format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)  ## Regenerate docs/codecs.md from the registry, and build the site into site/
	$(BIN)/gradwire codecs --markdown > docs/.codecs.partial
	@mv docs/.codecs.partial docs/codecs.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
