"""The pages, checked against the code: links, paths and names exist, and what Contributing shows runs."""

import ast
import keyword
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest
import torch
import torch.distributed
import typer

import gradwire
from gradwire.codecs.stage import EncodeInput
from gradwire.core import registry
from gradwire.core.keys import Key
from gradwire.core.segments import Segments
from gradwire_lab.cli.main import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = [
    page
    for page in PAGES
    if page.parent != ROOT / "docs" or page.stem in {"tour", "glossary", "stability", "capabilities"}
]
CONTRIBUTED = ("crowd", "dither", "peaks", "shuffle", "fade", "median")  # what Contributing shows
EXAMPLES = {"src/gradwire/codecs/quantizers/crowd.py", *(f"{name}.py" for name in CONTRIBUTED)}
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def each(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text())


def quoted(page: Path) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", prose(page)))


@cache
def files() -> list[str]:
    folders = ("src", "tests", "docs", "examples", "deploy")
    inside = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [f"/{path.relative_to(ROOT)}" for path in (*inside, *ROOT.glob("*"))]


@cache
def names() -> set[str]:
    """Identifiers, and words of short texts, of the sources; also what Python, torch and the Makefile call things."""
    found = {*keyword.kwlist, *dir(torch.distributed), *re.findall(r"\w+", (ROOT / "Makefile").read_text())}
    found.update(part for file in files() for part in re.split(r"[/.]", file))
    for path in (*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            texts = [value for value in vars(node).values() if isinstance(value, str) and " " not in value]
            found.update(word for text in texts for word in re.findall(r"\w+", text))
    return found


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@each(PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        target, _, part = link.partition("#")
        other = page.parent / target if target else page
        if "://" in link:
            continue
        headings = re.findall(r"^#+ (.*)$", prose(other), re.MULTILINE) if other.suffix == ".md" and part else []
        if not other.exists() or (part and part not in map(anchor, headings)):
            broken.append(link)
    assert not broken


@each(GUIDES)
def test_paths_exist(page: Path) -> None:
    paths = {text for text in quoted(page) if re.fullmatch(r"[\w./-]+\.(py|md|toml|sh|yaml|txt)", text)}
    assert not [path for path in paths - EXAMPLES if not any(file.endswith(f"/{path}") for file in files())]


@each(GUIDES)
def test_names_exist(page: Path) -> None:
    dotted = {text.removesuffix("()") for text in quoted(page) if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*(\(\))?", text)}
    assert not {name for name in dotted if not set(name.split(".")) <= names()}


# -- capabilities ------------------------------------------------------------------------------------------------------

CAPABILITIES = ROOT / "docs" / "capabilities.md"
TRAINING_KINDS = ("transform", "selector", "quantizer", "indices", "feedback", "exchange", "preset")


def commands(group: click.Command, before: str = "gradwire") -> Iterator[str]:
    below = getattr(group, "commands", {})
    for name, command in below.items():
        yield from commands(command, f"{before} {name}")
    if not below:
        yield before


def ours(*kinds: str) -> set[str]:
    """Registered names, without those that other tests have registered in this process."""
    return {name for name, made in gradwire.registered(*kinds).items() if made.__module__.startswith("gradwire.")}


def test_every_capability_is_listed() -> None:
    listed = quoted(CAPABILITIES)
    assert set(gradwire.__all__) <= listed
    assert ours() <= listed
    assert {text for text in listed if text.startswith("gradwire ")} == set(commands(typer.main.get_command(app)))


def test_every_capability_has_a_test() -> None:
    rows = [line for line in CAPABILITIES.read_text().splitlines() if line.startswith("| ") and "---" not in line]
    headings = [row for row in rows if row.endswith("| tests |")]
    assert len(headings) == 3
    assert not [row for row in rows if row not in headings and "`tests/" not in row]


def test_readme_lists_the_names_of_a_spec() -> None:
    words = {word for text in quoted(ROOT / "README.md") for word in re.findall(r"\w+", text)}
    assert ours(*TRAINING_KINDS) <= words


def test_the_optimizers_that_the_page_of_adamw_makes_step() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "adamw.md").read_text(), re.MULTILINE | re.DOTALL)
    (text,) = (block for block in blocks if "torch.optim.Muon" in block)
    model = torch.nn.Module()
    model.blocks, model.head = torch.nn.ModuleList([torch.nn.Linear(8, 8)]), torch.nn.Linear(8, 4)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    run_block(text, model=model, loader=[0], gradwire=gradwire, torch=torch)
    assert all((new != old).any() for new, old in zip(model.parameters(), before, strict=True))


# -- what Contributing adds in one file --------------------------------------------------------------------------------


def shown(word: str) -> str:
    """The block of Contributing that holds this text."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)
    (found,) = (block for block in blocks if word in block)
    return str(found)


def run_block(text: str, **names: object) -> None:
    exec(text, {"__name__": "contributed", **names})


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten afterwards."""
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))


@pytest.fixture
def added(forgotten: None) -> None:
    """The stage and the exchange that Contributing shows are registered, the exchange with its optional method."""
    run_block(shown('@register("crowd"'))
    imports, method = shown("def simulate").split("\n\n", 1)
    run_block("\n".join((imports, shown('@register("median"'), method)))


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(("spec", "median"), [("fp32", [2.0, 2.0, 2.0]), ("topk(0.5)", [2.0, 2.0, 0.0])])
def test_the_exchange_of_contributing_needs_two_methods(spec: str, median: list[float]) -> None:
    run_block(shown('@register("median"'))
    models = [torch.nn.Linear(4, 3) for _ in range(3)]
    workers = gradwire.lockstep(models, spec, exchange="median", feedback="none", bundle=None)
    for examples, model in enumerate(models, 1):
        model(torch.ones(examples, 4)).sum().backward()  # a bias has as many as its gradient
    workers()
    for model in models:
        assert model.bias.grad is not None and model.bias.grad.tolist() == median


@pytest.mark.usefixtures("added")
def test_the_quantizer_of_contributing_is_a_codec() -> None:
    chain = gradwire.codec("crowd")
    x, segments = torch.linspace(-1.0, 1.0, 15), Segments.single(15)
    encoded = chain.encode(EncodeInput(x, x, {}, segments), Key(0, 0, 0))
    assert encoded.payload.nbytes == chain.size(segments) == 4 + 8
    decoded = chain.decode(encoded.payload, segments, Key(0, 0, 0))
    assert decoded[0] == -1.0 and decoded[-1] == 1.0
    assert (decoded - x).abs().max() < 0.3
    assert gradwire.codec("topk(0.01) | crowd").quantizer == chain.quantizer


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize("way", ["batched", "rank by rank"])
@pytest.mark.parametrize("spec", ["fp32", "topk(0.5)"])
def test_the_exchange_of_contributing_gives_the_median(spec: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, median = registry.lookup("median")
    models = [torch.nn.Linear(4, 3, bias=False) for _ in range(3)]
    workers = gradwire.lockstep(models, spec, exchange="median", feedback="none")
    monkeypatch.setattr(median, "run" if way == "batched" else "simulate", None)
    for rank, model in enumerate(models):
        model.weight.grad = torch.arange(12.0).view(3, 4) * (-2.0) ** rank
    workers()
    expected = torch.arange(12.0).view(3, 4)
    expected = expected if spec == "fp32" else expected.where(expected > 5, 0.0)
    for model in models:
        assert torch.equal(model.weight.grad, expected)
