"""Calibration: all that a forecast must know of a model and of the machine it runs on. A value, saved as JSON."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gradwire.forecast.software import FREE, Software

DENSE = ("ddp fp32", "ddp bf16")  # what everything is measured against: DistributedDataParallel as it comes


@dataclass(frozen=True)
class Cost:
    """Seconds of one rank in one step, the wire aside.

    Attributes:
        encode: Until messages are ready.
        decode: From what was heard to the update.
        per_peer: By how much decoding grows with every further rank.
        fill: Bytes sent over the most that could have been.
    """

    encode: float
    decode: float
    per_peer: float = 0.0
    fill: float = 1.0


@dataclass(frozen=True)
class Calibration:
    """Measured here, or assumed; ``note`` says which.

    Attributes:
        shapes: Of the parameters by name, in order of registration.
        forward: Seconds of all that is neither backward pass nor synchronization: forward pass, optimizer.
        backward: Seconds of the backward pass.
        costs: Of each way to synchronize, by spec; `DENSE` among them.
        ready: When in the backward pass each gradient is there, 0 to 1; by elements where it was not measured.
        cores: Processors for each worker.
        software: What collectives cost beyond the link.
        world: The number of ranks whose messages were decoded.
        note: Where the figures come from.
    """

    shapes: Mapping[str, tuple[int, ...]]
    forward: float
    backward: float
    costs: Mapping[str, Cost]
    ready: Mapping[str, float] = field(default_factory=dict)
    cores: float = 1.0
    software: Software = FREE
    world: int = 2
    note: str = ""

    @property
    def compute(self) -> float:
        return self.forward + self.backward

    @cached_property
    def elements(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    @cached_property
    def arrival(self) -> dict[str, float]:
        """When each gradient is there; without measurement, as if a weight took as long as any other."""
        if self.ready:
            return dict(self.ready)
        arrived, found = 0, {}
        for name in reversed(list(self.shapes)):
            arrived += math.prod(self.shapes[name])
            found[name] = arrived / self.elements
        return found

    def cost(self, spec: str, world: int) -> Cost:
        """What a spec costs in a world."""
        if spec not in self.costs:
            raise ValueError(f"{spec!r} was not calibrated; measured are {', '.join(self.costs) or 'none'}")
        known = self.costs[spec]
        return replace(known, decode=max(0.0, known.decode + known.per_peer * (world - self.world)))

    def scaled(self, compute: float = 1.0, codec: float = 1.0) -> "Calibration":
        """The same with other speeds, for asking what an error in the figures would change."""
        costs = {
            spec: replace(c, encode=c.encode * codec, decode=c.decode * codec, per_peer=c.per_peer * codec)
            for spec, c in self.costs.items()
        }
        return replace(self, forward=self.forward * compute, backward=self.backward * compute, costs=costs)


def save(calibration: Calibration, path: Path) -> None:
    """Write a calibration down."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(calibration)) + "\n", encoding="utf-8")


def load(path: Path) -> Calibration:
    """Read what `save` wrote.

    Raises:
        ValueError: It is none; the sentence names the file.
    """
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        shapes = {name: tuple(map(int, shape)) for name, shape in raw.pop("shapes").items()}
        costs = {spec: Cost(**cost) for spec, cost in raw.pop("costs").items()}
        return Calibration(shapes=shapes, costs=costs, software=Software(**raw.pop("software")), **raw)
    except OSError:
        raise ValueError(f"there is no calibration {path}; make one with `gradwire advise --save {path}`") from None
    except (ValueError, KeyError, TypeError, AttributeError) as wrong:
        raise ValueError(f"{path} holds no calibration ({wrong}); make one with `gradwire advise --save`") from None
