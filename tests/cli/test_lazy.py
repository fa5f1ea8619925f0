"""Help and completion come quickly: they read signatures, and import no module of a command."""

import inspect
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import get_type_hints

import pytest

from gradwire_lab.cli import lazy
from gradwire_lab.cli.main import BenchGroup, HostsGroup, NewGroup, RootGroup

GROUPS = {(): RootGroup, ("bench",): BenchGroup, ("new",): NewGroup, ("hosts",): HostsGroup}
PLACES = {(*words, name): place for words, group in GROUPS.items() for name, place in group.table.items()}
HEAVY = ("torch", "numpy", "scipy", "networkx", "gradwire")
# What a command has imported is told at its end, on standard error.
COMMAND = f"""
import atexit, sys
from gradwire_lab.command import run
atexit.register(lambda: print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr))
sys.argv[0] = "gradwire"
run()
"""
SECONDS = 0.3
SECONDS_OF_A_COMMAND = 0.5


def gradwire(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", COMMAND, *words]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)


def shell_completion(*words: str) -> str:
    typed = {"COMP_WORDS": " ".join(("gradwire", *words)), "COMP_CWORD": str(len(words))}
    done = gradwire(_GRADWIRE_COMPLETE="complete_bash", **typed)
    assert done.stderr.endswith("[]\n"), done.stderr
    return done.stdout


@pytest.mark.parametrize("words", PLACES, ids=" ".join)
def test_the_outline_has_the_signature_of_the_function(words: tuple[str, ...]) -> None:
    module, _, name = PLACES[words].partition(":")
    function = getattr(import_module(f"gradwire_lab.cli.{module}"), name)
    outline = lazy._outline(PLACES[words])
    mine, real = (
        {name: one.default for name, one in inspect.signature(each).parameters.items()} for each in (outline, function)
    )
    assert mine == real and outline.__doc__ == function.__doc__
    assert get_type_hints(outline) == get_type_hints(function)


@pytest.mark.parametrize(
    "words", [("--version",), ("-h",), ("bench", "-h"), *((*w, "-h") for w in PLACES)], ids=" ".join
)
def test_help_comes_quickly_and_without_torch(words: Sequence[str]) -> None:
    limit = SECONDS if len(words) == 1 else SECONDS_OF_A_COMMAND
    seconds = []
    for _ in range(3):  # other processes slow the first ones down, also by the processor's own clock
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = gradwire(*words)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0 and done.stdout and done.stderr == "[]\n", done.stderr
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if seconds[-1] < limit:
            return
    pytest.fail(f"processors worked for {min(seconds):.2f} s")


def test_a_mistake_comes_without_torch() -> None:
    done = gradwire("train", "--folderr", "x")
    assert done.returncode == 2 and "--folder" in done.stderr and done.stderr.endswith("[]\n")


def test_a_shell_completes_commands_and_options() -> None:
    assert shell_completion("tr").split() == ["train"]
    assert shell_completion("bench", "ker").split() == ["kernels"]
    assert "--seeds" in shell_completion("compare", "--se").split()


def test_the_shell_script_is_shown() -> None:
    done = gradwire("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.returncode == 0 and "_GRADWIRE_COMPLETE=complete_bash" in done.stdout


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("typer", ["--help"]),
        ("pydantic", ["plan", "digits"]),
        ("sklearn", ["plan", "digits"]),
    ],
)
def test_a_package_of_the_extra_that_is_missing_is_named(package: str, words: Sequence[str]) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from gradwire_lab.command import run; run()"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"needs {package}, which is not installed; pip install 'gradwire[lab]'" in done.stderr
