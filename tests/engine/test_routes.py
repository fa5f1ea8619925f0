"""Every route that a step can take: four executors by two kinds of encoder, each reached by a small configuration.

eager                      each bucket runs as it is written; the status is read at once
graphs, status at once     captured buckets are replayed; the status is read before the commit
graphs, status later       captured buckets are replayed; the status stays on the device, which undoes a bad step
batched                    all ranks of a process are segments of one call

composed                   feedback, codec and feedback again
fused                      one kernel adds the error, encodes and keeps the new error
"""

import ast
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fixtures
import gradwire
from fake_cuda_graph import FakeCudaGraphs, largest, zero_nonfinite
from gradwire.comm.backend import SingleBackend
from gradwire.engine import encoders
from gradwire.engine.batched import Batched
from gradwire.engine.cuda_graphs import EAGER_STEPS, StepExecutor
from gradwire.engine.encoders import ComposedEncoder, Encoder, FusedDenseEncoder, FusedSumEncoder, FusedTopKEncoder
from gradwire.engine.hosts import HostEngine
from gradwire.engine.step import Engine
from gradwire.integrations import wire as wires
from gradwire.integrations.setup import Options, Setup
from gradwire.integrations.wire import Wire
from gradwire.kernels import dispatch, fused

EXECUTORS = ("eager", "graphs, status at once", "graphs, status later", "batched")
KINDS: dict[type[Encoder], str] = {
    ComposedEncoder: "composed",
    FusedTopKEncoder: "fused",
    FusedDenseEncoder: "fused",
    FusedSumEncoder: "fused",
}
ENCODERS = ("composed", "fused")
SPECS = {"composed": ("fp16", "sign"), "fused": ("topk(0.1) | int32", "int4")}  # under error feedback
ROUTES = list(product(EXECUTORS, ENCODERS))
SOURCE = Path(inspect.getfile(gradwire)).parent
STEPS = EAGER_STEPS + 4  # both generations of the state are captured, and replayed


class Trace:
    """What a step has called.

    Attributes:
        encoders: Kinds of encoders of all steps so far. A replay calls none.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.encoders: set[str] = set()
        self._called: set[str] = set()
        for owner, name, word in (
            (Engine, "run", "eager"),
            (Engine, "run_bucket", "eager"),
            (HostEngine, "run", "eager"),
            (HostEngine, "run_bucket", "eager"),
            (StepExecutor, "_capture", "graph"),
            (StepExecutor, "_replay", "graph"),
            (StepExecutor, "_commit", "commit on the device"),
            (Batched, "run", "batched"),
        ):
            patch.setattr(owner, name, self._noting(self._called.add, lambda _, word=word: word, getattr(owner, name)))
        for kind in KINDS:
            noted = self._noting(self.encoders.add, lambda encoder: KINDS[type(encoder)], kind.encode)
            patch.setattr(kind, "encode", noted)

    def _noting(
        self, add: Callable[[str], None], word: Callable[[Any], str], function: Callable[..., Any]
    ) -> Callable[..., Any]:
        def noted(first: Any, *args: Any, **named: Any) -> Any:
            add(word(first))
            return function(first, *args, **named)

        return noted

    def clear(self) -> None:
        self._called.clear()
        self.encoders.clear()

    def executor(self) -> str:
        """Of the step since the last call."""
        called = frozenset(self._called)
        self._called.clear()
        return {
            frozenset({"eager"}): "eager",
            frozenset({"graph"}): "graphs, status at once",
            frozenset({"graph", "commit on the device"}): "graphs, status later",
            frozenset({"batched"}): "batched",
        }[called]


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Trace:
    return Trace(monkeypatch)


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs on the CPU: fused encoders by their definitions, and nothing reads data."""

    monkeypatch.setattr(dispatch, "faster", lambda device: {})
    monkeypatch.setattr(fused, "top", largest)
    monkeypatch.setattr(encoders, "zero_nonfinite", zero_nonfinite)
    monkeypatch.setattr(wires, "graphs_on", lambda device: FakeCudaGraphs())


class WaitingBackend(SingleBackend):
    """A world of one whose host waits in collectives, as with gloo."""

    stream_ordered = False


def options_of(spec: str) -> dict[str, Any]:
    return {"feedback": "ef21" if spec == "sign" else "residual", "bundle": None}


def wire_of(net: nn.Module, backend: SingleBackend, spec: str) -> Wire:
    return Wire(Setup(dict(net.named_parameters()), backend, Options(**options_of(spec))), spec)


def loop_steps(backend: SingleBackend, spec: str) -> Iterator[None]:
    """A plain loop in a world of one, whose gradients stay where they are: it yields once attached, and after steps."""
    net = fixtures.model()
    sync = wire_of(net, backend, spec)
    yield
    for step in range(STEPS):
        net.zero_grad(set_to_none=False)
        fixtures.loss(net, 0, step).backward()
        sync()
        yield


def simulated_steps(spec: str) -> Iterator[None]:
    nets, workers = fixtures.replicas(2, spec=spec, **options_of(spec))
    yield
    for step in range(STEPS):
        for rank, net in enumerate(nets):
            net.zero_grad()
            fixtures.loss(net, rank, step).backward()
        workers()
        yield


@pytest.mark.parametrize("spec", [0, 1], ids=["first spec", "second spec"])
@pytest.mark.parametrize(("executor", "encoder"), ROUTES, ids=lambda word: word)
def test_every_route_is_taken(executor: str, encoder: str, spec: int, request: pytest.FixtureRequest) -> None:
    if executor.startswith("graphs"):
        request.getfixturevalue("as_on_a_device")
    trace: Trace = request.getfixturevalue("trace")
    chosen = SPECS[encoder][spec]
    if executor == "batched" and chosen == "sign":
        chosen = "threshold(0.9)"  # ef21 has its own mean, which batched steps do not keep
    backend = SingleBackend() if executor == "graphs, status later" else WaitingBackend()
    steps = simulated_steps(chosen) if executor == "batched" else loop_steps(backend, chosen)
    next(steps)
    trace.clear()  # attaching warms kernels up
    taken = [trace.executor() for _ in steps]
    assert taken[-1] == executor
    assert set(taken) <= {executor, "eager"}
    assert trace.encoders == {encoder}


def test_there_are_eight_routes() -> None:
    assert len(ROUTES) == 8


def concrete(kind: type) -> set[type]:
    """All subclasses of a class that can be instantiated."""
    below = {found for child in kind.__subclasses__() for found in concrete(child)}
    return below | (set() if inspect.isabstract(kind) else {kind})


def test_there_are_no_other_encoders() -> None:
    assert concrete(Encoder) == set(KINDS)
    assert set(KINDS.values()) == set(ENCODERS)


@cache
def nodes() -> dict[str, list[ast.AST]]:
    """All imports and calls in the source files of the library and its lab."""
    roots = (SOURCE, SOURCE.parent / "gradwire_lab")
    files = [(root.parent, file) for root in roots for file in root.rglob("*.py")]
    return {
        str(file.relative_to(base)): [
            node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom | ast.Call)
        ]
        for base, file in files
    }


def modules_that(matches: Callable[[ast.AST], bool]) -> set[str]:
    """Source files with a matching import or call."""
    return {name for name, inside in nodes().items() if any(map(matches, inside))}


def imports(*modules: str) -> Callable[[ast.AST], bool]:
    return lambda node: isinstance(node, ast.ImportFrom) and node.module in modules


def calls(*names: str) -> Callable[[ast.AST], bool]:
    """Calls of a function or method with one of these names."""

    def matches(node: ast.AST) -> bool:
        if not isinstance(node, ast.Call):
            return False
        called = node.func
        return getattr(called, "attr", getattr(called, "id", None)) in names

    return matches


def test_there_are_no_other_executors() -> None:
    # Only lanes and batched steps encode; only the engine steps lanes together.
    assert modules_that(imports("gradwire.engine.encoders")) == {
        "gradwire/engine/lane.py",
        "gradwire/engine/batched.py",
    }
    assert modules_that(calls("interleave")) == {
        "gradwire/engine/step.py",
        "gradwire/engine/lockstep.py",  # collectives of the ranks of a group, not lanes
        "gradwire/integrations/local/elastic_message.py",  # eager buckets of an elastic round, which are one message
        "gradwire_lab/perf_model/comm_schedule.py",  # on tensors without content
        *(f"gradwire/integrations/gossip/{name}.py" for name in ("batched", "elastic", "gossip_sync")),  # no gradients
    }
    # Whatever drives an engine's rounds outside of `StepExecutor` is lockstep, which is eager: simulated ranks whose
    # steps cannot be batched, the warm-up, and a measurement of the cost of a step.
    assert modules_that(calls("StepExecutor")) == {"gradwire/integrations/wire.py"}
    assert modules_that(calls("Batched")) == {"gradwire/integrations/simulated.py"}
    assert modules_that(imports("gradwire.engine.capture")) == {
        "gradwire/engine/cuda_graphs.py",
        "gradwire/engine/graph_buffers.py",
        "gradwire/integrations/wire.py",
    }


@pytest.mark.parametrize("spec", ["fp16", "topk(0.1) | int32"])
@pytest.mark.usefixtures("as_on_a_device")
def test_all_routes_of_a_world_of_one_lead_to_the_same(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(backend: SingleBackend, graphs: bool) -> list[Tensor]:
        with monkeypatch.context() as patch:
            if not graphs:
                patch.setattr(wires, "graphs_on", lambda device: None)
            net = fixtures.model()
            sync, optimizer = wire_of(net, backend, spec), fixtures.sgd(net)
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=False)
            fixtures.loss(net, 0, step).backward()
            sync()
            optimizer.step()
        return [*(p.detach() for p in net.parameters()), *fixtures.memories(sync).values()]

    eager = trained(SingleBackend(), graphs=False)
    for backend in (SingleBackend(), WaitingBackend()):
        assert all(map(torch.equal, trained(backend, graphs=True), eager))


def test_every_entry_point_has_the_same_executor() -> None:
    net, other = fixtures.model(), fixtures.model()
    loop = gradwire.compress(net, "topk(0.1)")
    optimizer = fixtures.wrap_optimizer(other, spec="topk(0.1)")
    _, workers = fixtures.replicas(2, "topk(0.1)", across=[[0], [1]])
    for sync in (loop, optimizer.wire, *workers.wires):
        assert type(sync.executor) is StepExecutor
        assert isinstance(sync.executor.engine, Engine)
