"""Python sources of installed packages as one text, for `per_step.py` and `local.py`: every twentieth file tests.

python docs/results/sources.py FOLDER torch transformers numpy
"""

import argparse
import importlib.util
from pathlib import Path


def files(package: str) -> list[Path]:
    """In order of their names."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"there is no package {package!r}; install it, or leave it out, which makes another text")
    return [path for place in found.submodule_search_locations for path in sorted(Path(place).rglob("*.py"))]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path)
    options.add_argument("packages", nargs="+")
    chosen = options.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    paths = [path for package in chosen.packages for path in files(package)]
    for name, tests in (("train", False), ("test", True)):
        parts = [path.read_bytes() for number, path in enumerate(paths, 1) if (number % 20 == 0) == tests]
        size = (chosen.folder / f"{name}.txt").write_bytes(b"\n".join(parts))
        print(f"{name}.txt: {size:,} bytes of {len(parts):,} files")


if __name__ == "__main__":
    main()
