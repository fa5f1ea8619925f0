"""Numba with its tables filled, which takes a process most of a second: imported by the fork server, for all ranks.

Nothing is compiled or run here, so that no thread of Numba's is there when ranks are forked.
"""

from numba.core.registry import cpu_target

import gradwire.kernels.cpu  # noqa: F401

cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
