"""Pickles that hold NumPy arrays, read without running anything that they say.

A pickle is a program: it names functions, and the reader calls them. This reader knows three names, those that NumPy
writes for an array, and puts a stand-in of its own behind each; at any other name it stops.
"""

import io
import pickle
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


class _Dtype:
    def __init__(self, code: str | bytes, *flags: object) -> None:
        del flags
        self.code = code.decode() if isinstance(code, bytes) else code

    def __setstate__(self, state: object) -> None:
        del state  # byte order and the like, which single bytes have not


class _Array:
    """Takes in what NumPy would have been given, and hands out plain bytes as an array."""

    def __init__(self, *kind: object) -> None:
        del kind
        self.values: NDArray[np.uint8] = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[int, tuple[int, ...], _Dtype, bool, bytes]) -> None:
        _, shape, dtype, fortran, raw = state
        if dtype.code != "u1" or fortran or not isinstance(raw, bytes):
            raise pickle.UnpicklingError("an array of other things than bytes")
        self.values = np.frombuffer(raw, np.uint8).reshape(shape)


_STAND_INS: dict[tuple[str, str], type] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _STAND_INS[module, name]


def read(path: Path) -> dict[str, object]:
    """A pickled dict of byte arrays, numbers, texts and lists of these. Texts of Python 2 come as bytes."""
    try:
        content = _Reader(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except Exception as error:  # a broken pickle can raise anything
        raise ValueError(f"{path} holds more than plain arrays, or is damaged: {error}. Download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a dict of arrays. Download it again")
    return {
        key.decode("latin-1") if isinstance(key, bytes) else str(key): value.values
        if isinstance(value, _Array)
        else value
        for key, value in content.items()
    }
