"""Hierarchical: the ranks of a host take the mean of their gradients, and speak to other hosts as one.

    inward     each rank hands every mate its gradients of what that mate serves, who takes their mean: dense
    across     each tells its counterparts on other hosts about its share, as one rank a host would: compressed
    outward    each hands its mates what was agreed on: dense

So no link between hosts lies idle, each rank of a host of L has 1/L of the work and of the memories, and the outcome is
what single ranks would agree on who had the hosts' mean gradients. What is heard of a share, complaints included, is
passed on to all mates, so all ranks of all hosts come to the same verdict.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gradwire.codecs import codec
from gradwire.codecs.selectors import Variance
from gradwire.codecs.stage import Memory
from gradwire.comm.host_layout import HostLayout
from gradwire.core.payload import Payload, as_bytes, from_bytes
from gradwire.core.requests import Max, Scope, SendRecv, Sum
from gradwire.engine.complaint import MISSING, UNFIT
from gradwire.engine.drive import Conversation
from gradwire.engine.lane import OBSERVED, Lane
from gradwire.engine.method import Method, method
from gradwire.engine.plan import Plan, Rule
from gradwire.engine.session import Grads, Heard, Places, Session, Verdict
from gradwire.engine.shares import Owners, share
from gradwire.exchanges import Auto, Delayed

T = TypeVar("T")
LOCAL: Scope = "local"


class Mean(NamedTuple):
    """What a host knows of one launch's gradients, for the share of one of its ranks."""

    grads: dict[str, Tensor | None]
    complaint: int


class Told(NamedTuple):
    """What the mates have told each other of a launch: all its updates, and, of late ones, what the next will be."""

    grads: dict[str, Tensor | None]
    updates: dict[str, Tensor]
    late: dict[str, Tensor]


class HierarchicalSession(Session):
    """One rank's share of what its host says. `rank` and `world` are the host's number and the number of hosts.

    Attributes:
        plan: What this rank serves.
        shares: What each rank of the host serves.
    """

    def __init__(
        self,
        whole: Plan,
        owned: Owners,
        grouping: HostLayout,
        rank: int,
        seed: int,
        device: torch.device,
        rollback: bool = True,
    ) -> None:
        host, self.local = grouping.seat(rank)
        self.beside = grouping.beside
        self._whole = whole
        self.shares = [share(whole, owned, local) for local in range(self.beside)]
        self._moments: dict[str, Tensor] = {}
        super().__init__(self.shares[self.local], host, len(grouping.hosts), seed, device, rollback)
        self._late = {
            name: torch.zeros(n, device=device)
            for i, served in enumerate(self.shares)
            for lane in served.lanes
            for name, n in zip(lane.tensors.names, lane.tensors.lengths, strict=True)
            if i != self.local and self._is_late(lane)
        }

    @property
    def whole(self) -> Plan:
        return self._whole

    def donate(self) -> None:
        """Gradients travel inside the host first: there is nothing to gain."""

    def run(self, grads: Grads, unscale: float = 1.0) -> Conversation[Verdict]:
        """A whole step. Clipping looks at the host's whole gradient, so all of it comes in before any goes out."""
        launches = range(len(self.plan.launches))
        means = []
        for i in launches:
            means.append((yield from self._inward(i, grads)))
        factor = yield from self._clip(means, unscale)
        if self.clips:
            self._shrink_observed(factor / unscale)
        heard = []
        for i in launches:
            heard.append((yield from self._outward(i, means[i], factor)))
        return (yield from self.judge(heard, grads))

    def launch(
        self,
        i: int,
        grads: Grads,
        factor: float = 1.0,
        told: int = 0,
        places: Places | None = None,
        room: Sequence[Memory] = (),
    ) -> Conversation[Heard]:
        del places, room  # they are this rank's, and not its host's
        mean = yield from self._inward(i, grads)
        return (yield from self._outward(i, mean._replace(complaint=mean.complaint | told), factor))

    def judge(self, heard: Sequence[Heard], grads: Grads) -> Conversation[Verdict]:
        complaints = 0
        mine: dict[str, Tensor | None] = {}
        for launch in heard:
            complaints |= launch.complaints
            mine |= launch.aside.grads
        alike = [launch._replace(complaints=complaints) for launch in heard]
        verdict = yield from among_hosts(super().judge(alike, grads if complaints & UNFIT else mine))
        if self.beside == 1:
            return verdict
        updates = {name: x for launch in heard for name, x in launch.aside.updates.items()}
        if verdict.skipped:
            return Verdict({name: torch.zeros_like(x) for name, x in updates.items()}, True)
        if complaints & MISSING:
            updates = yield from self._used_anywhere(updates, verdict)
        late = {name: x for launch in heard for name, x in launch.aside.late.items()}
        self._late |= {name: x for name, x in late.items() if name in updates and name in self._late}
        return Verdict(updates, False)

    # -- inward --------------------------------------------------------------------------------------------------------

    def _inward(self, i: int, grads: Grads) -> Conversation[Mean]:
        """Give away the gradients of others' shares, and take the mean of my own."""
        if self.beside == 1:
            return Mean({name: grads[name] for lane in self.plan.launches[i] for name in lane.tensors.names}, 0)
        letters = {mate: self._gradients(self.shares[mate].launches[i], grads) for mate in range(self.beside)}
        size = letters[self.local].nbytes
        (heard,) = yield [SendRecv(letters, dict.fromkeys(letters, size), LOCAL)]
        return self._mean(i, [heard[mate] for mate in letters])

    def _gradients(self, lanes: Sequence[Lane], grads: Grads) -> Payload:
        """My gradients of some lanes; which there are; whether one is none that can be compressed; what I observed."""
        names = [name for lane in lanes for name in lane.tensors.names]
        sparse = any(grad is not None and grad.layout != torch.strided for grad in map(grads.__getitem__, names))
        tested = [name for lane in lanes if self._tests_variance(lane) for name in lane.tensors.names]
        sizes = {name: n for lane in lanes for name, n in zip(lane.tensors.names, lane.tensors.lengths, strict=True)}
        seen = [name in self._moments for name in tested]
        moments = [self._moments.pop(name, torch.zeros(sizes[name], device=self.device)) for name in tested]
        flats = [self.flat(lane, grads, 1.0) for lane in lanes]
        present = [grads[name] is not None for name in names]
        return _letter([*flats, *moments], [*present, UNFIT if sparse else 0, any(seen)], self.device)

    def _mean(self, i: int, heard: Sequence[Payload]) -> Mean:
        """The mean of what the mates sent, added in their order."""
        lanes = self.plan.launches[i]
        names = [name for lane in lanes for name in lane.tensors.names]
        tested = [k for k, lane in enumerate(lanes) if self._tests_variance(lane)]
        sizes = [lane.tensors.total for lane in lanes] + [lanes[k].tensors.total for k in tested]
        total, notes = _read(heard[0], sum(sizes))
        for payload in heard[1:]:
            x, more = _read(payload, sum(sizes))
            total, notes = total + x, torch.maximum(notes, more)
        *present, complaint, observed = notes.tolist()
        parts = total.split(sizes)
        if observed:
            for k, moments in zip(tested, parts[len(lanes) :], strict=True):
                # The host's gradient is the mean of its ranks', so each sample weighs 1 / beside of what it did.
                self.memories_of(i)[k][OBSERVED] = moments / self.beside**2
        grads = _by_name(lanes, [part / self.beside for part in parts[: len(lanes)]])
        known = {name: grads[name] if there else None for name, there in zip(names, present, strict=True)}
        return Mean(known, complaint)

    def _clip(self, means: Sequence[Mean], unscale: float) -> Conversation[float]:
        mine = {name: grad for mean in means for name, grad in mean.grads.items()}
        if self.beside == 1 or not self.clips:
            return self.clip_factor(mine, unscale)
        squares = [grad.double().square().sum() for grad in mine.values() if grad is not None]
        own = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=self.device)
        (square,) = yield [Sum(own[None], LOCAL)]
        return self.clip_factor({"": square.sqrt()}, unscale)

    def observe(self, moments: Mapping[str, Tensor]) -> None:
        """Keep measured second moments until the next step tells them to those who need them."""
        if self.beside == 1:
            super().observe(moments)
            return
        self._check_moments(moments)
        for name, moment in moments.items():
            flat = moment.detach().flatten().to(self.device).float()
            self._moments[name] = self._moments[name] + flat if name in self._moments else flat.clone()

    def skip(self) -> None:
        super().skip()
        self._moments.clear()

    # -- across and outward --------------------------------------------------------------------------------------------

    def _outward(self, i: int, mean: Mean, factor: float) -> Conversation[Heard]:
        """Agree with the other hosts on my share, and with my mates on all."""
        heard = yield from among_hosts(super().launch(i, mean.grads, factor, mean.complaint))
        if self.beside == 1:
            return heard._replace(aside=Told(mean.grads, {}, {}))
        lanes = self.plan.launches[i]
        agreed = [
            one.memory["pending"] if self._is_late(lane) else one.update
            for lane, one in zip(lanes, heard.released, strict=True)
        ]
        letter = _letter(agreed, [heard.complaints], self.device)
        sizes = {mate: sum(lane.tensors.total for lane in self.shares[mate].launches[i]) for mate in range(self.beside)}
        (told,) = yield [SendRecv(dict.fromkeys(sizes, letter), {mate: 4 * n + 1 for mate, n in sizes.items()}, LOCAL)]
        said: list[int] = torch.cat([letter.data[-1:] for letter in told.values()]).tolist()
        updates: dict[str, Tensor] = {}
        late: dict[str, Tensor] = {}
        for mate, n in sizes.items():
            numbers, _ = _read(told[mate], n)
            served = self.shares[mate].launches[i]
            for lane, part in zip(served, numbers.split([lane.tensors.total for lane in served]), strict=True):
                (late if self._is_late(lane) else updates).update(_by_name([lane], [part]))
        if late:
            before = self.pending
            updates |= {name: before[name].view(x.shape) for name, x in late.items()}
        fresh = {name: x.flatten() for name, x in late.items()}
        return Heard(heard.released, reduce(or_, said), Told(mean.grads, updates, fresh))

    def _used_anywhere(self, updates: Mapping[str, Tensor], mine: Verdict) -> Conversation[dict[str, Tensor]]:
        """The updates of parameters that any rank of any host has a gradient for."""
        flags = torch.tensor([name in mine.updates for name in updates], dtype=torch.int32, device=self.device)
        (flags,) = yield [Max(flags, LOCAL)]
        used = dict(zip(updates, map(bool, flags.tolist()), strict=True))
        super()._check_used(used)
        return {name: x for name, x in updates.items() if used[name]}

    def _check_used(self, used: Mapping[str, bool]) -> None:
        if self.beside == 1:  # else mates, who serve others, must hear of it first
            super()._check_used(used)

    # -- what is late, and what is kept --------------------------------------------------------------------------------

    @property
    def pending(self) -> dict[str, Tensor]:
        return {**super().pending, **self._late}

    @property
    def facts(self) -> dict[str, Tensor]:
        if self.beside == 1:
            return {}
        seat = {"gradwire/local": torch.tensor(self.local), "gradwire/beside": torch.tensor(self.beside)}
        return {**seat, **{f"pending/{name}": x.clone().cpu() for name, x in self._late.items()}}

    def recall(self, state: Mapping[str, Tensor]) -> None:
        for name in self._late:
            if f"pending/{name}" in state:
                self._late[name] = state[f"pending/{name}"].clone().to(self.device)

    def _is_late(self, lane: Lane) -> bool:
        return isinstance(lane.at(self.step)[1], Delayed)

    def _tests_variance(self, lane: Lane) -> bool:
        return isinstance(lane.at(self.step)[0].selector, Variance)


def uncompressed(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """The same rules where there is no other host to speak to: float32, under the same feedback.

    Nothing is lost, so nothing will be owed; what is owed already is paid at once.
    """
    return tuple(_uncompressed(rule) for rule in rules)


def _uncompressed(rule: Rule) -> Rule:
    whole = method(rule.spec, rule.feedback, rule.exchange)
    exchange = Delayed() if isinstance(whole.exchange, Delayed) else Auto()
    dense = Method(((0, codec("fp32")),), whole.feedback, exchange)
    return replace(rule, spec=dense, feedback=None, exchange=None)


def among_hosts(conversation: Conversation[T]) -> Conversation[T]:
    """The same conversation, held among counterparts."""
    answers: Any = None
    try:
        while True:
            asks = conversation.send(answers)
            answers = yield [replace(ask, scope="across") for ask in asks]
    except StopIteration as done:
        result: T = done.value
        return result


def _letter(numbers: Sequence[Tensor], notes: Sequence[int], device: torch.device) -> Payload:
    """Float32 numbers, and a few small ones."""
    tail = torch.tensor([int(note) for note in notes], dtype=torch.uint8, device=device)
    return Payload(torch.cat([*(as_bytes(x) for x in numbers), tail]))


def _read(letter: Payload, n: int) -> tuple[Tensor, Tensor]:
    return from_bytes(letter.data[: 4 * n], torch.float32), letter.data[4 * n :]


def _by_name(lanes: Sequence[Lane], flats: Sequence[Tensor]) -> dict[str, Tensor]:
    return {
        name: flat[place].view(shape)
        for lane, flat in zip(lanes, flats, strict=True)
        for (name, place), shape in zip(lane.slices.items(), lane.tensors.shapes, strict=True)
    }
