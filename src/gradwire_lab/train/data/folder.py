"""Folder: where a data set lies, and an error that names what to download where it does not."""

import hashlib
from collections.abc import Sequence
from pathlib import Path


def find(root: Path | None, name: str, places: Sequence[str], archive: str) -> Path:
    """The first of some places under the data folder that exists."""
    if root is None:
        raise ValueError(f"{name} is read from a folder; download {archive}, unpack it in DIR and pass --data DIR")
    for place in places:
        if (root / place).exists():
            return root / place
    where = " or ".join(str(root / place) for place in places)
    raise ValueError(f"{name} is not there: download {archive} and unpack it so that {where} exists (--data {root})")


def verify(path: Path, digest: str) -> None:
    """Refuse a file that is not the official one, bit for bit."""
    with path.open("rb") as file:
        own = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if own != digest:
        raise ValueError(
            f"{path} is not the official file: its MD5 is {own}, not {digest}. "
            "Download it again, or read what is there with --set data.options.strict=false"
        )
