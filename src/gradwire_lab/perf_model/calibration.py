"""Calibration: all that a forecast must know of a model and of the machine it runs on. A value, saved as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gradwire_lab.perf_model.model import ModelProfile
from gradwire_lab.perf_model.software import FREE, Software


@dataclass(frozen=True)
class CodingCost:
    """Seconds of one rank in one step, the wire aside.

    Attributes:
        encode: Until messages are ready.
        decode: From the received messages to the update.
        per_peer: By how much decoding grows with every further rank.
        fill: Bytes sent over the most that could have been.
        start: Further seconds of every bucket, however small.
    """

    encode: float
    decode: float
    per_peer: float = 0.0
    fill: float = 1.0
    start: float = 0.0

    def share(self, of: float) -> "CodingCost":
        """Of a part of the model; a bucket starts as usual."""
        return CodingCost(self.encode * of, self.decode * of, self.per_peer, self.fill, self.start)

    def scaled(self, by: float) -> "CodingCost":
        """The same at another speed."""
        return CodingCost(self.encode * by, self.decode * by, self.per_peer * by, self.fill, self.start * by)


@dataclass(frozen=True)
class Calibration:
    """Measured here, or assumed; ``note`` says which.

    Attributes:
        model: Its tensors.
        forward: Seconds of all that is neither backward pass nor synchronization: forward pass, optimizer.
        backward: Seconds of the backward pass.
        costs: Of each way to synchronize, by spec; `DENSE` among them.
        cores: Processors for each worker.
        software: What collectives cost beyond the link.
        world: The number of ranks whose messages were decoded.
        note: Where the figures come from.
    """

    model: ModelProfile
    forward: float
    backward: float
    costs: Mapping[str, CodingCost]
    cores: float = 1.0
    software: Software = FREE
    world: int = 2
    note: str = ""

    @property
    def compute(self) -> float:
        return self.forward + self.backward

    def cost(self, spec: str, world: int) -> CodingCost:
        """What a spec costs in a world."""
        if spec not in self.costs:
            raise ValueError(f"{spec!r} was not calibrated; measured are {', '.join(self.costs) or 'none'}")
        known = self.costs[spec]
        return replace(known, decode=max(0.0, known.decode + known.per_peer * (world - self.world)))

    def scaled(self, compute: float = 1.0, codec: float = 1.0) -> "Calibration":
        """The same with other speeds, for asking what an error in the figures would change."""
        costs = {spec: cost.scaled(codec) for spec, cost in self.costs.items()}
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
        model = raw.pop("model")
        shapes = {name: tuple(map(int, shape)) for name, shape in model["shapes"].items()}
        costs = {spec: CodingCost(**cost) for spec, cost in raw.pop("costs").items()}
        software = Software(**raw.pop("software"))
        described = ModelProfile(shapes, model["arrival"], model.get("dtype", "float32"))
        return Calibration(described, costs=costs, software=software, **raw)
    except OSError:
        raise ValueError(f"there is no calibration {path}; make one with `gradwire advise --save {path}`") from None
    except (ValueError, KeyError, TypeError, AttributeError) as wrong:
        raise ValueError(f"{path} holds no calibration ({wrong}); make one with `gradwire advise --save`") from None
