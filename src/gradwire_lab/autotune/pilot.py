"""Pilot: ``auto``. Decides, while a model trains, whether and how its gradients are compressed.

The first steps are dense. Then every rank knows how long a step takes, how much of that is waiting for the network,
and, after a short rehearsal of what might be faster, what compressing would cost here. The ranks share these figures,
so all decide alike, by the same costs as ``gradwire advise``. What was chosen is on trial for some steps: where it is
not faster than the dense steps were, dense training goes on. Under DDP, dense is DDP's own all-reduce, with no hook of
ours in its way unless there was one before.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.comm.alphabeta import seconds as collective_seconds
from gradwire.comm.backend import Backend
from gradwire.comm.collectives import AllReduceOp
from gradwire.comm.emulated import EmulatedBackend
from gradwire.comm.host_backend import HostBackend
from gradwire.comm.host_layout import seated
from gradwire.comm.rates import LinkSpec
from gradwire.engine import memory
from gradwire.engine.plan import default_rules
from gradwire.engine.session import Grads, Verdict
from gradwire.integrations.ddp import DDPHookState, attach
from gradwire.integrations.report import Report
from gradwire.integrations.wire import Wire, describe
from gradwire_lab.perf_model.advice import ENOUGH, Predict, advise
from gradwire_lab.perf_model.calibration import Calibration, Cost
from gradwire_lab.perf_model.candidates import automatic
from gradwire_lab.perf_model.cluster import Cluster, steady
from gradwire_lab.perf_model.costs import predict, predict_across
from gradwire_lab.perf_model.evidence import sound
from gradwire_lab.perf_model.model import DENSE, Model
from gradwire_lab.perf_model.probe import delay_of, fitting
from gradwire_lab.perf_model.rehearsal import rehearse

WARMUP = 3  # steps that do not count: DDP rebuilds its buckets, kernels compile
MEASURED = 5  # steps whose median counts
REHEARSED = 4  # candidates at most that are worth a pause


@dataclass(frozen=True)
class Decision:
    """What was decided at a step, and why."""

    step: int
    spec: str
    why: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.spec}, {self.why}"


@dataclass(frozen=True)
class Seen:
    """The median step, in seconds, of the slowest rank."""

    period: float
    backward: float
    exposed: float
    comm: float


class AutoWire(Wire):
    """A wire that chooses its spec by itself.

    Attributes:
        decisions: All so far.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        link: Backend,
        ddp: DistributedDataParallel | None,
        described: LinkSpec | None,
        **options: Any,
    ) -> None:
        self._ddp = ddp
        self._described = None if described is None else steady(described)
        super().__init__(parameters, link, "fp32", hooked=ddp is not None, **options)
        self.decisions: list[Decision] = []
        self._courier: DDPHookState | None = None
        self._chosen = "fp32"
        self._halves = False
        self._steps = 0
        self._dense_seconds = 0.0
        self._periods: list[Seen] = []
        self._last: float | None = None
        self._stage = self._weigh
        self._wanted = WARMUP + MEASURED
        self._begin()

    def _begin(self) -> None:
        if self.link.world < 2:
            self._conclude("fp32", "there is nobody to talk to")
        elif self._ddp is not None:
            if self._pretends:  # DDP's own all-reduces would not notice how thin it is
                self._courier = attach(self, self._ddp)
            self._ddp._set_ddp_runtime_logging_sample_rate(1)
            ahead = torch.compiler.disable(self._ahead) if "torch._dynamo" in sys.modules else self._ahead
            self._handle = self._ddp.register_forward_pre_hook(ahead)

    @property
    def decided(self) -> bool:
        """Whether it has made up its mind."""
        return self._wanted == 0

    def __str__(self) -> str:
        said = [f"auto: {decision}" for decision in self.decisions] or ["auto: still measuring dense steps"]
        return "\n".join((super().__str__().rstrip(), *said, *filter(None, [self._unseen]), ""))

    def report(self) -> Report:
        """Bytes, ratios and seconds so far, of the steps that did not go by DDP's own sums."""
        return replace(super().report(), note=self._unseen)

    @property
    def _unseen(self) -> str:
        """What is said of steps that DDP takes without us."""
        if self._ddp is None or self.link.world < 2 or self._pretends:
            return ""
        plain = Model.of(self.parameters).format if self._courier is None else self._courier.plain
        if plain is None:
            return "the dense steps before were DDP's own, and are not in this account" if self._steps else ""
        return (
            f"DDP adds gradients up by itself, in {str(plain).removeprefix('torch.')}, and this account has none of it"
        )

    # -- watching --------------------------------------------------------------------------------------------------

    def agree_on(self, grads: Grads, patient: bool = False) -> Verdict:
        if self._ddp is not None or self.decided:
            return super().agree_on(grads, patient)
        began = self._now()
        verdict = super().agree_on(grads, patient)
        ended = self._now()
        if self._last is not None:
            self._periods.append(Seen(ended - self._last, began - self._last, ended - began, ended - began))
        self._steps += 1
        self._consider()
        self._last = self._now()
        return verdict

    def _ahead(self, module: nn.Module, inputs: object) -> None:
        """DDP is about to begin a step, on all ranks."""
        ddp = self._ddp
        assert ddp is not None
        if self.decided or not (ddp.training and torch.is_grad_enabled() and ddp.require_backward_grad_sync):
            return
        now = self._now()
        if self._last is not None:
            self._steps += 1
            self._periods.append(self._logged(ddp, now - self._last))
        self._consider()
        self._last = self._now()

    def _logged(self, ddp: DistributedDataParallel, period: float) -> Seen:
        """What DDP itself noted of its last step, in nanoseconds."""
        told = ddp._get_ddp_logging_data()
        compute, comm, overlap = (
            told.get(f"backward_{name}_time", 0) / 1e9 for name in ("compute", "comm", "compute_comm_overlap")
        )
        exposed = min(max(0.0, comm - overlap), 0.99 * period)
        backward = min(compute, period - exposed) or (period - exposed) * 2 / 3
        return Seen(period, backward, exposed, comm)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _consider(self) -> None:
        if len(self._periods) == self._wanted > 0:
            seen, self._periods = self._periods[-MEASURED:], []
            columns = zip(*((one.period, one.backward, one.exposed, one.comm) for one in seen), strict=True)
            self._stage(Seen(*self._agreed_on([median(column) for column in columns])))

    def _agreed_on(self, mine: Sequence[float]) -> list[float]:
        """The largest of all ranks' figures: the same everywhere, so that all decide alike."""
        told = torch.tensor(list(mine), dtype=torch.float64, device=self.link.device)
        found: list[float] = self.link.move(AllReduceOp(told, "max")).tolist()
        return found

    # -- deciding --------------------------------------------------------------------------------------------------

    def _weigh(self, seen: Seen) -> None:
        """After the dense steps: is there anything that pays?"""
        self._dense_seconds = seen.period
        model = Model.of(self.parameters)
        forward = max(0.0, seen.period - seen.backward - seen.exposed)
        cluster = self._cluster(model, seen)
        free = {spec: Cost(0.0, 0.0) for spec in (*DENSE[:2], *sound(automatic()))}
        calibration = Calibration(model, forward, seen.backward, free, self._cores(), world=self._parties)
        self._halves = seen.exposed > 2 * (1 - ENOUGH) * seen.period and len(model.dense) > 1
        promising = self._promising(calibration, cluster, seen)
        if not promising:
            self._halve(f"no way to compress would beat {_ms(seen.period)} a step, even if it cost nothing")
            return
        costs = {**{spec: free[spec] for spec in DENSE[:2]}, **self._rehearsed(model, promising)}
        self._choose(replace(calibration, costs=costs), cluster)

    def _promising(self, calibration: Calibration, cluster: Cluster, seen: Seen) -> list[str]:
        ways = [self._predict(calibration, spec, cluster) for spec in sound(automatic())]
        fast = sorted((way for way in ways if way.seconds < ENOUGH * seen.period), key=lambda way: way.seconds)
        return [way.spec for way in fast[:REHEARSED]]

    def _rehearsed(self, model: Model, specs: Sequence[str]) -> dict[str, Cost]:
        draw = torch.Generator().manual_seed(0)
        grads = {name: torch.randn(p.shape, generator=draw).to(p) for name, p in self.parameters.items()}
        found = [rehearse(model.plan(spec, self._parties, self._launch_bytes), grads, repeats=2) for spec in specs]
        shared = iter(self._agreed_on([seconds for one in found for seconds in (one.encode, one.decode)]))
        return {spec: Cost(next(shared), next(shared)) for spec in specs}

    def _choose(self, calibration: Calibration, cluster: Cluster) -> None:
        choice = advise(calibration, cluster, sound(automatic()), self._predict).trial
        if choice.spec in DENSE or choice.seconds > ENOUGH * self._dense_seconds:
            self._halve(f"no way to compress is surely faster than {_ms(self._dense_seconds)} a step")
            return
        self._try(choice.spec, f"on trial: {_ms(choice.seconds)} a step expected, {_ms(self._dense_seconds)} dense")

    def _halve(self, why: str) -> None:
        """Dense it is; in bfloat16, if float32 waits long enough for the network to make that worth a trial."""
        if self._halves:
            self._halves = False
            self._try("bf16", f"{why}; on trial")
        else:
            self._conclude("fp32", why)

    def _try(self, spec: str, why: str) -> None:
        """Go on in another way, from this step on."""
        self._chosen = spec
        if self._ddp is not None and self._courier is None:
            self._courier = attach(self, self._ddp)
        if spec == "bf16" and self._bypasses:
            self._courier.plain = torch.bfloat16  # type: ignore[union-attr]
        else:
            self.set(spec)
        self._decide(self._trial, WARMUP + MEASURED, why)

    def _trial(self, seen: Seen) -> None:
        """After some steps in the chosen way: did it keep its promise?"""
        why = f"{_ms(seen.period)} a step measured, {_ms(self._dense_seconds)} dense"
        if seen.period < ENOUGH * self._dense_seconds:
            self._conclude(self._chosen, why)
        elif self._chosen == "bf16":
            self._conclude("fp32", f"back to float32: {why}")
        else:
            self.off()  # for one step, in which all that is owed is paid
            self._chosen = "fp32"
            self._decide(self._paid, 1, f"back to dense: {why}")

    def _paid(self, seen: Seen) -> None:
        self._halve("nothing is owed any more")

    def _decide(self, stage: Any, wanted: int, why: str) -> None:
        self._stage, self._wanted = stage, wanted
        self.decisions.append(Decision(self._steps, self._chosen, why))

    def _conclude(self, spec: str, why: str) -> None:
        """The end of all measuring."""
        self._chosen = spec
        self._decide(self._paid, 0, why)
        if self.link.world < 2:
            return
        if self._ddp is not None:
            self._handle.remove()
            self._ddp._set_ddp_runtime_logging_sample_rate(100)
        if spec != "fp32" or len(self.decisions) == 1:
            return
        if self._bypasses:
            self._courier.plain = Model.of(self.parameters).format  # type: ignore[union-attr]
        else:
            self.set("fp32", feedback="none")

    @property
    def _bypasses(self) -> bool:
        """Whether dense gradients travel as DDP sends them."""
        return self._courier is not None and not self._pretends

    # -- what is kept ----------------------------------------------------------------------------------------------

    def load_state_dict(self, state: memory.State | Sequence[memory.State]) -> None:
        """Go on in the way that was chosen by whoever saved; from a dense state, measure anew."""
        one = state if isinstance(state, Mapping) else next(iter(state))
        spec = self._chosen_by(bytes(one["gradwire/spec"].tolist()).decode())
        if spec is not None and not self.decided:
            self._try(spec, "it was chosen before")
            self._conclude(spec, "it was chosen before")
        super().load_state_dict(state)

    def _chosen_by(self, said: str) -> str | None:
        """Which of the candidates a saved wire had taken, if any."""
        rules = {spec: (*self._extra, *default_rules(spec, **self._default)) for spec in ("bf16", *automatic())}
        return next((spec for spec, those in rules.items() if describe(those) == said), None)

    # -- circumstances ---------------------------------------------------------------------------------------------

    @property
    def _pretends(self) -> bool:
        """Whether what is carried takes longer than it would by itself, which DDP's own sums would not."""
        way = self.link.between if isinstance(self.link, HostBackend) else self.link
        return isinstance(way, EmulatedBackend)

    def _circumstances(self, seed: int) -> str:
        said = "" if self._described is None else f"; a link of {self._described}"
        return super()._circumstances(seed) + said

    @property
    def _predict(self) -> Predict:
        across = self.link.grouping is not None
        overlaps = self._ddp is not None and self.scaler is None

        def predicted(calibration: Calibration, spec: str, cluster: Cluster) -> Any:
            way = predict_across if across else predict
            return way(calibration, spec, cluster, overlaps, (self._launch_bytes,))

        return predicted

    def _cluster(self, model: Model, seen: Seen) -> Cluster:
        beside = 1 if self.link.grouping is None else self.link.grouping.beside
        link = self._described or fitting(seen.comm, delay_of(self.link), partial(self._summing, model))
        return Cluster(self.link.world, link, beside)

    def _summing(self, model: Model, link: LinkSpec) -> float:
        """How long the dense sums of a step take on a link: DDP's own, or those of this wire."""
        own = self._ddp is None or self._courier is not None
        spec, world = ("fp32", self._parties) if own else (DENSE[0], self.link.world)
        parcels = model.parcels(spec, world, self._launch_bytes)
        sums = (message.nbytes for parcel in parcels for message in parcel.scene.messages)
        return sum(collective_seconds("all_reduce", nbytes, world, link) for nbytes in sums)

    def _cores(self) -> float:
        """Processors for each thread that computes, on the host that has fewest; all ranks ask at once."""
        return -self._agreed_on([-_cores(self.device)])[0]


def _cores(device: torch.device) -> float:
    """The same on this host; a GPU does one thing after the other."""
    if device.type == "cuda":
        return 1.0
    place = seated(os.environ)
    beside = place[1] if place is not None else 1
    return (os.cpu_count() or 1) / beside / torch.get_num_threads()


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"
