"""The architecture, guarded: imports point one way, methods carry their cards, importing stays light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import gradwire
from gradwire.core.registry import card as card_of
from gradwire_lab import command
from spawn import run_ranks

SOURCE = Path(gradwire.__file__).parent
LAB = SOURCE.parent / "gradwire_lab"
# Which rooms each room may import from, besides itself. The library never imports the lab.
BELOW_ENGINE = {"core", "kernels", "codecs", "feedback", "topology", "exchanges", "gossip", "comm"}
LIBRARY = BELOW_ENGINE | {"engine", "local", "integrations"}
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "kernels": {"core"},
    "codecs": {"kernels", "core"},
    "feedback": {"codecs", "kernels", "core"},
    "topology": {"kernels", "core"},  # random graphs draw their edges from Philox
    "exchanges": {"codecs", "topology", "kernels", "core"},
    "gossip": {"codecs", "feedback", "topology", "kernels", "core"},
    "comm": {"core"},
    "engine": BELOW_ENGINE,
    "local": BELOW_ENGINE | {"engine"},
    "optim": {"kernels", "core"},
    "integrations": BELOW_ENGINE | {"engine", "local", "optim"},
    "adapters": {"integrations"},  # old names, for one release
    "perf_model": BELOW_ENGINE | {"engine", "local"},  # it weighs rounds of local steps as well
    "autotune": LIBRARY | {"perf_model"},  # `auto` decides by the same costs as `advise`
    "train": LIBRARY | {"optim", "report", "perf_model", "autotune"},  # `compare` reads its run folders back
    "bench": LIBRARY | {"optim", "train", "network", "perf_model", "autotune"},  # it measures training steps, on hosts
    "network": LIBRARY,
    "report": set(),
    "cli": LIBRARY | {"train", "bench", "network", "report", "perf_model", "autotune"},
}
# What library code may import from elsewhere; all but the first line lazily.
PACKAGES = {
    *("torch", "numpy", "numba", "llvmlite", "safetensors", "networkx", "triton"),
    *("accelerate", "lightning", "pytorch_lightning", "transformers"),
}
MAY_IMPORT_DISTRIBUTED = (
    "comm/*.py",
    "network/*.py",
    "bench/network/*.py",
    "bench/step.py",
    "integrations/ddp.py",
    "integrations/compress.py",
    "integrations/optimizer.py",
    "integrations/dcp.py",
    "integrations/sharded/*.py",
    "launch.py",
)
PROJECT = ("gradwire", "gradwire_lab")
CARD = ("Paper:", "Formula:", "Wire:", "Traits:", "Differs:", "Spec:")


def modules() -> list[Path]:
    return sorted((*SOURCE.rglob("*.py"), *LAB.rglob("*.py")))


def inside(path: Path) -> Path:
    return path.relative_to(SOURCE if path.is_relative_to(SOURCE) else LAB)


def room(path: Path) -> str:
    return inside(path).parts[0]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


def imported(path: Path) -> Iterator[str]:
    """Every module that a file names in an import, deferred or not."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; write the whole name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_room_is_in_the_table() -> None:
    rooms = {room(path) for path in modules() if path.parent not in (SOURCE, LAB)}
    assert rooms <= MAY_IMPORT.keys()


def test_imports_point_one_way() -> None:
    shared = {"version", "launch", "launcher_env", "parent_watch", "signals"}  # a fact, and what launchers share
    wrong = []
    for path in modules():
        if path.parent in (SOURCE, LAB):  # the front doors
            continue
        for name in imported(path):
            package, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if package in PROJECT and other not in shared | MAY_IMPORT[room(path)] | {room(path)}:
                wrong.append(f"{inside(path)} imports {name}")
    assert not wrong


def test_the_library_needs_neither_the_lab_nor_its_packages() -> None:
    wrong = [
        f"{inside(path)} imports {name}"
        for path in sorted(SOURCE.rglob("*.py"))
        for name in imported(path)
        if name.partition(".")[0] not in sys.stdlib_module_names | PACKAGES | {"gradwire"}
    ]
    assert not wrong


def command_without_typer(rank: int, world: int) -> str:
    for name in [name for name in sys.modules if name.startswith("gradwire_lab.cli")]:
        del sys.modules[name]
    sys.modules["typer"] = None  # type: ignore[assignment]
    with pytest.raises(SystemExit) as ended:
        command.run()
    return str(ended.value)  # which Python prints, and ends with 1


def test_the_command_names_the_missing_extra() -> None:
    (text,) = run_ranks(command_without_typer, 1)
    assert "typer" in text and "gradwire[lab]" in text


def test_only_few_files_know_torch_distributed() -> None:
    wrong = []
    for path in modules():
        here = inside(path)
        if any(name.startswith("torch.distributed") for name in imported(path)):
            wrong += [] if any(here.match(pattern) for pattern in MAY_IMPORT_DISTRIBUTED) else [str(here)]
    assert not wrong


def test_every_registered_class_carries_its_card() -> None:
    for name, made in gradwire.registered().items():
        if not isinstance(made, type):
            continue  # presets are functions, and their docstrings say what they stand for
        card = card_of(made)
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
    assert not [path for path in modules() if {path.stem, *inside(path).parts} & nameless]


@pytest.mark.parametrize("heavy", [("sklearn", "typer", "pandas", "numba", "triton", "networkx")])
def test_importing_is_light(heavy: tuple[str, ...]) -> None:
    code = f"import sys, gradwire; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- limits ------------------------------------------------------------------------------------------------------------


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in modules():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef):
                yield path, node


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}


def test_files_fit_300_lines() -> None:
    long = {str(inside(path)) for path in modules() if path.read_text().count("\n") > 300}
    assert not long


def test_classes_have_20_methods_at_most() -> None:
    assert not {node.name for _, node in classes() if len(methods(node)) > 20}


def test_no_two_public_classes_share_a_name() -> None:
    names = [node.name for path, node in classes() if not node.name.startswith("_")]
    assert not {name for name in names if names.count(name) > 1}


def test_no_concrete_method_is_overridden() -> None:
    known = {node.name: node for _, node in classes()}

    def bases(node: ast.ClassDef) -> Iterator[ast.ClassDef]:
        for base in node.bases:
            name = ast.unparse(base).partition("[")[0]
            if name in known:
                yield known[name]
                yield from bases(known[name])

    def is_abstract(method: ast.FunctionDef) -> bool:
        return any("abstractmethod" in ast.unparse(decorator) for decorator in method.decorator_list)

    wrong = [
        f"{node.name}.{name} overrides {base.name}'s"
        for _, node in classes()
        for base in bases(node)
        for name in methods(node)
        if not name.startswith("__") and name in methods(base) and not is_abstract(methods(base)[name])
    ]
    assert not wrong


def test_few_places_end_generators_or_read_addresses() -> None:
    handlers = [
        str(inside(path))
        for path in modules()
        for node in nodes(path)
        if isinstance(node, ast.ExceptHandler) and node.type is not None and "StopIteration" in ast.unparse(node.type)
    ]
    assert handlers == ["core/requests.py"]
    readers = {str(inside(path)) for path in modules() if "data_ptr(" in path.read_text() and room(path) != "kernels"}
    assert readers == {"core/layout.py"}
