"""Wire: the handle that every entry point returns. Plain loops call it between ``backward()`` and ``step()``."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.comm.collectives import Traffic
from gradwire.engine import Engine, Grads, Spec, StepResult, checkpoint
from gradwire.engine.capture import graphs_on
from gradwire.engine.cuda_graphs import StepExecutor
from gradwire.engine.drive import Clock
from gradwire.engine.gradients import by_name
from gradwire.engine.hosts import AnyEngine, commits_alone
from gradwire.engine.state import spans
from gradwire.exchanges import Exchange
from gradwire.feedback import Feedback
from gradwire.integrations import grad_scaler
from gradwire.integrations.auto import Tuner
from gradwire.integrations.comm_worker import CommWorker
from gradwire.integrations.consistency import agree, errors_on_all_ranks
from gradwire.integrations.model import like, local_part, own_gradient
from gradwire.integrations.report import Report, in_start, show
from gradwire.integrations.setup import Setup


class Wire:
    """Synchronizes the gradients of one model over one backend.

    Attributes:
        parameters: By name.
        link: The backend that carries messages.
        scaler: The loop's GradScaler, if it has one.
        spec: The rules, as text.
        setup: What plans of this model depend on.
    """

    def __init__(self, setup: Setup, spec: Spec, beside: "Wire | None" = None) -> None:
        """Make a wire; ``beside`` another one of the same link, it shares that one's thread and account."""
        self.setup, self.parameters = setup, dict(setup.parameters)
        self.link, self.scaler = setup.backend, setup.options.scaler
        self.device = setup.device  # where gradients are compressed
        self.clock: Clock = Clock() if beside is None else beside.clock
        self.worker: CommWorker = CommWorker(self.device) if beside is None else beside.worker
        self._delayed_step: Future[StepResult] | None = None  # a delayed step that is under way
        self.before_step: Callable[[], None] = lambda: None  # is called before a step's first gradient is compressed
        self.adaptive: set[str] = set()  # names of optimizers that step after this wire, and normalize
        self.tuner: Tuner | None = None  # chooses the spec, where it is ``auto``
        self.last_event = ""  # of a plain loop: "backward", "call", "second call" or "step"
        self.is_called = False  # by the optimizer that Accelerate has prepared
        self.is_attached = True  # until its parameters may have another wire
        self.remove_hooks: Callable[[], None] = lambda: None  # from a sharded model
        self._feedback: Feedback | None = None  # of the main rule
        self.first_step = self._first_skipped = 0  # where this wire's own account begins
        self._start(spec)
        if beside is not None:
            self._engine.unwrapped.accounting = beside.engine.unwrapped.accounting
        setup.broadcast()
        self.link.traffic = Traffic()  # the account of bytes begins with the first step

    def _start(self, spec: Spec, old: AnyEngine | None = None, **changed: Any) -> None:
        """Make the engine that all ranks agree on, with the state of the old one."""
        options = self.setup.options
        if old is not None:
            options = replace(options, seed=old.unwrapped.seed, **changed)
            with errors_on_all_ranks(self.link):  # one rank alone may know of a corrupt message
                old.unwrapped.skipped_steps.synchronize()
        plan, self._feedback, self.spec = self.setup.agree(spec, options, self._feedback)
        self._engine = self.setup.engine(plan, options.seed)
        self.executor = StepExecutor(self._engine, self.link, self.clock, graphs_on(self.device))
        if old is not None:
            migrate_state(old, self._engine)

    @property
    def engine(self) -> AnyEngine:
        """State and step. This waits for a delayed step that is under way."""
        delayed, self._delayed_step = self._delayed_step, None
        if delayed is not None:
            for update in kept_back(self._engine, delayed.result()).values():
                update.zero_()  # it was handed out already
        return self._engine

    # -- the step --------------------------------------------------------------------------------------------------

    def __call__(self) -> None:
        """Replace every ``p.grad`` by the update. Call it after ``backward()``, before ``step()``."""
        if self.setup.hooked and self.setup.sharded:
            return  # hooks have done it in the backward pass
        if self.setup.hooked:
            raise RuntimeError("DDP calls this wire by itself in every backward pass; remove the call")
        if self.is_called:
            raise RuntimeError("the prepared optimizer calls this wire by itself when it steps; remove the call")
        write_missing(self.parameters, self.sync(self.grads()))

    def grads(self) -> dict[str, Tensor | None]:
        """This rank's gradients, by name."""
        return {name: own_gradient(p) for name, p in self.parameters.items()}

    def sync(self, grads: Grads, wait: bool = False) -> StepResult:
        """One step. Updates are written over the gradients, in units of the scaled loss.

        Args:
            grads: This rank's, by name.
            wait: Wait for this step's messages even where the mean of the step before is handed back.
        """
        self.last_event = "second call" if self.last_event in ("call", "second call") else "call"
        if self.tuner is not None:
            result: StepResult = self.tuner.measure(lambda: self._sync(grads, wait))
            return result
        return self._sync(grads, wait)

    def _sync(self, grads: Grads, wait: bool) -> StepResult:
        engine = self.engine
        self.setup.check_model()
        self.before_step()
        if self.scaler is not None and grad_scaler.overflows(grads, self.link, self.device):
            engine.skip_step()
            self.last_event = ""  # the optimizer will not step
            grad_scaler.back_off(self.scaler)
            return grad_scaler.infinite(self.parameters, grads)
        scale = grad_scaler.scale_of(self.scaler)
        if self.delays and not wait:
            result = self._exchange_later(grads, scale)
        else:
            complete = self.scaler is None and (self.link.world == 1 or commits_alone(engine))
            result = self.worker.run(lambda: self.executor.run(grads, 1.0 / scale, complete))
        if self.scaler is not None and result.updates:
            torch._foreach_mul_(list(result.updates.values()), scale)
        return result

    def _exchange_later(self, grads: Grads, scale: float) -> StepResult:
        """Send this step's gradients, and return the mean of the step before."""
        engine = self._engine
        updates: dict[str, Tensor] = {}
        copies = {name: None if g is None else g.detach().clone() for name, g in grads.items()}
        for name, x in engine.delayed_updates.items():
            grad, shape = grads[name], local_part(self.parameters[name]).shape
            updates[name] = x.view(shape).clone() if grad is None else grad.detach().copy_(x.view(shape))
        self._delayed_step = self.worker.submit(lambda: self.executor.run(copies, 1.0 / scale))
        return StepResult(updates, skipped=False)

    @property
    def delays(self) -> bool:
        """Whether every lane returns the mean of the step before, so that this step's can be sent meanwhile."""
        step = self._engine.unwrapped.step
        return all(lane.at(step)[1].delays for lane in self._engine.full_plan.lanes)

    @property
    def skipped(self) -> int:
        """Steps skipped because some rank's gradient was not finite."""
        return self.engine.unwrapped.skipped

    def observe(self, second_moments: Mapping[str, Tensor]) -> None:
        """Feed the variance test of the coming step: call it before ``wire()``, under DDP before ``backward()``.

        Where no rule has a variance test, it has no effect.

        Args:
            second_moments: For each name, the sum over samples of (per-sample gradient / batch size)^2. A loop that has
                only the gradients of M micro-batches passes the sum over those of (gradient / M)^2. A loop that clips
                its gradients multiplies this by the square of the same factor.
        """
        parts = {name: local_part(x) for name, x in second_moments.items()}
        self.engine.observe({name: x for name, x in parts.items() if x.numel()})  # an empty shard has no moments

    # -- changing the spec -----------------------------------------------------------------------------------------

    def set(self, spec: Spec, feedback: str | Feedback | None = None, exchange: str | Exchange | None = None) -> None:
        """Compress by another spec from now on. All ranks must call it; errors stay.

        A codec keeps the current feedback, if that keeps errors; a preset brings its own. Rules stay.
        """
        self._start(spec, self.engine, feedback=feedback, exchange=exchange)

    def off(self) -> None:
        """Stop compressing: dense float32 from now on, under the same feedback, so that errors and momentum survive."""
        self._start("fp32", self.engine, feedback=self._feedback, exchange=None, rules=())

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's memories and step: plain tensors, keyed by parameter name."""
        return checkpoint.save(self.engine, self.spec)

    def load_state_dict(self, state: checkpoint.Saved | Sequence[checkpoint.Saved]) -> None:
        """Take over a state of this rank, or the list of all ranks' states when the world has changed.

        All ranks must call it; what one of them cannot load, none does.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        if self.tuner is not None:
            with errors_on_all_ranks(self.link):
                saved = checkpoint.saved_spec((states or [{}])[0])
            self.tuner.before_load(saved)
        engine = self.engine
        inner, states = engine.unwrapped, checkpoint.of_shard(engine, states)
        with errors_on_all_ranks(self.link):
            _refuse_local(states)
            checkpoint.check(engine, states, self.spec)
        account = self.link.traffic
        agree(self.link, self.spec, self.setup.tensors(), int(states[0]["gradwire/step"]), call="load_state_dict()")
        self.link.traffic = account  # an agreement belongs to no step
        taken, skipped = inner.step - self.first_step, inner.skipped - self._first_skipped
        checkpoint.load(engine, states)
        # Steps that another wire took are not in this wire's account, as their bytes are not.
        self.first_step, self._first_skipped = inner.step - taken, inner.skipped - skipped

    def fits(self, state: checkpoint.Saved) -> bool:
        """Whether a state was saved in a world like this one, so that each rank loads its own."""
        return checkpoint.same_shape(self._engine, state)

    def debts(self) -> dict[str, Tensor]:
        """This rank's debt by name: its mean over ranks is still to be applied."""
        engine = self.engine
        debts = {name: torch.zeros(local_part(p).shape, device=self.device) for name, p in self.parameters.items()}
        mine = _pending_errors(engine.unwrapped).items()
        return debts | {name: debt * engine.ranks_per_host for name, debt in mine}  # for all of its host

    # -- reports ---------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """Bytes, ratios and seconds so far."""
        inner, link = self.engine.unwrapped, self.link
        steps, skipped = inner.step - self.first_step, inner.skipped - self._first_skipped
        counts: dict[str, Any] = {"steps": steps, "skipped": skipped}
        if link.host_layout is not None:
            counts |= {"hosts": self.setup.plan_world, "sent_inside": link.inside.sent}
            counts |= {"received_inside": link.inside.received, "sharded": self.setup.sharded}
        note = in_start(inner.step, inner.plan.start) if self.tuner is None else self.tuner.note()
        return Report.of(link.traffic, self.clock, inner.accounting, world=link.world, note=note, **counts)

    @property
    def decisions(self) -> Sequence[Any]:
        """What ``auto`` has decided so far."""
        return () if self.tuner is None else self.tuner.decisions

    def __str__(self) -> str:
        plan = show(self.engine, self.link.rank, self.link.world)
        return plan if self.tuner is None else "\n".join((plan.rstrip(), *self.tuner.lines(), ""))


def kept_back(engine: AnyEngine, result: StepResult) -> dict[str, Tensor]:
    """The delayed means that a step has left where they were: it was skipped, or no rank had a gradient."""
    return {name: x for name, x in engine.delayed_updates.items() if result.skipped or name not in result.updates}


def write_missing(parameters: Mapping[str, nn.Parameter], result: StepResult) -> None:
    """Hand the updates of parameters that have no gradient on this rank to the optimizer."""
    for name, update in result.updates.items():
        p = parameters[name]
        if p.grad is None:
            p.grad = like(p, update)


def skip_step(wire: Wire) -> None:
    """Leave out a step whose gradients overflow. A variance that is to be frozen then, and not later, is."""
    wire.before_step()
    wire.engine.skip_step()


def migrate_state(old: AnyEngine, new: AnyEngine) -> None:
    """Carry state over by parameter name; an error that has no memory of its own is carried into the next step."""
    before, after = old.unwrapped, new.unwrapped
    after.step, after.accounting = before.step, before.accounting
    after.skipped_steps.restart(before.skipped)
    saved = checkpoint.save(old, "")
    if not isinstance(new, Engine):
        new.load_extra_state(saved)
    debts = _pending_errors(before)
    divided = {name: lane.feedback.divides for lane in before.plan.lanes for name in lane.tensors.names}
    for lane, state in after.lanes:
        for memory, spec in lane.state_specs(after.world).items():
            for name, span in spans(spec, lane.tensors, after.rank, after.world).items():
                whole = saved.get(f"{memory}/{name}")
                same_units = memory == "denominator" or divided[name] == lane.feedback.divides
                if whole is not None and whole.numel() == span.length and same_units:
                    state.tensors[memory][span.live] = whole[span.own].to(after.device)
        in_memory = lane.pending_error(state, after.rank, after.world).to(after.device)
        left = torch.cat([debts[name].flatten() for name in lane.tensors.names]) - in_memory
        if bool((left != 0).any()):
            state.carried_error = left


def _pending_errors(engine: Engine) -> dict[str, Tensor]:
    """By name: what this rank has not sent. Its mean over ranks is still to be applied."""
    errors = [lane.pending_error(state, engine.rank, engine.world).to(engine.device) for lane, state in engine.lanes]
    return by_name(engine.plan.lanes, errors)


def _refuse_local(states: Sequence[checkpoint.Saved]) -> None:
    """Refuse a state of local steps: its errors are differences of weights."""
    if any("local/steps" in one for one in states):
        raise ValueError(
            "this is a state of local steps, which owe weights and no gradients; load it by the handle of "
            "gradwire.local, or begin without it"
        )
