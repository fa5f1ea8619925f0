"""Compile notice: the first use of kernels takes a while, so a warning says why."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradwire.kernels.dispatch import accelerated, versions

_log = logging.getLogger("gradwire")


@contextmanager
def compile_notice(device: torch.device, first: bool) -> Iterator[None]:
    """On the first rank, say once that Numba compiles kernels that it does not find on disk, and how long it took."""
    if not first or device.type != "cpu" or not accelerated() or versions("cpu") is None:
        yield
        return
    from numba.core import event

    class Notice(event.Listener):
        shown = False

        def on_start(self, event: Any) -> None:
            if not self.shown:
                self.shown = True
                _log.warning(
                    "gradwire: compiling CPU kernels, which takes up to a minute, or longer on a busy machine; it "
                    "happens once for each kind of kernel, since they are kept on disk"
                )

        def on_end(self, event: Any) -> None:
            """The end of a single kernel is not logged."""

    notice, began = Notice(), time.perf_counter()
    with event.install_listener("numba:compile", notice):
        yield
    if notice.shown:
        _log.warning("gradwire: CPU kernels were compiled in %.0f s", time.perf_counter() - began)
