"""The architecture, guarded: imports point one way, methods carry their cards, importing stays light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradwire

SOURCE = Path(gradwire.__file__).parent
# Which rooms each room may import from, besides itself.
BELOW_SYNC = {"core", "kernels", "codecs", "feedback", "topology", "exchanges", "gossip", "links"}
BELOW_TOOLS = BELOW_SYNC | {"sync", "forecast", "adapters"}
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "kernels": {"core"},
    "codecs": {"kernels", "core"},
    "feedback": {"codecs", "kernels", "core"},
    "topology": {"kernels", "core"},  # random graphs draw their edges from Philox
    "exchanges": {"codecs", "topology", "kernels", "core"},
    "gossip": {"codecs", "feedback", "topology", "kernels", "core"},
    "links": {"core"},
    "sync": BELOW_SYNC,
    "forecast": BELOW_SYNC | {"sync"},
    "adapters": BELOW_SYNC | {"sync", "forecast"},  # `auto` decides by the same costs as `advise`
    "train": BELOW_TOOLS | {"report"},  # `compare` reads its run folders back
    "bench": BELOW_TOOLS | {"train", "network"},  # it measures training steps, on hosts
    "network": BELOW_TOOLS,
    "report": set(),
    "cli": BELOW_TOOLS | {"train", "bench", "network", "report"},
}
MAY_IMPORT_DISTRIBUTED = (
    "links/*.py",
    "network/*.py",
    "bench/network/*.py",
    "bench/step.py",
    "adapters/ddp.py",
    "adapters/compress.py",
    "adapters/optimizer.py",
    "train/launch.py",
)
CARD = ("Paper:", "Formula:", "Wire:", "Traits:", "Differs:", "Spec:")


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0]


def imported(path: Path) -> Iterator[str]:
    """Every module that a file names in an import, deferred or not."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; write the whole name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_room_is_in_the_table() -> None:
    rooms = {room(path) for path in modules() if path.parent != SOURCE}
    assert rooms <= MAY_IMPORT.keys()


def test_imports_point_one_way() -> None:
    shared = {"version"}  # a fact, not a room
    wrong = []
    for path in modules():
        if path.parent == SOURCE:  # the front door
            continue
        for name in imported(path):
            package, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if package == "gradwire" and other not in shared | MAY_IMPORT[room(path)] | {room(path)}:
                wrong.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert not wrong


def test_only_few_files_know_torch_distributed() -> None:
    wrong = []
    for path in modules():
        inside = path.relative_to(SOURCE)
        if any(name.startswith("torch.distributed") for name in imported(path)):
            wrong += [] if any(inside.match(pattern) for pattern in MAY_IMPORT_DISTRIBUTED) else [str(inside)]
    assert not wrong


def test_every_registered_class_carries_its_card() -> None:
    for name, made in gradwire.listing().items():
        if not isinstance(made, type):
            continue  # presets are functions, and their docstrings say what they stand for
        card = sys.modules[made.__module__].__doc__ or ""
        missing = [label for label in CARD if not any(line.startswith(label) for line in card.splitlines())]
        assert not missing, f"the card of {name} lacks {missing}"
        assert getattr(made, "examples", ()), f"{name} has no examples"
        assert card.isascii()


def test_what_is_exported_is_what_is_promised() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    bound = [
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert sorted(gradwire.__all__) == sorted(bound)
    assert all(hasattr(gradwire, name) for name in gradwire.__all__)


def test_every_module_has_a_name_that_says_something() -> None:
    nameless = {"utils", "helpers", "common", "base", "misc"}
    assert not [path for path in modules() if {path.stem, *path.relative_to(SOURCE).parts} & nameless]


@pytest.mark.parametrize("heavy", [("sklearn", "typer", "numba", "triton")])
def test_importing_is_light(heavy: tuple[str, ...]) -> None:
    code = f"import sys, gradwire; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
