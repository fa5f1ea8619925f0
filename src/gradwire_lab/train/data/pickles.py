"""Pickles that hold NumPy arrays, read without running anything else that they name.

A pickle is a program: it names functions, and the reader calls them. This reader knows three names, those that NumPy
writes for an array; at any other name it stops.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np

_reconstruct = np.empty(0).__reduce__()[0]
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,  # as older versions of NumPy call it
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return _ALLOWED[module, name]


def read(path: Path) -> dict[str, object]:
    """A pickled dict of arrays, numbers, texts and lists of these. Texts of Python 2 come as bytes."""
    try:
        with path.open("rb") as file:
            content = _Reader(file, encoding="bytes").load()
    except Exception as error:  # a broken pickle can raise anything
        raise ValueError(f"{path} holds more than plain arrays, or is damaged: {error}. Download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a dict of arrays. Download it again")
    return {key.decode("latin-1") if isinstance(key, bytes) else str(key): value for key, value in content.items()}
