"""Under Triton's interpreter: the functions of its language are listed once, and not at every call of a kernel.

At every call it replaces all of them, and to find them it looks at all that its modules hold. That takes as long as all
else. What it replaces, and when, stays the same. Where ``GRADWIRE_LAUNCHES`` names a file, launches are recorded there.
"""

import importlib.util
import inspect
import os
from functools import cache
from pathlib import Path
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
    from triton.language import core
    from triton.runtime import interpreter

    from triton_launches import record

    @cache
    def functions_of(package: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(package) if core.is_builtin(member)]

    def replace_functions(package: Any, *rest: Any) -> None:
        for name, member in functions_of(package):
            if getattr(package, name) == member:  # in a call within a call they have been replaced
                interpreter._patch_attr(package, name, member, *rest)

    if hasattr(interpreter, "_patch_builtin") and hasattr(interpreter, "_patch_attr"):
        interpreter._patch_builtin = replace_functions

    if file := os.environ.get("GRADWIRE_LAUNCHES"):
        record(interpreter, Path(file))
