"""What a benchmark needs, checked before anything is measured."""

from importlib.util import find_spec
from pathlib import Path

import torch

from gradwire_lab.bench.network import devices


def check_device(device: str, ranks: int = 1) -> None:
    """Check a device before ranks are started on it.

    Raises:
        ValueError: It is no device to measure on, or there are too few.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"nothing is measured on {device!r}; give --device cpu or cuda")
    devices.parse(device)
    if device == "cuda" and ranks > torch.cuda.device_count():
        raise ValueError(f"{ranks} ranks need as many GPUs, and torch sees {torch.cuda.device_count()}")


def check_picture(path: Path | None) -> None:
    """Check what drawing needs before hours of measuring, not after.

    Raises:
        ValueError: A package or a folder is missing, or the file has another kind.
    """
    if path is None:
        return
    if not all(map(find_spec, ("altair", "vl_convert"))):
        raise ValueError("a picture needs two more packages; pip install 'gradwire[report]'")
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"a picture is a PNG or an SVG, and {path} is none; name it {path.stem or 'picture'}.png")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} for the picture; make it first")
