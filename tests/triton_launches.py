"""Launches of Triton kernels: written down under its interpreter, and compiled for a GPU that need not be there.

The interpreter takes what the compiler refuses: variables that change their type in a loop, a value of one branch only,
constants that are none. `python triton_launches.py FILE` compiles each kernel for its first launches in the file, and
prints how many kernels these are; it fails where one does not compile, or was not launched.
"""

import importlib
import inspect
import pickle
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import gradwire.kernels.cuda as kernels

HOPPER = 90
VARIANTS = 2  # of a kernel, by its constants and options, that are compiled

Argument = tuple[str, Any]  # its kind, and what decides how it is compiled


def record(interpreter: Any, file: Path) -> None:
    """Have the interpreter add each launch, once, to a file."""
    run, seen = interpreter.GridExecutor.__call__, set()

    def run_and_record(self: Any, *given: Any, **options: Any) -> None:
        rest = {name: options.pop(name) for name in list(options) if name in self.arg_names}
        named = {**dict(zip(self.arg_names, given, strict=False)), **rest}
        arguments = tuple((name, *_noted(x, name in self.constexprs)) for name, x in named.items())
        launch = self.fn.__globals__["__name__"], self.fn.__name__, arguments, tuple(options.items())
        if launch not in seen:
            seen.add(launch)
            with file.open("ab") as end:
                pickle.dump(launch, end)
        run(self, *given, **rest)

    interpreter.GridExecutor.__call__ = run_and_record


def _noted(x: Any, constant: bool) -> Argument:
    if isinstance(x, torch.Tensor):
        return "tensor", (x.dtype, x.data_ptr() % 16 == 0)
    return "constant" if constant or isinstance(x, bool) else "number", getattr(x, "value", x)


def _made(kind: str, about: Any) -> Any:
    """An argument that is compiled for as the recorded one."""
    if kind != "tensor":
        return about
    dtype, aligned = about
    return torch.empty(64, dtype=dtype)[0 if aligned else 1 :]


class Hopper:
    """Stands in for Triton's driver: what is compiled is never launched."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", HOPPER, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def compile_launches(file: Path) -> Iterator[tuple[str, str]]:
    """Compile what was recorded. Yields each kernel's module and name."""
    known: dict[tuple[str, str], set[Any]] = {}
    with file.open("rb") as recorded:
        while recorded.peek(1):
            module, name, arguments, options = pickle.load(recorded)
            constants = [(key, about) for key, kind, about in arguments if kind == "constant"], options
            done = known.setdefault((module, name), set())
            if len(done) == VARIANTS or repr(constants) in done:
                continue
            done.add(repr(constants))
            given = {key: _made(kind, about) for key, kind, about in arguments}
            compiled = getattr(importlib.import_module(module), name).warmup(grid=(1,), **given, **dict(options))
            assert "cubin" in compiled.asm
            yield module, name


def launched_kernels() -> set[tuple[str, str]]:
    """By the source: what is launched, by its module and name."""
    from triton.runtime.jit import JITFunction

    found = set()
    for place in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        module = importlib.import_module(place.name)
        for name in re.findall(r"\blaunch(?:_tiles)?\((\w+),|\b(\w+)\[\(", inspect.getsource(module)):
            kernel = getattr(module, "".join(name), None)
            if isinstance(kernel, JITFunction):
                found.add((kernel.fn.__module__, kernel.fn.__name__))
    return found


if __name__ == "__main__":
    from triton.runtime.driver import driver

    driver.set_active(Hopper())
    compiled = set(compile_launches(Path(sys.argv[1])))
    missing = launched_kernels() - compiled
    assert not missing, f"not launched by the tests that were interpreted: {sorted(missing)}"
    print(f"{len(compiled)} kernels")
