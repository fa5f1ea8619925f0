"""Gossip handles: what all of them have in common, and what those of one rank have in common."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from gradwire.core.renamed import renamed_attributes
from gradwire.engine.checkpoint import facts_of, saved_spec
from gradwire.engine.drive import Clock
from gradwire.gossip import LocalGossip, Node
from gradwire.gossip.message import diverged
from gradwire.integrations.comm_worker import CommWorker
from gradwire.integrations.gossip.flat_params import FlatParams
from gradwire.integrations.gossip.report import GossipReport

T = TypeVar("T")

_RENAMED = {  # the old names of one release
    "land": "wait",
    "everybody": "gather_models",
    "reach": "gather_reachable",
    "taken": "resyncs",
    "made": "rounds_made",
    "told": "messages_sent",
    "peers": "mesh",
}


class GossipHandle(ABC):
    """The ranks of this process, whose parameters are rows [ranks here, N] in the order of ``named_parameters()``.

    One rank of a process group, or of an elastic group, has one row; a simulated group has all of them.

    Attributes:
        flat: The model's parameters.
        nodes: The gossip state of each node that has ranks here.
        hosts: The ranks of each node of the graph.
        description: The method as text.
        clock: Where the time of rounds went.
        elastic: Whether ranks may come and go. Then a round reads and writes the model itself, buffers included.
        resyncs: How often the rank of this process has taken over a neighbor's parameters, buffers and step.
    """

    elastic: ClassVar[bool] = False
    resyncs = 0
    _where = ""  # which rank this is, for print

    def __init__(
        self, flat: FlatParams, nodes: Sequence[Node], hosts: tuple[tuple[int, ...], ...], description: str
    ) -> None:
        self.flat, self.nodes, self.hosts, self.description = flat, nodes, hosts, description
        self.clock = Clock()

    def __repr__(self) -> str:
        """In one line, as print shows it; it waits for nothing."""
        node = self.nodes[0]
        return f"<{type(self).__name__}: {self.description}; {node.topology}; {self._where}step {node.step}>"

    def save_node(self, node: Node, flat: FlatParams) -> dict[str, Tensor]:
        """The state of a node and its model: copies, residuals and step, as plain tensors by parameter name.

        Raises:
            Diverged: Its parameters are no longer finite.
        """
        node.check()
        numbers = {name: getattr(node, name) for name in ("number", "rank", "seed", "step")}
        numbers["world"] = node.topology.size
        return {**facts_of(self.description, self.flat.fingerprint(), numbers), **node.save(), **flat.save()}

    def check_state(self, state: Mapping[str, Tensor], node: Node) -> None:
        """Refuse a state of another run.

        Raises:
            ValueError: It is one.
        """
        saved = saved_spec(state, ("format", "number", "rank", "seed", "step", "world"))
        if saved != self.description:
            raise ValueError(
                f"the state was saved under [{saved}], but this run has [{self.description}]; attach with the saved "
                "spec"
            )
        rank, size, world = int(state["gradwire/rank"]), int(state["gradwire/world"]), node.topology.size
        if (rank, size) != (node.rank, world):
            raise ValueError(
                f"the state is of rank {rank} of {size}, and this is rank {node.rank} of {world}; copies of neighbors "
                "belong to one place in one graph, so load each rank's own"
            )
        if not torch.equal(state["gradwire/model"], self.flat.fingerprint()):
            raise ValueError("the state was saved for another model: its parameters differ in name, number or shape")

    @staticmethod
    def load_node(node: Node, flat: FlatParams, state: Mapping[str, Tensor]) -> None:
        """Continue from a state. A node that serves no parameter has no memories."""
        if len(node.tensors):
            node.load(state)
        flat.load(state)
        node.step, node.number, node.seed = (int(state[f"gradwire/{name}"]) for name in ("step", "number", "seed"))

    @property
    @abstractmethod
    def step(self) -> int:
        """Steps that the group has taken, as far as this process knows."""

    @abstractmethod
    def average_rows(self, grads: Tensor) -> Tensor:
        """Gradients, averaged inside each node."""

    @abstractmethod
    def mix_rows(self, rows: Tensor) -> Tensor:
        """Parameters after one round of gossip."""

    @abstractmethod
    def reduce_over_processes(self, numbers: Tensor, op: str) -> tuple[Tensor, int]:
        """The ``sum`` or ``max`` over all processes that can be reached, uncounted, and how many ranks they have.

        All of them must call it.
        """

    def sum_over_processes(self, numbers: Tensor) -> tuple[Tensor, int]:
        """The sum over all processes that can be reached, uncounted, and how many ranks they have."""
        return self.reduce_over_processes(numbers, "sum")

    def max_over_processes(self, number: float) -> float:
        """The maximum over all processes that can be reached, uncounted."""
        own = torch.tensor([number], dtype=torch.float64, device=self.flat.device)
        return float(self.reduce_over_processes(own, "max")[0])

    @abstractmethod
    def check(self) -> None:
        """Raise `Diverged` if parameters are no longer finite; this may wait for the device."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""

    @abstractmethod
    def report(self, rank: int = 0) -> GossipReport:
        """The report of one of the ranks here, by its row."""

    @abstractmethod
    def state_dicts(self) -> list[dict[str, Tensor]]:
        """The state of each rank here."""

    @abstractmethod
    def load_state_dicts(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Continue from the states of all ranks here."""

    @abstractmethod
    def counters(self) -> list[list[float]]:
        """Bytes and messages so far, of each rank here, for a checkpoint."""

    @abstractmethod
    def load_counters(self, counters: Sequence[Sequence[float]]) -> None:
        """Continue to count from a checkpoint."""


@renamed_attributes(_RENAMED)
class RankHandle(GossipHandle):
    """The handle of one rank and its model. The loop calls it after ``optimizer.step()``.

    Attributes:
        node: The rank's gossip state.
    """

    def __init__(
        self, flat: FlatParams, node: Node, hosts: tuple[tuple[int, ...], ...], description: str, rank: int
    ) -> None:
        super().__init__(flat, [node], hosts, description)
        self.node, self.rank, self._where = node, rank, f"rank {rank}, "
        self._worker = CommWorker(flat.device)
        # With overlap=True: what the round under way started with, and its result.
        self._under_way: tuple[Tensor, Future[Tensor]] | None = None

    def __call__(self) -> None:
        """Average with the neighbors; with ``overlap=True``, start to, and apply what the last call started."""
        self.flat.refuse_later()
        self.flat.write_(self.mix(self.flat.read()))

    @abstractmethod
    def mix(self, x: Tensor) -> Tensor:
        """The same for parameters that lie elsewhere, as one vector in the order of ``model.named_parameters()``."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """This rank's memories and step: plain tensors, keyed by parameter name."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from this rank's own state."""

    def run_or_overlap(self, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Run a round now; or, with overlap, start it, and return ``x`` with the correction of the last one."""
        if not self.node.overlap:
            return run(x)
        self.wait()
        x = self.node.apply_pending(x)
        self._under_way = x, self._worker.submit(lambda: _synchronized(run(x)))
        return x

    def wait(self) -> None:
        """Wait until no round is under way."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            x, mixed = under_way
            self.node.store_pending(x, mixed.result())

    def check(self) -> None:
        """Wait for the round under way, which raises `Diverged` where parameters are not finite.

        With `local_gossip`, whose local steps send nothing, all ranks must call it, and all raise the error.
        """
        self.wait()
        if isinstance(self.node.method, LocalGossip) and self.max_over_processes(float(self.node.diverged)):
            raise diverged("this rank" if self.node.diverged else "another rank", self.node.step)

    # -- the mean model ------------------------------------------------------------------------------------------------

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model holds the mean over ranks in here, of parameters and of floating-point buffers. Collective."""
        self.check()
        total, count = self.sum_over_processes(self.flat.read_all())
        with self.flat.restored():
            self.flat.write_all_(total / count)
            yield

    def evaluate_mean(self, evaluate: Callable[[], T]) -> T:
        """What ``evaluate()`` returns while the model holds the mean. All ranks must call it, at the same step."""
        with self.averaged():
            return evaluate()

    def distance(self) -> float:
        """The root mean square of |x_i - mean| over all ranks that can be reached. All of them must call it."""
        self.check()
        x = self.flat.read().double()
        total, count = self.sum_over_processes(x)
        square, count = self.sum_over_processes((x - total / count).square().sum()[None])
        return math.sqrt(float(square) / count)

    # -- as rows -------------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps taken by the group, as far as this rank knows."""
        self.wait()
        return self.node.step

    def mix_rows(self, rows: Tensor) -> Tensor:
        """`mix` of parameters as a single row."""
        return self.mix(rows[0])[None]

    def state_dicts(self) -> list[dict[str, Tensor]]:
        return [self.state_dict()]

    def load_state_dicts(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        (state,) = states
        self.load_state_dict(state)


def _synchronized(x: Tensor) -> Tensor:
    """Wait for the device in the worker's thread, so that `wait` does not have to."""
    if x.device.type == "cuda":
        torch.cuda.current_stream(x.device).synchronize()
    return x
