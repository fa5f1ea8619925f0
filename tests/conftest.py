"""One thread, no bfloat16 traps, repeatable examples: set before anything imports torch."""

import gc
import os
import signal
import sys

# Some virtual machines advertise AMX without its tiles: a bfloat16 matmul would die with SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # in processes that tests start, too: threads that wait would spin
if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name need not resolve

import pytest
import torch
from hypothesis import HealthCheck, settings

import spawn

# A shell makes its background processes ignore Ctrl-C, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
spawn.preload()

# Deadlines measure the machine, not the code. The same examples are drawn everywhere, CI included;
# HYPOTHESIS_PROFILE=explore draws new and more ones.
settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", settings.get_profile("steady"), derandomize=False, max_examples=300)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end: no search for garbage, or for models, need visit them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def fork_server(request: pytest.FixtureRequest) -> None:
    """Imports while the first tests run, if some tests are going to need it."""
    starters = {"run_ranks", "run_cases", "cases_fixture"}
    folders = {part for item in request.session.items for part in item.path.parts}
    spawn.preload(*dict.fromkeys(spawn.FOLDERS[name] for name in spawn.FOLDERS if name in folders))
    if any(starters & vars(item.module).keys() for item in request.session.items):
        spawn.start_server()
