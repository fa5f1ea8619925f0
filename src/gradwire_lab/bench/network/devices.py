"""Devices: where a calibration computes."""

from collections.abc import Callable

import torch

from gradwire_lab.bench.network.workloads import CPU, Workload
from gradwire_lab.perf_model.model import ModelProfile

BATCHES = (
    "a model alone is fed the recipe's data, those of the function data in its own file, or else the built-in digits "
    "(1 x 8 x 8); add such a function, or let make return (model, loss), as in docs/training.md#models"
)


def parse(text: str) -> str:
    """What a person says: ``cpu``, ``cuda`` or ``cuda:1``; nothing for where the model is.

    Raises:
        ValueError: There is no such device here, or it is of another kind.
    """
    kind, _, number = text.partition(":")
    if kind not in ("", "cpu", "cuda") or (number and not number.isdigit()):
        raise ValueError(f"nothing is measured on {text!r}; give --device cpu, cuda, or cuda:1 for the second GPU")
    if kind == "cuda":
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(number or 0) >= there:
            raise ValueError(f"there is no {text} here, torch sees {there} GPUs; measure on a machine that has it")
    return text


def check_ranks(device: str, ranks: int = 1) -> None:
    """Check a kind of device before ranks are started, each on one of its own.

    Raises:
        ValueError: It is no device to measure on, or there are too few.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"nothing is measured on {device!r}; give --device cpu or cuda")
    parse(device)
    if device == "cuda" and ranks > torch.cuda.device_count():
        raise ValueError(f"{ranks} ranks need as many GPUs, and torch sees {torch.cuda.device_count()}")


def facts(device: str, dtype: str) -> dict[str, object]:
    """What figures depend on where there are GPUs; nothing where there are none."""
    if not torch.cuda.is_available():
        return {}
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {"gpus": names, "device": device, "dtype": dtype}


def of_rank(text: str, rank: int) -> torch.device:
    """Where a rank computes: ``cuda`` stands for the GPUs in turn."""
    return torch.device("cuda", rank % torch.cuda.device_count()) if text == "cuda" else torch.device(text or "cpu")


def placed(make: Callable[[], Workload], device: torch.device, dtype: str = "") -> Workload:
    """A workload, made on a device: all that its maker creates is there, unless it says otherwise itself.

    Args:
        make: Makes a model and its batch.
        device: The processors leave everything as it is made.
        dtype: Of what is made on a GPU; nothing for torch's default.
    """
    if device == CPU:
        return make()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    before = torch.get_default_dtype()
    torch.set_default_dtype(ModelProfile({}, dtype=dtype).format if dtype else before)
    try:
        with device:
            made = make()
    finally:
        torch.set_default_dtype(before)
    settled = all(p.device.type == device.type for p in made.model.parameters())
    return made if settled else Workload(made.model.to(device), made.loss)


def check(workload: Workload) -> torch.device:
    """Where a workload computes.

    Raises:
        ValueError: That is nowhere, or in several places; or its batch does not fit the model.
    """
    places = {p.device: name for name, p in workload.model.named_parameters()}
    for device, name in places.items():
        if device.type not in ("cpu", "cuda") or len(places) > 1:
            raise ValueError(f"{name} is on {device}; only a model that is on processors, or on one GPU, is measured")
    device = next(iter(places), CPU)
    try:
        workload.loss(workload.model)
    except (RuntimeError, ValueError, TypeError, IndexError) as wrong:
        there = "make the batch there, too. " if device.type == "cuda" else ""
        raise ValueError(f"no step on {device}: {wrong}; {there}{BATCHES}") from None
    return device
