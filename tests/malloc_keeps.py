"""Memory that is freed is kept for the next tensor: imported by the fork server, for all ranks.

Otherwise the C library gives large tensors back to the system at once, and the system spends more time on clearing
pages for the next ones than the tests spend on computing.
"""

import ctypes
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # names of malloc.h
MOST = 32 << 20  # bytes; malloc takes no larger threshold for a mapping

if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, MOST)
    ctypes.CDLL(None).mallopt(TRIM_THRESHOLD, 1 << 30)
