"""Lists of specs on a command line: ``fp32; topk(0.01) | sign; sign; feedback=none``."""

import re
import warnings

_OPTION = re.compile(r"\s*\w+\s*=")


def split_specs(text: str, commas: bool = False) -> list[str]:
    """The specs of a list. Semicolons separate them, except before an option, as in ``sign; feedback=none``.

    Args:
        text: The list.
        commas: Whether commas outside of brackets separate too, with a warning: the way of one release.
    """
    parts, depth = [""], 0
    for at, sign in enumerate(text):
        depth += (sign in "({[") - (sign in ")}]")
        separates = sign == ";" and not _OPTION.match(text, at + 1)
        if commas and depth == 0 and sign == ",":
            warnings.warn("separate specs by semicolons, as in --specs 'int8; sign'", FutureWarning, stacklevel=2)
            separates = True
        parts = [*parts, ""] if separates else [*parts[:-1], parts[-1] + sign]
    return [part.strip() for part in parts if part.strip()]
