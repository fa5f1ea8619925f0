"""LocalSync: the handle of local steps. Loops call it after ``optimizer.step()``."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.core import parse
from gradwire.engine import Spec, StepResult, execute, method
from gradwire.engine.checkpoint import Saved
from gradwire.exchanges import Exchange
from gradwire.feedback import Feedback
from gradwire.integrations.comm_worker import CompletedFuture
from gradwire.integrations.consistency import devices_differ, errors_on_all_ranks
from gradwire.integrations.local import checkpoint
from gradwire.integrations.local.closing import close, require_open
from gradwire.integrations.local.elastic import ElasticGroup
from gradwire.integrations.local.fragment import Fragment, fragments_of, split_names
from gradwire.integrations.local.outer import OuterWeights, require_own
from gradwire.integrations.local.report import LocalReport, summarize, where
from gradwire.integrations.local.round_length import MeasuredRounds, UnevenSteps, check_rounds, take_rounds
from gradwire.integrations.local.start import Start
from gradwire.integrations.setup import Setup
from gradwire.integrations.wire import Wire
from gradwire.local.method import LocalMethod, OuterFactory, message_after


class LocalSync:
    """Counts the inner steps of one model. Every H-th call is a round.

    Attributes:
        schedule: All rounds of the training.
        method: The round that is under way.
        link: The backend that carries messages.
        start: The first steps.
        outer: The weights that all ranks share, and their optimizer.
        optimizer: Of the outer weights; a scheduler of torch may change its rate.
        steps: Inner steps taken so far.
        rounds: Rounds that have ended so far, also those that were skipped; the same on all ranks.
        inside: How many of them since the last message was sent.
        loaded_steps: How many of them a state had that was loaded.
        fragments: The parts of the model that are sent by themselves; one, unless the method has more.
        uneven_steps: The steps of each rank in a round, where they differ.
        group: Of workers that come and go, where it is elastic.
        measured: Chooses H by the time that rounds take, if it is to be chosen.
        closing: Undoes, when the handle is closed, what was done to the model and its optimizers.
    """

    def __init__(
        self,
        model: nn.Module,
        setup: Setup,
        chosen: LocalMethod,
        make: OuterFactory | None = None,
        outer_device: torch.device | str | None = None,
        uneven: bool = False,
        group: ElasticGroup | None = None,
        measured: bool = False,
    ) -> None:
        self.group, self.closing = group, ExitStack()
        self.schedule = self.method = chosen
        self._message = chosen.message
        self.link = setup.backend
        setup.note = f"; {chosen}{', uneven' * uneven}"
        with errors_on_all_ranks(self.link):
            split_names(setup.parameters, chosen.fragments)
            check_rounds(chosen, self.link, uneven, measured, make is not None)
        self.measured = MeasuredRounds() if measured else None
        table = chosen.gradient_table
        mixed = chosen.start > 0 and devices_differ(self.link, setup.device)
        self.start = Start(chosen, Wire(replace(setup), table) if table else None, self.link, mixed)
        unscaled = replace(setup, options=replace(setup.options, scaler=None))  # differences of weights
        self.fragments = fragments_of(unscaled, chosen)
        self.outer = OuterWeights(model, setup.parameters, chosen, make, outer_device)
        self.optimizer = self.outer.optimizer
        self.steps = self.rounds = self.inside = self.loaded_steps = 0
        self.uneven_steps = UnevenSteps(chosen.H, self.link.rank, self.link.world) if uneven else None
        self.unfinished: set[int] = set()  # inner optimizers that have stepped since the last call
        self.inner_optimizers: list[Optimizer] = []  # those that are saved with the rest

    @property
    def wires(self) -> list[Wire]:
        """Of each fragment: it compresses differences, and keeps their errors. This waits for messages under way."""
        for fragment in self.fragments:
            fragment.wait()
        return [fragment.wire for fragment in self.fragments]

    @property
    def wire(self) -> Wire:
        """The first of them."""
        return self.wires[0]

    # -- steps and rounds ------------------------------------------------------------------------------------------

    @property
    def starting(self) -> bool:
        """Whether the coming step is of the start, which has no rounds."""
        return self.steps < self.method.start

    @property
    def same_batches(self) -> bool:
        """Whether all ranks must take the same batch in the coming step, since nothing is sent."""
        return self.starting and not self.start.sends(self.steps)

    def average_gradients(self) -> None:
        """In the start: average ``p.grad`` over all ranks. Without a scaler, the optimizer's ``step()`` calls it.

        Where all ranks take the same batches, and after the start, it has no effect.
        """
        if self.start.wire is not None and self.start.sends(self.steps) and not self.start.averaged:
            self.start.wire()
            self.start.count_average()

    def __call__(self) -> None:
        """Count an inner step; every H-th time, agree on weights with all ranks. Call it after ``optimizer.step()``."""
        require_open(self)
        for fragment in self.advance():
            buffers = None if fragment.number else self.outer.flat_buffers()
            differences = self.outer.differences(fragment.names)
            if self.uneven_steps is not None and self.method.weighs_ranks:
                torch._foreach_mul_(list(differences.values()), self.uneven_steps.weight)
            work = partial(self._end_round, fragment.wire, differences, buffers)
            fragment.pending_result = (
                fragment.wire.worker.submit(work) if self.method.delay else CompletedFuture([work()])
            )
        if self.start.compares(self.steps):
            execute(self.start.compare(self.outer, self.wire.setup.sharded), self.link, self.wire.clock)
        self.arrive()

    def _end_round(self, wire: Wire, differences: dict[str, Tensor], buffers: Tensor | None) -> StepResult:
        """The mean difference of a fragment; then ranks agree on the next round, where that is measured."""
        if self.group is not None and buffers is not None:  # it has one fragment
            return self.group.exchange(wire, differences, buffers)
        measured = None if self.measured is None or self.measured.chosen is not None else self.measured
        timed = self.uneven_steps or measured
        if timed is not None:
            timed.end_computing(wire.device)
        skipped = wire.skipped
        updates = wire.sync(differences).updates
        is_skipped = wire.skipped > skipped  # reads what a GPU may know alone
        if buffers is not None and not is_skipped:
            execute(self.outer.average_buffers(buffers, self.link.world), self.link, wire.clock)
        if self.uneven_steps is not None:
            execute(self.uneven_steps.agree(wire.device), self.link, wire.clock)
        if measured is not None:
            execute(measured.agree(wire.device, self.method.H), self.link, wire.clock)
            self.schedule = self.method = replace(self.method, H=measured.chosen or self.method.H)
        if self.method.delay and wire.device.type == "cuda":
            torch.cuda.current_stream(wire.device).synchronize()  # this thread's, which the training does not wait for
        return StepResult(updates, is_skipped)

    def advance(self) -> list[Fragment]:
        """Count an inner step. Returns the fragments whose messages are due."""
        self.start.require_averaged(self.steps)
        require_own(self.outer, "outer()")
        self.unfinished.clear()
        self.steps += 1
        if self.steps <= self.method.start:
            self.outer.copy_from_model()
            self.start.count_step()
            if self.uneven_steps is not None:
                self.uneven_steps.restart()
            return []
        if not self.inside:
            take_rounds(self, self.schedule.after(self.steps - 1))
        self.inside += 1
        for fragment in self.fragments:
            fragment.age += 1
        count, H = len(self.fragments), self.method.H if self.uneven_steps is None else self.uneven_steps.own
        due = [one for one in self.fragments if (self.inside - self.method.offset(one.number, count)) % H == 0]
        self.rounds, self.inside = self.rounds + self.inside // H, self.inside % H
        for fragment in due:
            fragment.send(None if self.uneven_steps is None else self.uneven_steps.mean)
        return due

    def arrive(self, early: bool = False) -> None:
        """Apply messages whose time has come: step the outer weights, and start from them.

        A round that was skipped leaves them alone.

        Args:
            early: Do not wait for the end of the delay.
        """
        with nullcontext() if self.group is None else self.group.lock:
            for fragment in self.fragments:
                if fragment.pending_result is not None and (early or fragment.age >= self.method.delay):
                    fragment.apply(self.outer, self.method)
            if self.group is not None:
                self.group.arrive()

    @property
    def skipped(self) -> int:
        """Rounds skipped because some rank's difference was not finite."""
        return sum(wire.skipped for wire in self.wires)

    def averaged(self) -> AbstractContextManager[None]:
        """A context in which the model has the outer weights and buffers, for evaluation. Nothing is sent."""
        for fragment in self.fragments:
            fragment.wait()  # a message under way writes the buffers
        return self.outer.averaged()

    # -- changing the method ---------------------------------------------------------------------------------------

    def set(
        self, spec: "Spec | LocalMethod", feedback: str | Feedback | None = None, exchange: str | Exchange | None = None
    ) -> None:
        """Take other rounds, or send other messages, from now on. All ranks must call it; errors and momentum stay.

        Args:
            spec: Local steps such as ``"diloco(H=10)"``, or a codec, which keeps the rounds as they are. The start
                and the fragments stay as they were.
            feedback: Wins over the spec's own.
            exchange: Wins over the spec's own.
        """
        with errors_on_all_ranks(self.link):
            _refuse_change(self.group, spec)
            require_own(self.outer, "outer.set()")
            made: Any = parse(spec) if isinstance(spec, str) else spec
            rounds = isinstance(made, LocalMethod)
            base, message = (made, made.message) if rounds else (self.schedule, made)
            kept = {name: getattr(self.method, name) for name in ("start", "first", "fragments")}
            chosen = replace(base, **kept).with_message(message_after(self._message, message, feedback, exchange))
            measured = self.measured is not None
            check_rounds(chosen, self.link, self.uneven_steps is not None, measured, self.outer.is_given)
        for wire in self.wires:
            wire.setup.note = f"; {chosen}{', uneven' * (self.uneven_steps is not None)}"
            wire.set(chosen.message)
        self.arrive(early=True)  # the next message must not meet this one
        self.schedule, self._message = chosen, chosen.message
        take_rounds(self, chosen.after(self.steps - self.inside))  # as when the round began
        self.inside = min(self.inside, self.method.H - 1)
        if self.uneven_steps is not None:
            self.uneven_steps = UnevenSteps(chosen.H, self.link.rank, self.link.world)
        if rounds:
            self.outer.configure(self.method)

    def off(self) -> None:
        """Stop compressing: differences are sent as float32 from now on, and errors, too.

        A codec that is set later has the feedback and the mean of the last one.
        """
        _refuse_change(self.group, "fp32")
        for wire in self.wires:
            wire.off()
        message = method("fp32", self.method.message.feedback)
        self.schedule, self.method = self.schedule.with_message(message), self.method.with_message(message)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's whole state but for the inner optimizer: plain tensors, by kind and name.

        That is the outer weights with their optimizer's state, the errors, the place inside the round, and the model's
        own parameters and buffers, which differ by rank inside a round.
        """
        return checkpoint.save(self)

    def load_state_dict(self, state: Saved | Sequence[Saved]) -> None:
        """Take over a state of this rank, or the list of all ranks' states when the world has changed.

        All ranks must call it. In another world every rank starts a new round from the outer weights.
        """
        checkpoint.load(self, [state] if isinstance(state, Mapping) else list(state))

    def fits(self, state: Saved) -> bool:
        """Whether a state was saved in a world like this one, so that each rank loads its own."""
        return self.wire.fits(state)

    # -- reports ---------------------------------------------------------------------------------------------------

    def report(self) -> LocalReport:
        """Bytes, ratios and seconds so far, of the start and of the rounds."""
        return summarize(self.wires, self.fragments, self.start, self.steps, self.loaded_steps)

    def __str__(self) -> str:
        rounds = self.schedule.text(type(self.optimizer).__name__ if self.outer.is_given else "")
        return "\n".join((rounds, where(self), *map(str, self.wires)))

    def close(self, keep_weights: bool = False) -> None:
        """End local steps: leave an elastic group, and have FSDP or DistributedDataParallel average gradients again.

        The optimizers call this handle no longer. Its report, its state and ``averaged()`` stay. A model that another
        handle has taken over is left to that one. To train on, close it at the end of a round, where ``inside`` is 0:
        all ranks then end with the same weights. Inside a round, and in an elastic group, each keeps its own. States of
        inner optimizers differ by rank: begin with new ones, or with those of rank 0, where gradients are averaged.

        Args:
            keep_weights: Leave the model as it is at the end of a round, too, as after other weights were loaded.
        """
        close(self, keep_weights)


def _refuse_change(group: ElasticGroup | None, spec: object) -> None:
    if group is not None:
        raise ValueError(f"an elastic group keeps its rounds; start all workers again to take {str(spec)!r}")
