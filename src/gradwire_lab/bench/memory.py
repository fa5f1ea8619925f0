"""Memory: how many floats per parameter a method keeps, and how many more it holds for a moment in a step.

On a GPU the allocator counts. On a CPU the system does: the resident pages of a process of its own for each method,
whose high-water mark is set back before the steps that count. Gradients are there before; whatever the method adds is
counted, its messages included. Local steps are specs such as ``local:sparseloco(H=1)``, whose every step is a round.
"""

import ctypes
import gc
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradwire.engine import method
from gradwire.integrations import compress
from gradwire.integrations.local import local
from gradwire_lab.bench.network import methods
from gradwire_lab.bench.network.methods import parse

LOCAL = "local:"
_LEAN = "; rollback=false"
# Floats per parameter of the memories that must be, and two percent of one for scratch.
DUE: dict[str, float | None] = {
    "dgc(0.001)": 2.02,
    "topk(0.001)": 1.02,
    "ef_signsgd": 1.02,
    "int4; feedback=residual": 1.02,
    "sign; feedback=none": 0.02,
    "int4; feedback=none": 0.02,
    "fp16": None,
}
# What keeps memories is also measured without the second copy that a rollback needs.
SPECS = tuple(spec + lean for spec, due in DUE.items() for lean in ("", _LEAN) if not lean or (due and due > 1))
_LAYERS = 10
_WIDE = 400
_libc = ctypes.CDLL(None)
_STEPS = 4


def check(spec: str) -> None:
    """Refuse what is no spec of ours.

    Raises:
        ValueError: It is none, or one of its options is.
    """
    if spec.startswith(LOCAL):
        methods.check(spec)
        return
    text, options = parse(spec)
    method(text, options.get("feedback"), options.get("exchange"))


def measure(specs: Sequence[str], device: str, size: int) -> Iterator[dict[str, Any]]:
    """A row for each spec, of a model of about ``size`` parameters.

    Raises:
        RuntimeError: A spec could not be measured.
    """
    logged = set[str]()
    for spec in specs:
        if device == "cuda":  # its allocator counts each by itself
            yield weigh(spec, torch.device(device, 0), size)
            continue
        yield _apart(json.dumps({"spec": spec, "device": device, "size": size}), spec, logged)


def _apart(job: str, spec: str, logged: set[str]) -> dict[str, Any]:
    """One spec in a process of its own; what it logs is passed on as it comes, each line once."""
    command = [sys.executable, "-m", "gradwire_lab.bench.memory", job]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stderr is not None
        errors = [""]
        for line in filter(str.strip, child.stderr):
            errors.append(line.strip())
            if line.startswith("gradwire: ") and line not in logged:
                logged.add(line)
                sys.stderr.write(line)
        output = child.stdout.read()
    if child.returncode:
        raise RuntimeError(f"{spec!r} could not be measured: {errors[-1]}")
    row: dict[str, Any] = json.loads(output.splitlines()[-1])
    return row


def weigh(spec: str, device: torch.device, size: int) -> dict[str, Any]:
    """One spec, in this process."""
    width = max(1, math.isqrt(size // _LAYERS))
    for narrow in (8, _WIDE):  # compile and load; large gradients may be read where they lie, by other kernels
        _train(spec, _layers(narrow, device))
    model = _layers(width, device)
    n = sum(p.numel() for p in model.parameters())
    begun = resident(device)
    kept, peak = _train(spec, model)
    return {
        "spec": spec,
        "device": device.type,
        "params": n,
        "kept_floats": (kept - begun) / (4 * n),
        "peak_floats": (peak - begun) / (4 * n),
        "due_floats": DUE.get(spec.removesuffix(_LEAN)),
    }


def _layers(width: int, device: torch.device) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(width, width, bias=False, device=device) for _ in range(_LAYERS)))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model


def _train(spec: str, model: nn.Module) -> tuple[int, int]:
    """Some steps; the bytes that are held after them, and the most in the last ones."""
    device = next(model.parameters()).device
    synchronize = _attached(spec, model)
    for step in range(_STEPS):
        for p in model.parameters():
            assert p.grad is not None
            p.grad.normal_()
            p.data.add_(p.grad, alpha=1e-3)
        if step == 2:
            set_back(device)
        synchronize()
    return resident(device), highest(device)


def _attached(spec: str, model: nn.Module) -> Callable[[], object]:
    """What synchronizes gradients, or weights."""
    if spec.startswith(LOCAL):
        chosen, options = methods.local_method_of(spec)
        return local(model, torch.optim.SGD(model.parameters(), lr=0.0), chosen, **options)
    text, options = parse(spec)
    return compress(model, text, **options)


def resident(device: torch.device) -> int:
    """Bytes that are held now."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    _trim()
    return _status("VmRSS")


def highest(device: torch.device) -> int:
    """The most bytes that were held since `set_back`."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def set_back(device: torch.device) -> None:
    """Count the most from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        _trim()
        Path("/proc/self/clear_refs").write_text("5")


def _trim() -> None:
    """Give back what was freed: malloc keeps it for the next time, and it would count as kept."""
    gc.collect()
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def _status(name: str) -> int:
    """A line of the kernel's account of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(weigh(asked["spec"], torch.device(asked["device"]), asked["size"])))
