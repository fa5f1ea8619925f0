"""Checksums: tensors in a safetensors file, with a checksum of names, shapes and bytes in its header.

A file that was cut short would be noticed without it. A flipped bit would not, and training would
continue from wrong numbers. Files without a checksum are read as they are.
"""

import os
import re
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
    try:
        save_file(own, partial, {_KEY: checksum(own)})
    except SafetensorError as wrong:  # its text ends as in: No space left on device (os error 28)
        number = re.search(r"os error (\d+)", str(wrong))
        raise OSError(int(number[1]) if number else 0, str(wrong), str(partial)) from None
    publish(partial, path)


def publish(partial: Path, path: Path) -> None:
    """Rename a complete file to its name: after a power cut, the folder has the old file or the new one."""
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if os.name != "posix":  # elsewhere folders cannot be opened
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path) -> dict[str, Tensor]:
    """What `write` wrote.

    Raises:
        Unreadable: It is missing or damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            noted = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as wrong:
        raise Unreadable(str(wrong)) from None
    if noted.keys() - {"format"} and noted.get(_KEY) != checksum(state):  # the key itself may be damaged
        raise Unreadable("its checksum is wrong, so some of its bytes have changed")
    return state


def checksum(state: Mapping[str, Tensor]) -> str:
    """The checksum of names, formats, shapes and bytes."""
    crc = 0
    for name, x in sorted(state.items()):
        x = x.detach().cpu().contiguous()
        crc = zlib.crc32(f"{name} {x.dtype} {tuple(x.shape)}".encode(), crc)
        crc = zlib.crc32(x.reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"
