"""Write requirements.lock: what constraints.txt pins, with the hashes that the package index publishes.

    python deploy/lock.py > requirements.lock
    pip install --no-deps --require-hashes -r requirements.lock

torch is left out. Its builds for the CPU and for each version of CUDA have one version number and different hashes, and
which of them a machine needs is not known here; `make setup` installs it afterwards, pinned by constraints.txt.
"""

import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

INDEX = "https://pypi.org/simple"
ROOT = Path(__file__).parent.parent
LEFT_OUT = ("torch",)
MARKERS = {"triton": " ; sys_platform == 'linux'"}  # as pyproject.toml has it
PYTHONS = r"-(?:cp31[123]-cp31[123]|cp3\d+-abi3|(?:py2\.)?py3-none)-"  # of wheels; a source archive serves all


def pins() -> dict[str, str]:
    """Versions by name, as constraints.txt has them."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def hashes(name: str, version: str) -> list[str]:
    """Of all files of a release that a supported Python can install."""
    page = re.sub(r"[-_.]+", "-", name).lower()
    with urllib.request.urlopen(f"{INDEX}/{page}/", timeout=60) as answer:
        links = re.findall(r"/([^/#\"]+)#sha256=([0-9a-f]{64})", answer.read().decode())
    stem = re.sub(r"[-_.]+", "_", name)
    own = re.compile(rf"{stem}-{re.escape(version)}(?:\.tar\.gz|-(?:\d+-)?[^-]+-[^-]+-[^-]+\.whl)$", re.IGNORECASE)
    named = {re.sub(r"[-_.]+(?=.*-\d)", "_", file): digest for file, digest in links}
    files = {file: digest for file, digest in named.items() if own.match(file)}
    return sorted(digest for file, digest in files.items() if file.endswith(".gz") or re.search(PYTHONS, file))


def main() -> None:
    """Print the lock."""
    chosen = {name: version for name, version in pins().items() if name not in LEFT_OUT}
    with ThreadPoolExecutor(8) as pool:
        found = dict(zip(chosen, pool.map(hashes, chosen, chosen.values()), strict=True))
    if missing := [name for name, digests in found.items() if not digests]:
        sys.exit(f"the index has no file of {', '.join(missing)}; check the versions in constraints.txt")
    print("# Made of constraints.txt by deploy/lock.py; torch is left out, for the reason given there.")
    for name in sorted(chosen, key=str.lower):
        pin = f"{name}=={chosen[name]}{MARKERS.get(name, '')}"
        print(" \\\n    ".join((pin, *(f"--hash=sha256:{digest}" for digest in found[name]))))


if __name__ == "__main__":
    main()
