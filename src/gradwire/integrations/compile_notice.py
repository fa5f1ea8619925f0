"""First use: whoever waits for kernels to be compiled is told so while they wait."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradwire.kernels.dispatch import accelerated, versions

_log = logging.getLogger("gradwire")


@contextmanager
def telling_of_compilers(device: torch.device, first: bool) -> Iterator[None]:
    """On the first rank, say it once when Numba begins to compile a kernel that it does not find on disk."""
    if not first or device.type != "cpu" or not accelerated() or versions("cpu") is None:
        yield
        return
    from numba.core import event

    class Teller(event.Listener):
        told = False

        def on_start(self, happened: Any) -> None:
            if not self.told:
                self.told = True
                _log.warning(
                    "gradwire: compiling CPU kernels, which takes up to a minute, or longer on a busy machine; it "
                    "happens once, since they are kept on disk"
                )

        def on_end(self, happened: Any) -> None:
            """Nothing is said of a single kernel."""

    with event.install_listener("numba:compile", Teller()):
        yield
