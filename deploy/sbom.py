"""Print an SBOM of the installed packages, in CycloneDX 1.5: names, versions, licenses and what depends on what.

python deploy/sbom.py > sbom.json
python deploy/sbom.py --all > sbom.json     with whatever else is installed beside gradwire
"""

import json
import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from typing import Any

Packages = dict[str, Distribution]


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(root: str, extras: frozenset[str] = frozenset()) -> Packages:
    """A package and what it needs, as far as that is installed. Extras of gradwire are taken in."""
    found: Packages = {}
    waiting = [root]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue
        waiting += requirements(found[name], own=name == root)
    return found


def requirements(package: Distribution, own: bool) -> list[str]:
    """Names of what a package requires; its extras only if it is our own."""
    lines = package.requires or []
    return [normalized(re.split(r"[^\w.-]", line)[0]) for line in lines if own or "extra ==" not in line]


def component(package: Distribution) -> dict[str, Any]:
    meta = package.metadata
    name, version = normalized(meta["Name"]), package.version
    entry: dict[str, Any] = {"type": "library", "bom-ref": purl(package), "name": name, "version": version}
    entry["purl"] = purl(package)
    if text := meta.get("License-Expression"):
        entry["licenses"] = [{"expression": text}]
    elif text := _named_license(package):
        entry["licenses"] = [{"license": {"name": text}}]
    return entry


def _named_license(package: Distribution) -> str:
    """Of classifiers, or the first line of the field; some packages have the whole text there."""
    marks = [line for line in package.metadata.get_all("Classifier") or [] if line.startswith("License ::")]
    named = [line.rpartition(" :: ")[2] for line in marks]
    return named[0] if named else str(package.metadata.get("License") or "").strip().partition("\n")[0][:80]


def purl(package: Distribution) -> str:
    return f"pkg:pypi/{normalized(package.metadata['Name'])}@{package.version.replace('+', '%2B')}"


def sbom(packages: Packages, root: str) -> dict[str, Any]:
    """The document. It holds no time and no path, so the same packages make the same bytes."""
    rows = {name: packages[name] for name in sorted(packages)}
    edges = [
        {
            "ref": purl(package),
            "dependsOn": sorted(
                {purl(rows[other]) for other in requirements(package, name == root) if other in rows and other != name}
            ),
        }
        for name, package in rows.items()
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {**component(rows[root]), "type": "library"}},
        "components": [component(package) for name, package in rows.items() if name != root],
        "dependencies": edges,
    }


def main() -> None:
    """Print it."""
    packages = needed("gradwire")
    if "gradwire" not in packages:
        sys.exit("gradwire is not installed here; run make setup first")
    if "--all" in sys.argv[1:]:
        packages |= {normalized(one.metadata["Name"]): one for one in distributions()}
    print(json.dumps(sbom(packages, "gradwire"), indent=1))


if __name__ == "__main__":
    main()
