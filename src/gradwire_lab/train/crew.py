"""Crew: the workers that live in this process, and how they agree.

After a step all workers hold the same parameters, so however many live here, they share one model: each has its own
gradients, compression memory and batch-norm statistics, and nothing else. One real rank is a crew of one.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.comm.collectives import AllReduceOp
from gradwire.engine import Lockstep
from gradwire.engine.chorus import Chorus
from gradwire.engine.drive import Conversation, timed
from gradwire.engine.session import Verdict
from gradwire.integrations import compress
from gradwire.integrations.model import refuse_sparse, trainable
from gradwire.integrations.simulated import SimulatedBackend, assemble
from gradwire.integrations.wire import Wire
from gradwire_lab.train.place import Place

Grads = dict[str, Tensor | None]


class Crew:
    """Workers of one process.

    Attributes:
        wires: One for each.
        buffers: What each keeps beside the parameters, by name: batch-norm statistics.
    """

    def __init__(
        self, model: nn.Module, place: Place, arguments: Mapping[str, Any], scaler: torch.amp.GradScaler | None
    ) -> None:
        self.model, self.place, self.scaler = model, place, scaler
        self._group = assemble(place.world, arguments["across"]) if place.virtual else None
        if self._group is None:
            self.wires = [compress(model, scaler=scaler, **arguments)]
        else:
            refuse_sparse(model)
            parameters = trainable(model.named_parameters())
            options = {name: value for name, value in arguments.items() if name not in ("spec", "across")}
            options["launch_bytes"] = int(options.pop("launch_mb") * 2**20)
            seats = (SimulatedBackend(self._group, rank) for rank in place.ranks)
            self.wires = [Wire(parameters, seat, arguments["spec"], **options) for seat in seats]
        self._chorus: Chorus | None = None
        self._homes = _homes(model)
        own = {name: _held(module, key) for name, (module, key) in self._homes.items()}
        self.buffers = [own, *(_copied(own) for _ in place.ranks[1:])]

    @property
    def wire(self) -> Wire:
        """The first worker's: what it counts stands for all."""
        return self.wires[0]

    def agree_(self, grads: Sequence[Grads]) -> None:
        """Exchange every worker's gradients, and leave what was agreed on in every ``p.grad``, scaled as the loss."""
        if self._group is None:
            self.wire.write_(self.wire.agree_on(grads[0]))
            return
        scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
        verdict = self._refused(grads) or self._in_unison(self._group, grads, 1.0 / scale)
        if verdict is None:
            talks = [wire.session.run(own, 1.0 / scale) for wire, own in zip(self.wires, grads, strict=True)]
            verdict = self._drive(self._group, talks)
        elif self.scaler is None:
            self._hand_over(verdict)
            return
        if self.scaler is not None:
            verdict = verdict._replace(
                updates={name: _rescaled(x, scale, verdict) for name, x in verdict.updates.items()}
            )
        self.wire.write_(verdict)

    def _refused(self, grads: Sequence[Grads]) -> Verdict | None:
        """A step that overflows, as a scaler expects of some; asked beforehand where it could not be dropped later."""
        if self.scaler is None or self.wire.session.rollback:
            return None
        if not any(wire.overflows(own) for wire, own in zip(self.wires, grads, strict=True)):
            return None
        for wire in self.wires:
            wire.session.skip()
        return Verdict({name: torch.zeros_like(p) for name, p in self.wire.parameters.items()}, skipped=True)

    def _hand_over(self, verdict: Verdict) -> None:
        """Give the optimizer what all sang: it is nobody else's, and need not be copied."""
        for name, update in verdict.updates.items():
            p = self.wire.parameters[name]
            p.grad = update.to(device=p.device, dtype=p.dtype)

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over all processes, off the account of bytes."""
        return numbers if self.place.virtual else self.wire.link.move(AllReduceOp(numbers, "sum"))

    # -- buffers ---------------------------------------------------------------------------------------------------

    def install(self, buffers: Mapping[str, Tensor]) -> None:
        """Let the model use these; the tensors themselves, not copies."""
        for name, (module, key) in self._homes.items():
            module._buffers[key] = buffers[name]

    def stacked_buffers(self) -> dict[str, Tensor]:
        """All workers' buffers by name, [workers, ...]; from now on, each worker's are rows of these."""
        stacked = {name: torch.stack([own[name] for own in self.buffers]) for name in self.buffers[0]}
        self.buffers = [{name: x[i] for name, x in stacked.items()} for i in range(len(self.buffers))]
        self.install(self.buffers[0])
        return stacked

    def shown_buffers(self, which: str) -> dict[str, Tensor]:
        """The statistics to evaluate with: the ``first`` rank's, or the ``average`` over all ranks.

        Counters, which are no floats, are always the first rank's.
        """
        shown = _copied(self.buffers[0])
        for name, mine in shown.items():
            if which == "average" and mine.is_floating_point():
                total = self.total(torch.stack([each[name].double() for each in self.buffers]).sum(0))
                shown[name] = (total / self.place.world).to(mine.dtype)
            elif not self.place.virtual:
                shown[name] = self.total(mine if self.place.first else torch.zeros_like(mine))
        return shown

    # -- the conversation of virtual workers -----------------------------------------------------------------------

    def _in_unison(self, group: Lockstep, grads: Sequence[Grads], unscale: float) -> Verdict | None:
        """All workers' step at once; None where that is not possible."""
        sessions = [wire.session for wire in self.wires]
        if self._chorus is None or any(a is not b for a, b in zip(self._chorus.sessions, sessions, strict=True)):
            self._chorus = Chorus(sessions, group)
        if not self._chorus.knows(grads):
            return None
        began = time.perf_counter()
        verdict = self._chorus.step(grads, unscale)
        self.wire.clock.encode += time.perf_counter() - began
        return verdict

    def _drive(self, group: Lockstep, talks: Sequence[Conversation[Verdict]]) -> Verdict:
        clock = self.wire.clock
        before = clock.encode + clock.decode
        began = time.perf_counter()
        verdict = group.drive([timed(talk, clock) for talk in talks])[0]
        clock.wire += time.perf_counter() - began - (clock.encode + clock.decode - before)
        return verdict


def _rescaled(update: Tensor, scale: float, verdict: Verdict) -> Tensor:
    """In units of the scaled loss; infinite where the step was dropped, which makes a GradScaler back off."""
    return torch.full_like(update, torch.inf) if verdict.skipped else update * scale


def _homes(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The modules that hold the buffers of a state dict, and under which key."""
    return {
        f"{prefix}.{key}" if prefix else key: (module, key)
        for prefix, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and key not in module._non_persistent_buffers_set
    }


def _held(module: nn.Module, key: str) -> Tensor:
    buffer = module._buffers[key]
    assert buffer is not None
    return buffer


def _copied(buffers: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in buffers.items()}
