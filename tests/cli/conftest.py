"""Fork servers are one per process: keep the one that serves the other tests."""

import pytest

import workers
from gradwire.train import launch


@pytest.fixture(autouse=True, scope="session")
def one_fork_server():
    launch.PRELOAD = (*launch.PRELOAD, *workers.PRELOAD)
