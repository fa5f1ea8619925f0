"""LocalSync: the handle of local steps. Loops call it after ``optimizer.step()``."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.comm.collectives import Traffic
from gradwire.core.spec import parse
from gradwire.engine.checkpoint import Saved
from gradwire.engine.drive import execute
from gradwire.engine.method import Spec, method
from gradwire.engine.step import StepResult
from gradwire.exchanges import Exchange
from gradwire.feedback import Feedback
from gradwire.integrations.comm_worker import CompletedFuture, Pending
from gradwire.integrations.consistency import errors_on_all_ranks
from gradwire.integrations.local.outer import OuterWeights
from gradwire.integrations.local.report import LocalReport, split
from gradwire.integrations.setup import Setup
from gradwire.integrations.spec_change import feedback_after
from gradwire.integrations.wire import Wire
from gradwire.local.method import LocalMethod, OuterFactory

_KEY = "local/"


class LocalSync:
    """Counts the inner steps of one model. Every H-th call is a round.

    Attributes:
        method: The round.
        link: The backend that carries messages.
        starter: Averages the gradients of the first steps; None without a start.
        outer: The weights that all ranks share, and their optimizer.
        optimizer: Of the outer weights; a scheduler of torch may change its rate.
        steps: Inner steps taken so far.
        inside: How many of them since the last message was sent.
        flight: What the message of the last round leads to, until that is applied.
    """

    def __init__(self, model: nn.Module, setup: Setup, chosen: LocalMethod, make: OuterFactory | None = None) -> None:
        self.method, self._given = chosen, make is not None
        setup.note = f"; {chosen}"
        self.starter = Wire(replace(setup), chosen.first) if chosen.start else None
        self._wire, self.link = Wire(setup, chosen.message), setup.backend
        self.outer = OuterWeights(model, self._wire.parameters, make or chosen.outer)
        self.optimizer = self.outer.optimizer
        self.steps = self.inside = 0
        self.flight: Pending[StepResult] | None = None
        self._start_steps = self._local_steps = 0  # of this handle's own account
        self._start_traffic = Traffic()
        self._averaged = False  # whether the gradients of the coming step are means already

    @property
    def wire(self) -> Wire:
        """Compresses the differences of a round, and keeps their errors. This waits for a message under way."""
        if self.flight is not None:
            self.flight.result()
        return self._wire

    # -- steps and rounds ------------------------------------------------------------------------------------------

    @property
    def starting(self) -> bool:
        """Whether the gradients of the coming step are averaged."""
        return self.steps < self.method.start

    def average_gradients(self) -> None:
        """In the start: average ``p.grad`` over all ranks. The inner optimizer's ``step()`` calls it by itself."""
        if self.starter is not None and self.starting and not self._averaged:
            self.starter()
            self.count_average()

    def count_average(self) -> None:
        """Note that the gradients of the coming step are means."""
        self._averaged, self._start_traffic = True, self.link.traffic
        self._start_steps += 1

    def require_averaged(self) -> None:
        """Refuse a step of the start whose gradients are those of this rank alone."""
        if self.starting and not self._averaged:
            raise RuntimeError(
                f"the first {self.method.start} steps average gradients, and those of step {self.steps} are not yet; "
                "call average_gradients() of the handle after backward(), before optimizer.step()"
            )

    def __call__(self) -> None:
        """Count an inner step; every H-th time, agree on weights with all ranks. Call it after ``optimizer.step()``."""
        if self.advance():
            differences, buffers = self.outer.differences(), self.outer.flat_buffers()
            work = partial(self._exchange, differences, buffers)
            self.flight = self._wire.worker.submit(work) if self.method.delay else CompletedFuture([work()])
        self.arrive()

    def _exchange(self, differences: dict[str, Tensor], buffers: Tensor) -> StepResult:
        wire = self._wire
        skipped = wire.skipped
        updates = wire.sync(differences).updates
        dropped = wire.skipped > skipped  # reads what a GPU may know alone
        if not dropped:
            execute(self.outer.average_buffers(buffers, self.link.world), self.link, wire.clock)
        if self.method.delay and wire.device.type == "cuda":
            torch.cuda.current_stream(wire.device).synchronize()  # this thread's, which the training does not wait for
        return StepResult(updates, dropped)

    def advance(self) -> bool:
        """Count an inner step. Returns whether its round ends, so that a message is due."""
        self.require_averaged()
        if self.starting:
            self.outer.take()
            self.steps, self._averaged = self.steps + 1, False
            return False
        self.steps, self.inside = self.steps + 1, self.inside + 1
        if self.inside < self.method.H:
            return False
        self._local_steps += self.inside
        self.inside = 0
        return True

    def arrive(self, early: bool = False) -> None:
        """Apply the last message, if it is time to: step the outer weights, and start from them.

        A round that was dropped leaves them alone.

        Args:
            early: Do not wait for the end of the delay.
        """
        if self.flight is None or (self.inside < self.method.delay and not early):
            return
        result, self.flight = self.flight.result(), None
        if not result.skipped:
            self.outer.step(result.updates)
        self.outer.restart(0.0 if result.skipped else self.method.alpha)

    @property
    def skipped(self) -> int:
        """Rounds dropped because some rank's difference was not finite."""
        return self.wire.skipped

    def averaged(self) -> AbstractContextManager[None]:
        """A context in which the model has the outer weights and buffers, for evaluation. Nothing is sent."""
        if self.flight is not None:
            self.flight.result()  # a message under way writes the buffers
        return self.outer.averaged()

    # -- changing the method ---------------------------------------------------------------------------------------

    def set(
        self,
        spec: "Spec | LocalMethod",
        feedback: str | Feedback | None = None,
        exchange: str | Exchange | None = None,
    ) -> None:
        """Take other rounds, or send other messages, from now on. All ranks must call it; errors and momentum stay.

        Args:
            spec: Local steps such as ``"diloco(H=10)"``, or a codec, which keeps the rounds as they are. The start
                stays as it was.
            feedback: Wins over the spec's own.
            exchange: Wins over the spec's own.
        """
        with errors_on_all_ranks(self.link):
            made: Any = parse(spec) if isinstance(spec, str) else spec
            rounds = isinstance(made, LocalMethod)
            base, message = (made, made.message) if rounds else (self.method, made)
            feedback = feedback_after(message, feedback, self.method.message.feedback)
            chosen = replace(
                base,
                message=method(message, feedback, exchange),
                start=self.method.start,
                first=self.method.first,
            )
            self.wire.setup.note = f"; {chosen}"
        self.wire.set(chosen.message)
        self.arrive(early=True)  # the next message must not meet this one
        self.method = chosen
        if rounds and not self._given:
            self.outer.configure(chosen)

    def off(self) -> None:
        """Stop compressing: differences travel as float32 from now on; errors survive, and are sent."""
        self.wire.off()
        self.method = replace(self.method, message=method("fp32", self.method.message.feedback))

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's whole state but for the inner optimizer: plain tensors, by kind and name.

        That is the outer weights with their optimizer's state, the errors, the place inside the round, and the model's
        own parameters and buffers, which differ by rank inside a round.
        """
        counts = {"steps": torch.tensor(self.steps), "inside": torch.tensor(self.inside)}
        own = {f"own/{name}": x.cpu().contiguous() for name, x in self.outer.own().items()}
        if self.flight is not None:
            result = self.flight.result()
            counts["dropped"] = torch.tensor(result.skipped)
            own |= {f"flight/{name}": x.detach().cpu().clone().contiguous() for name, x in result.updates.items()}
        state = {f"{_KEY}{name}": x for name, x in {**counts, **own, **self.outer.state_dict()}.items()}
        if self.starter is not None:
            state |= {f"{_KEY}start/{name}": x for name, x in self.starter.state_dict().items()}
        return {**self.wire.state_dict(), **state}

    def load_state_dict(self, state: Saved | Sequence[Saved]) -> None:
        """Take over a state of this rank, or the list of all ranks' states when the world has changed.

        All ranks must call it. In another world every rank starts a new round from the outer weights.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        with errors_on_all_ranks(self.link):
            _check(self.outer, states)
        self.wire.load_state_dict(states)
        self.flight = None
        if self.starter is not None:
            self.starter.load_state_dict([_below(one, f"{_KEY}start/") for one in states])
        mine = _own_state(self, states)
        local = _below(states[0] if mine is None else mine, _KEY)
        self.outer.load_state_dict(local)
        self.steps, self.inside, self._averaged = int(local["steps"]), int(local["inside"]), False
        if "dropped" in local:
            updates = {name: x.to(self._wire.device) for name, x in _below(local, "flight/").items()}
            self.flight = CompletedFuture([StepResult(updates, bool(local["dropped"]))])
        if mine is not None:
            self.outer.load_own(_below(mine, f"{_KEY}own/"))
            return
        self.arrive(early=True)
        self.outer.restart()
        self.inside = 0

    def fits(self, state: Saved) -> bool:
        """Whether a state was saved in a world like this one, so that each rank loads its own."""
        return self.wire.fits(state)

    # -- reports ---------------------------------------------------------------------------------------------------

    def report(self) -> LocalReport:
        """Bytes, ratios and seconds so far, of the start and of the rounds."""
        return LocalReport(self._start_steps, self._local_steps, *split(self.wire, self.starter, self._start_traffic))

    def __str__(self) -> str:
        return f"{self.method}\nstep {self.steps}, {self.inside} of {self.method.H} in the round\n{self.wire}"


def _below(state: Saved, prefix: str) -> dict[str, Tensor]:
    """The part of a state whose keys begin so, without that."""
    return {key.removeprefix(prefix): x for key, x in state.items() if key.startswith(prefix)}


def _check(outer: OuterWeights, states: Sequence[Saved]) -> None:
    if not states or any(f"{_KEY}steps" not in one for one in states):
        raise ValueError("this is no state of local steps: it lacks local/steps; pass what state_dict() returned")
    needed = ["rate", *(f"outer/{name}" for name in outer.weights), *(f"buffer/{name}" for name in outer.buffers)]
    missing = [name for name in needed if f"{_KEY}{name}" not in states[0]]
    if missing:
        raise ValueError(f"the state lacks {missing[0]}; is it a checkpoint of another model?")


def _own_state(handle: LocalSync, states: Sequence[Saved]) -> Saved | None:
    """The state that this very rank has saved, if the world is still the same."""
    own = [one for one in states if len(states) == 1 or int(one["gradwire/rank"]) == handle.link.rank]
    return own[0] if len(own) == 1 and handle.fits(own[0]) else None
