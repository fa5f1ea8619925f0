"""What a benchmark needs, checked before anything is measured."""

from importlib.util import find_spec
from pathlib import Path

from gradwire_lab.cli.output import refuse


def check_device(device: str, command: str, workers: int = 1) -> None:
    """Say that there is no such device before ranks are started on it."""
    import torch

    from gradwire_lab.bench.network import devices

    try:
        if device not in ("cpu", "cuda"):
            raise ValueError(f"nothing is measured on {device!r}; say --device cpu or cuda")
        devices.parse(device)
    except ValueError as wrong:
        refuse(f"bench {command}", wrong)
    if device == "cuda" and workers > torch.cuda.device_count():
        refuse(f"bench {command}", f"{workers} ranks need as many GPUs, and torch sees {torch.cuda.device_count()}")


def check_picture(path: Path | None, command: str) -> None:
    """Say what drawing needs before hours of measuring, not after."""
    wrong = ""
    if path is not None and not all(map(find_spec, ("altair", "vl_convert"))):
        wrong = "a picture needs two more packages; pip install 'gradwire[report]'"
    elif path is not None and path.suffix not in (".png", ".svg"):
        wrong = f"a picture is a PNG or an SVG, and {path} is none; name it {path.stem or 'picture'}.png"
    elif path is not None and not path.parent.is_dir():
        wrong = f"there is no folder {path.parent} for the picture; make it first"
    if wrong:
        refuse(f"bench {command}", wrong)
