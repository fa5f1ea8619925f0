"""The first rank alone logs that kernels are being compiled."""

import logging

import pytest
import torch
from numba.core import event

from gradwire.engine.precompile import compile_notice


@pytest.mark.parametrize(("kind", "first", "lines"), [("cpu", True, 1), ("cpu", False, 0), ("cuda", True, 0)])
def test_compiling_is_logged_once(kind: str, first: bool, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gradwire"), compile_notice(torch.device(kind), first):
        for _ in range(2):
            with event.trigger_event("numba:compile"):
                assert caplog.text.count("compiling CPU kernels") == lines  # while it lasts, not after
    assert caplog.text.count("once for each kind of kernel") == lines
    assert caplog.text.count("were compiled in") == lines  # by the first rank alone, and only what was compiled
