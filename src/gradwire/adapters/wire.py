"""Wire: the handle that every door returns; called between ``backward()`` and ``step()``, it is the plain loop's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gradwire.adapters.agreement import agree
from gradwire.adapters.ferry import Ferry
from gradwire.adapters.model import home
from gradwire.adapters.report import Report, summarize
from gradwire.core.asks import Max
from gradwire.exchanges import Delayed
from gradwire.links.link import Link
from gradwire.sync import memory
from gradwire.sync.drive import Clock, drive
from gradwire.sync.lane import OWED
from gradwire.sync.method import Spec, method
from gradwire.sync.plan import LAUNCH_BYTES, Plan, Rule, build, default_rules
from gradwire.sync.session import Grads, Session, Verdict


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
        link: Link,
        spec: Spec,
        *,
        feedback: str | None = None,
        exchange: str | None = None,
        granularity: str = "layer",
        rules: Sequence[Rule] = (),
        bundle: str | None = "fp16",
        scaler: torch.amp.GradScaler | None = None,
        seed: int = 0,
        launch_bytes: int = LAUNCH_BYTES,
        hooked: bool = False,
    ) -> None:
        self.parameters = dict(parameters)
        self.link = link
        self.scaler = scaler
        self.device = home(self.parameters.values())
        self.clock = Clock()
        self.ferry = Ferry(self.device)
        self._extra = tuple(rules)
        self._default: dict[str, Any] = {"granularity": granularity, "bundle": bundle}
        self._launch_bytes = launch_bytes
        plan = self._agree(spec, feedback, exchange, seed)
        self.session = Session(plan, link.rank, link.world, seed, self.device)
        self._hooked = hooked
        self._dense_bytes: dict[str, int] = {}

    # -- the plain loop --------------------------------------------------------------------------------------------

    def __call__(self) -> None:
        """Replace every ``p.grad`` by what the group agreed on. Call it after ``backward()``, before ``step()``."""
        if self._hooked:
            raise RuntimeError("DDP calls this wire by itself in every backward pass; remove the call")
        verdict = self.agree_on({name: p.grad for name, p in self.parameters.items()})
        self.account()
        self.write_(verdict)

    def agree_on(self, grads: Grads) -> Verdict:
        """One step: what to write into every ``p.grad``, in units of the scaled loss."""
        scale = self.scale
        if self.scaler is not None and self._overflow(grads):
            self.session.skipped += 1
            return self._infinite()
        if self.delayed:
            verdict = self.ferry.swap(self, grads, scale)
        else:
            verdict = drive(self.session.run(grads, 1.0 / scale), self.link, self.clock)
        if self.scaler is None:
            return verdict
        return verdict._replace(updates={name: update * scale for name, update in verdict.updates.items()})

    @property
    def scale(self) -> float:
        """What the loss was multiplied by. Memories live in units of the unscaled gradient."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    @property
    def delayed(self) -> bool:
        """Whether every lane hands back last step's mean, so that this step's may travel meanwhile."""
        step = self.session.step
        return all(isinstance(lane.at(step)[1], Delayed) for lane in self.session.plan.lanes)

    @property
    def skipped(self) -> int:
        return self.session.skipped

    def observe(self, second_moments: Mapping[str, Tensor]) -> None:
        """Feed the variance test: for each name, the sum over samples of (per-sample gradient / batch size)^2."""
        self.session.observe(second_moments)

    def _overflow(self, grads: Grads) -> bool:
        """Whether any rank's gradient is not finite; asked before anything is encoded."""
        broken = [not bool(torch.isfinite(g).all()) for g in grads.values() if g is not None]
        (anywhere,) = self.link.answer([Max(torch.tensor([int(any(broken))], device=self.device))])
        return bool(anywhere.item())

    def _infinite(self) -> Verdict:
        """What GradScaler looks for, on each rank for itself: this makes all of them back off together."""
        inf = torch.tensor(float("inf"), device=self.device)
        return Verdict({name: inf.expand(p.shape) for name, p in self.parameters.items()}, skipped=True)

    def write_(self, verdict: Verdict) -> None:
        """Hand the outcome to the optimizer."""
        for name, update in verdict.updates.items():
            p = self.parameters[name]
            if p.grad is None:
                p.grad = update.to(device=p.device, dtype=p.dtype).clone()
            else:
                p.grad.copy_(update)

    # -- changing one's mind ---------------------------------------------------------------------------------------

    def set(self, spec: Spec, feedback: str | None = None, exchange: str | None = None) -> None:
        """Compress in another way from now on. All ranks must call it; what is still owed is kept."""
        self.ferry.land(self)
        if feedback is None and not isinstance(method(spec).feedback, type(self._main.feedback)):
            feedback = str(self._main.feedback)
        plan = self._agree(spec, feedback, exchange, self.session.seed)
        old, self.session = self.session, Session(plan, self.link.rank, self.link.world, self.session.seed, self.device)
        self.session.step, self.session.skipped, self.session.said = old.step, old.skipped, old.said
        inherit(old, self.session)

    def off(self) -> None:
        """Stop compressing: dense float32 from now on, under the same feedback, so that debts and momentum survive."""
        self.set("fp32", feedback=str(self._main.feedback))

    def _agree(self, spec: Spec, feedback: str | None, exchange: str | None, seed: int) -> Plan:
        shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        error, plan, said = None, None, ""
        try:
            rules = (*self._extra, *default_rules(spec, feedback, exchange, **self._default))
            plan = build(shapes, rules, self.link.world, self._launch_bytes)
            said = describe(rules)
            self._main = method(spec, feedback, exchange)
        except (ValueError, TypeError) as wrong:
            error = str(wrong)
        agree(self.link, f"{said}, seed {seed}", shapes, self.device, error)
        assert plan is not None
        self.spec = said
        return plan

    # -- what is kept ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's memories and step: plain tensors, keyed by parameter name."""
        self.ferry.land(self)
        return memory.save(self.session, self.spec)

    def load_state_dict(self, state: memory.State | Sequence[memory.State]) -> None:
        """Take over a state of this rank, or the list of all ranks' states when the world has changed."""
        self.ferry.land(self)
        states = [state] if isinstance(state, Mapping) else list(state)
        memory.load(self.session, states, self.spec)

    def debts(self) -> dict[str, Tensor]:
        """This rank's share of the pending update by name; its mean over ranks is still to be applied."""
        self.ferry.land(self)
        found = {}
        for lane, held in zip(self.session.plan.lanes, self.session.memories, strict=True):
            debt = lane.debt(held, self.link.rank, self.link.world)
            for (name, place), shape in zip(lane.slices.items(), lane.tensors.shapes, strict=True):
                found[name] = debt[place].view(shape)
        return found

    # -- what is shown ---------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """Bytes, ratios and seconds so far."""
        self.ferry.land(self)
        rules = {label: (self.session.said[label], dense) for label, dense in self._dense_bytes.items()}
        session = self.session
        return summarize(session.step, session.skipped, self.link.world, self.link.traffic, self.clock, rules)

    def account(self) -> None:
        for lane in self.session.plan.lanes:
            self._dense_bytes[lane.label] = self._dense_bytes.get(lane.label, 0) + 4 * lane.units.total

    def __str__(self) -> str:
        console = Console(width=120, no_color=True)
        with console.capture() as shown:
            console.print(self._table())
        return shown.get()

    def _table(self) -> Table:
        table = Table(title=f"gradwire, rank {self.link.rank} of {self.link.world}")
        for column in ("rule", "tensors", "units", "parameters", "codec", "feedback", "exchange", "bytes", "floats"):
            table.add_column(column, justify="left" if column in {"rule", "codec", "feedback", "exchange"} else "right")
        for lane, held in zip(self.session.plan.lanes, self.session.memories, strict=True):
            codec, exchange = lane.at(self.session.step)
            size = "-" if exchange.late else str(codec.size(lane.units))
            floats = sum(x.numel() for x in held.values()) / max(1, lane.units.total)
            said = "low rank" if exchange.late else " -> ".join(str(entry[1]) for entry in lane.table)
            numbers = (str(len(lane.tensors)), str(len(lane.units)), str(lane.units.total))
            table.add_row(lane.label, *numbers, said, str(lane.feedback), str(exchange), size, f"{floats:.2f}")
        table.caption = "bytes: the longest payload of a rank per step; floats: memory per parameter"
        return table


def describe(rules: Sequence[Rule]) -> str:
    """The rules as text that two ranks, or a run and its checkpoint, can compare."""
    return "; ".join(
        f"{rule.label}: {method(rule.spec, rule.feedback, rule.exchange)}, {rule.granularity}" for rule in rules
    )


def inherit(old: Session, new: Session) -> None:
    """Carry memories over by parameter name; a debt that has no memory of its own there is owed at the next step."""
    saved = memory.save(old, "")
    owed = {}
    for lane, held in zip(old.plan.lanes, old.memories, strict=True):
        debt = lane.debt(held, old.rank, old.world)
        owed.update({name: debt[place] for name, place in lane.slices.items()})
    for lane, held in zip(new.plan.lanes, new.memories, strict=True):
        for slot_name, slot in lane.slots(new.world).items():
            for name, span in memory.spans(slot, lane, new.rank, new.world).items():
                whole = saved.get(f"{slot_name}/{name}")
                if whole is not None and whole.numel() == span.length:
                    held[slot_name][span.live] = whole[span.own].to(new.device)
        left = torch.cat([owed[name] for name in lane.tensors.names]) - lane.debt(held, new.rank, new.world)
        if bool((left != 0).any()):
            held[OWED] = left


def save(wire: Wire, folder: str | Path) -> Path:
    """Write this rank's state into a folder that all ranks share, as safetensors."""
    path = Path(folder) / f"wire-{wire.link.rank}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(wire.state_dict(), partial)
    partial.replace(path)  # a reader sees the old state or the new one, never half of it
    return path


def load(wire: Wire, folder: str | Path) -> None:
    """Read the states that `save` wrote: one's own where the world is the same, else all of them."""
    first = Path(folder) / "wire-0.safetensors"
    if not first.exists():
        raise ValueError(f"{folder} holds no wire-0.safetensors; pass the folder that gradwire.save wrote")
    world = int(load_file(first)["gradwire/world"])
    ranks = [wire.link.rank] if world == wire.link.world else range(world)
    wire.load_state_dict([load_file(Path(folder) / f"wire-{rank}.safetensors") for rank in ranks])
