"""Quiet tracker: Python's resource tracker, without its warnings."""

import os
from multiprocessing import resource_tracker


def start_quiet_tracker() -> None:
    """Start Python's resource tracker with its warnings off, in its own environment alone.

    It clears away numba's semaphores of ranks that were stopped, and would warn of a leak after our own last line.
    """
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (before, "ignore:resource_tracker:UserWarning")))
    resource_tracker.ensure_running()
    del os.environ["PYTHONWARNINGS"]
    if before is not None:
        os.environ["PYTHONWARNINGS"] = before
