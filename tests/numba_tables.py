"""Numba with its tables filled and its cached kernels loaded: imported by the fork server, last of all, for all ranks.

A rank would take a second for the tables, and a fiftieth for each kernel. Nothing is run here, so that no thread of
Numba's is there when ranks are forked. Whatever the fork server has imported stays: ranks neither collect it as garbage
nor search it for models.
"""

import gc
import sys

from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target
from numba.np.ufunc import parallel

import gradwire.kernels.cpu  # noqa: F401


def load_cached(kernel: Dispatcher) -> None:
    """Load what the cache on disk holds of a kernel; compile nothing."""
    cache, codegen = kernel._cache, kernel.targetctx.codegen()
    for key in cache._cache_file._load_index():
        if key == cache._index_key(key[0], codegen):  # of these sources, and of this processor
            kernel.compile(key[0])


threads, parallel.NUM_THREADS = parallel.NUM_THREADS, 1  # none but this one
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
for name in [name for name in sys.modules if name.startswith("gradwire.kernels.cpu.")]:
    for kernel in [x for x in vars(sys.modules[name]).values() if isinstance(x, Dispatcher)]:
        load_cached(kernel)
parallel.NUM_THREADS, parallel._is_initialized = threads, False  # every rank starts its own
gc.collect()
gc.freeze()
