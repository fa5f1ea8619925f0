"""Checksums: tensors in a safetensors file, with a checksum of names, shapes and bytes in its header.

A file that was cut short would be noticed without it. A flipped bit would not, and training would
continue from wrong numbers. Files without a checksum are read as they are.
"""

import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_KEY = "crc32"


class Unreadable(ValueError):
    """The file is missing, cut short, or not what was written; the text names the reason."""


def write(state: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors atomically: a reader sees the old file or the new one, never half of it."""
    own = {name: x.detach().cpu().contiguous() for name, x in state.items()}
    partial = path.with_name(path.name + ".partial")
    save_file(own, partial, {_KEY: _checksum(own)})
    partial.replace(path)


def read(path: Path) -> dict[str, Tensor]:
    """What `write` wrote.

    Raises:
        Unreadable: It is not there any more.
    """
    try:
        with safe_open(path, "pt") as file:
            saved = (file.metadata() or {}).get(_KEY)
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as wrong:
        raise Unreadable(str(wrong)) from None
    if saved is not None and saved != _checksum(state):
        raise Unreadable("its checksum is wrong, so some of its bytes have changed")
    return state


def _checksum(state: Mapping[str, Tensor]) -> str:
    crc = 0
    for name, x in sorted(state.items()):
        crc = zlib.crc32(f"{name} {x.dtype} {tuple(x.shape)}".encode(), crc)
        crc = zlib.crc32(x.reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"
