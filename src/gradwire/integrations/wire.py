"""Wire: the handle that every door returns; called between ``backward()`` and ``step()``, it is the plain loop's."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gradwire.comm.backend import Backend
from gradwire.comm.collectives import Traffic
from gradwire.core.deferred_checks import unseen
from gradwire.core.requests import Max
from gradwire.engine import memory
from gradwire.engine.drive import Clock, Conversation, drive
from gradwire.engine.hierarchical import HierarchicalSession, uncompressed
from gradwire.engine.method import Spec, method
from gradwire.engine.plan import LAUNCH_BYTES, Plan, Rule, build, default_rules
from gradwire.engine.session import Grads, Session, Verdict
from gradwire.engine.shares import owners
from gradwire.engine.warmup import warm_up
from gradwire.exchanges import Delayed, Exchange
from gradwire.feedback import Feedback
from gradwire.integrations.comm_worker import CommWorker
from gradwire.integrations.compile_notice import telling_of_compilers
from gradwire.integrations.consistency import agree, telling
from gradwire.integrations.model import home
from gradwire.integrations.report import Report, show
from gradwire.integrations.spec_change import going_on, inherit

T = TypeVar("T")


class Wire:
    """Synchronizes the gradients of one model over one link.

    Attributes:
        parameters: By name.
        session: Memories and step.
        link: Who moves the bytes.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        link: Backend,
        spec: Spec,
        *,
        feedback: str | Feedback | None = None,
        exchange: str | Exchange | None = None,
        granularity: str = "layer",
        rules: Sequence[Rule] = (),
        bundle: str | None = "fp16",
        scaler: torch.amp.GradScaler | None = None,
        seed: int = 0,
        launch_bytes: int = LAUNCH_BYTES,
        rollback: bool = True,
        hooked: bool = False,
        shared: Mapping[str, Tensor] | None = None,
        veto: Callable[[Plan], None] = lambda plan: None,
    ) -> None:
        self.parameters = dict(parameters)
        self.link = link
        self.scaler = scaler
        self.device = home(self.parameters.values())
        self.clock = Clock()
        self.ferry = CommWorker(self.device)
        self._extra = tuple(rules)
        self._default: dict[str, Any] = {"granularity": granularity, "bundle": bundle}
        self._launch_bytes = launch_bytes
        self._rollback = rollback
        self._hooked = hooked
        self._begun = self._begun_skipped = 0  # where this wire's own account begins
        self._shared = dict(shared or {})
        self._veto = veto
        plan = self._agree(spec, feedback, exchange, seed, self._extra)
        self.session = self._session(plan, seed)
        self._follow()

    def _session(self, plan: Plan, seed: int) -> Session:
        """This rank's side of a plan."""
        with telling_of_compilers(self.device, first=self.link.rank == 0):
            warm_up(plan, self.device)
        grouping = self.link.grouping
        if grouping is None:
            return Session(plan, self.link.rank, self.link.world, seed, self.device, self._rollback)
        # Who serves what follows from rules, not from specs: then nothing changes hands when the spec changes.
        lossy = (*self._extra, *default_rules("sign", **self._default))
        owned = owners(build(self._shapes, lossy, plan.world, self._launch_bytes), grouping.beside)
        return HierarchicalSession(plan, owned, grouping, self.link.rank, seed, self.device, self._rollback)

    def _follow(self) -> None:
        """Start as rank 0 does. The account of bytes begins with the first step."""
        with torch.no_grad():
            for tensor in self._shared.values():
                self.link.broadcast_(tensor)
        self._shared = {}
        self.link.traffic = Traffic()

    # -- the plain loop --------------------------------------------------------------------------------------------

    def __call__(self) -> None:
        """Replace every ``p.grad`` by what the group agreed on. Call it after ``backward()``, before ``step()``."""
        if self._hooked:
            raise RuntimeError("DDP calls this wire by itself in every backward pass; remove the call")
        self.session.donate()
        self.write_(self.agree_on(self.grads()))

    def grads(self) -> dict[str, Tensor | None]:
        return {name: p.grad for name, p in self.parameters.items()}

    def agree_on(self, grads: Grads, patient: bool = False) -> Verdict:
        """One step: what to write into every ``p.grad``, in units of the scaled loss.

        Args:
            grads: This rank's, by name.
            patient: Wait for this step's messages even where the mean of the step before is handed back.
        """
        self.ferry.land(self)
        if self.scaler is not None and self.overflows(grads):
            self.session.skip()
            return self._infinite()
        scale = self.scale
        if self.delayed and not patient:
            verdict = self.ferry.swap(self, grads, scale)
        else:
            self.session.ahead = self._knows(grads) and self.may_lead
            verdict = self.hold(self.session.run(grads, 1.0 / scale))
        if self.scaler is None:
            return verdict
        return verdict._replace(updates={name: update * scale for name, update in verdict.updates.items()})

    def hold(self, conversation: Conversation[T]) -> T:
        """Hold a conversation over the link. Where the session runs ahead, whatever is odd about it is seen later."""
        if not self.session.ahead:
            return drive(conversation, self.link, self.clock)
        with unseen() as doubts:
            outcome = drive(conversation, self.link, self.clock)
        self.session.doubts += doubts
        return outcome

    @property
    def prompt(self) -> bool:
        """Whether gradients and messages stay on a GPU, so that the host need not wait for any."""
        return self.device.type == "cuda" and self.link.prompt

    @property
    def may_lead(self) -> bool:
        """Whether a step may be taken without a look at the device, if all ranks have all their gradients."""
        return self.prompt and self.scaler is None and not self.delayed and self.session.may_lead

    def _knows(self, grads: Grads) -> bool:
        """Whether all gradients of all ranks are there. Of other ranks nobody can tell without looking."""
        return self.link.world == 1 and all(g is not None and g.layout == torch.strided for g in grads.values())

    @property
    def scale(self) -> float:
        """What the loss was multiplied by. Memories live in units of the unscaled gradient."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    @property
    def delayed(self) -> bool:
        """Whether every lane hands back last step's mean, so that this step's may travel meanwhile."""
        step = self.session.step
        return all(isinstance(lane.at(step)[1], Delayed) for lane in self.session.whole.lanes)

    @property
    def skipped(self) -> int:
        """Steps dropped because some rank's gradient was not finite."""
        self.ferry.land(self)
        return self.session.skipped

    def observe(self, second_moments: Mapping[str, Tensor]) -> None:
        """Feed the variance test of the coming step: call it before ``wire()``, under DDP before ``backward()``.

        Where no rule has a variance test, nothing is made of it.

        Args:
            second_moments: For each name, the sum over samples of (per-sample gradient / batch size)^2. A loop that has
                only the gradients of M micro-batches passes the sum over those of (gradient / M)^2. A loop that clips
                its gradients multiplies this by the square of the same factor.
        """
        self.ferry.land(self)
        self.session.observe(second_moments)

    def overflows(self, grads: Grads) -> bool:
        """Whether any rank's gradient is not finite; asked before anything is encoded."""
        dense = [g for g in grads.values() if g is not None and g.layout == torch.strided]
        broken = not all(bool(torch.isfinite(g).all()) for g in dense)
        (anywhere,) = self.link.answer([Max(torch.tensor([int(broken)], device=self.device))])
        return bool(anywhere.item())

    def _infinite(self) -> Verdict:
        """What GradScaler looks for, on each rank for itself: this makes all of them back off together."""
        inf = torch.tensor(float("inf"), device=self.device)
        return Verdict({name: inf.expand(p.shape) for name, p in self.parameters.items()}, skipped=True)

    def write_(self, verdict: Verdict) -> None:
        """Hand the outcome to the optimizer."""
        there: dict[str, Tensor] = {}
        for name, update in verdict.updates.items():
            p = self.parameters[name]
            if p.grad is None:
                p.grad = update.to(device=p.device, dtype=p.dtype).clone()
            else:
                there[name] = p.grad
        copy_(there, verdict.updates)

    # -- changing one's mind ---------------------------------------------------------------------------------------

    def set(self, spec: Spec, feedback: str | Feedback | None = None, exchange: str | Exchange | None = None) -> None:
        """Compress in another way from now on. All ranks must call it; what is still owed is kept.

        A codec goes on under the feedback that keeps debts now; a preset brings its own. Rules stay.
        """
        self._replace(spec, feedback, exchange, self._extra)

    def off(self) -> None:
        """Stop compressing: dense float32 from now on, under the same feedback, so that debts and momentum survive."""
        self._replace("fp32", self._main.feedback, None, ())

    def _replace(
        self, spec: Spec, feedback: str | Feedback | None, exchange: str | Exchange | None, rules: Sequence[Rule]
    ) -> None:
        self.ferry.land(self)
        old = self.session
        plan = self._agree(spec, feedback, exchange, old.seed, rules, self._main.feedback)
        self.session = self._session(plan, old.seed)
        inherit(old, self.session)

    def _agree(
        self,
        spec: Spec,
        feedback: str | Feedback | None,
        exchange: str | Exchange | None,
        seed: int,
        extra: Sequence[Rule],
        current: Feedback | None = None,
    ) -> Plan:
        """Make a plan of the spec, and make sure that all ranks made the same."""
        with telling(self.link):
            for rule in extra:
                if not isinstance(rule, Rule):
                    raise TypeError(f"{rule!r} is no rule; write gradwire.Rule('fp16', name='head.*')")
            feedback = going_on(spec, feedback, current)
            main = method(spec, feedback, exchange)
            rules = (*extra, *default_rules(spec, feedback, exchange, **self._default))
            said = describe(rules)
            parties = self._parties
            if parties == 1 and self.link.grouping is not None:
                rules = uncompressed(rules)
            plan = build(self._shapes, rules, parties, self._launch_bytes)
            self._veto(plan)
            if self.prompt:
                plan = plan.steady()
        agree(self.link, f"{said}; {self._circumstances(seed)}", self._tensors())
        self._main, self.spec = main, said
        return plan

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in self.parameters.items()}

    @property
    def _parties(self) -> int:
        """Between how many messages are compressed: ranks, or hosts."""
        return self.link.world if self.link.grouping is None else len(self.link.grouping.hosts)

    def _circumstances(self, seed: int) -> str:
        """What else would have ranks speak past each other."""
        scaler = "no GradScaler" if self.scaler is None else "a GradScaler"
        door = "DDP" if self._hooked else "no DDP"
        undo = "rollback" if self._rollback else "no rollback"
        hosts = "" if self.link.grouping is None else f"; hosts {self.link.grouping}"
        return f"seed {seed}; launches of {self._launch_bytes} bytes; {scaler}; {door}; {undo}{hosts}"

    def _tensors(self) -> dict[str, str]:
        found = {**self._shared, **self.parameters}
        return {name: f"{tuple(x.shape)} {x.dtype} {x.requires_grad}" for name, x in found.items()}

    # -- what is kept ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's memories and step: plain tensors, keyed by parameter name."""
        self.ferry.land(self)
        return memory.save(self.session, self.spec)

    def load_state_dict(self, state: memory.State | Sequence[memory.State]) -> None:
        """Take over a state of this rank, or the list of all ranks' states when the world has changed.

        All ranks must call it; what one of them cannot load, none does.
        """
        self.ferry.land(self)
        states = [state] if isinstance(state, Mapping) else list(state)
        with telling(self.link):
            memory.check(self.session, states, self.spec)
        account = self.link.traffic
        agree(self.link, self.spec, self._tensors(), int(states[0]["gradwire/step"]))
        self.link.traffic = account  # an agreement is no step's
        taken, skipped = self.session.step - self._begun, self.session.skipped - self._begun_skipped
        memory.load(self.session, states)
        # The account is of this wire: steps that another one took are not in it, as their bytes are not.
        self._begun, self._begun_skipped = self.session.step - taken, self.session.skipped - skipped

    def fits(self, state: memory.State) -> bool:
        """Whether a state was saved in a world like this one, so that each rank loads its own."""
        return memory.same_shape(self.session, state)

    def debts(self) -> dict[str, Tensor]:
        """This rank's share of the pending update by name; its mean over ranks is still to be applied."""
        self.ferry.land(self)
        session = self.session
        found = {name: torch.zeros(p.shape, device=self.device) for name, p in self.parameters.items()}
        for lane, held in zip(session.plan.lanes, session.memories, strict=True):
            debt = lane.debt(held, session.rank, session.world).to(self.device) * session.beside  # for all of its host
            for (name, place), shape in zip(lane.slices.items(), lane.tensors.shapes, strict=True):
                found[name] = debt[place].view(shape)
        return found

    # -- what is shown ---------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """Bytes, ratios and seconds so far."""
        self.ferry.land(self)
        session = self.session
        rules = {label: (session.said[label], dense) for label, dense in session.meant.items()}
        spent = {label: (clock.encode, clock.decode) for label, clock in session.spent.items()}
        steps, skipped = session.step - self._begun, session.skipped - self._begun_skipped
        report = Report.of(steps, skipped, self.link.world, self.link.traffic, self.clock, rules, spent)
        return report if self.link.grouping is None else report.among(self._parties, self.link.inside)

    def __str__(self) -> str:
        return show(self.session, self.link.rank, self.link.world)


def copy_(places: Mapping[str, Tensor], updates: Mapping[str, Tensor]) -> None:
    """Write updates to their places, by name, unless they have been written there already."""
    apart = [name for name in places if name in updates and places[name].data_ptr() != updates[name].data_ptr()]
    if apart:
        with torch.no_grad():
            torch._foreach_copy_([places[name] for name in apart], [updates[name] for name in apart])


def describe(rules: Sequence[Rule]) -> str:
    """The rules as text that two ranks, or a run and its checkpoint, can compare."""
    return "; ".join(
        f"{rule.label}: {method(rule.spec, rule.feedback, rule.exchange)}, {rule.granularity}" for rule in rules
    )
