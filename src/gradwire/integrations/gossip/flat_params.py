"""A replica: a model's parameters as one flat vector, and the node that gossips them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradwire.codecs import Codec, Stage
from gradwire.codecs import codec as as_codec
from gradwire.core import Segments
from gradwire.engine.checkpoint import fingerprint_of
from gradwire.gossip import GossipMethod, Node, gossip_method
from gradwire.integrations.model import refuse_later, trainable

_SAVED = "float32/"  # opens the names of copies in a state
GRANULARITIES = ("layer", "model")
CodecSpec = str | Stage | Codec


class FlatParams:
    """The trainable parameters of a model as one float32 vector, and back; with or without its float buffers.

    A parameter of 16 bits cannot hold small corrections: added one by one, they would all be rounded away. So it has a
    float32 copy of what was last written, and is read as that copy plus how it has changed since.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.parameters = model, trainable(model.named_parameters())
        _refuse_float64(self.parameters)
        self.device = next(iter(self.parameters.values())).device
        self.tensors = Segments(tuple(self.parameters), tuple(tuple(p.shape) for p in self.parameters.values()))
        self.buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
        self._copies: dict[str, Tensor] = {}  # float32, of parameters with fewer bits that have been written

    def read(self) -> Tensor:
        """Parameters: a copy."""
        return _flatten(self._precise(), self.device)

    def write_(self, x: Tensor) -> None:
        _unflatten_(list(self.parameters.values()), x)
        parts = zip(self.parameters.items(), x.split(list(self.tensors.lengths)), strict=True)
        short = {name: (p, part) for (name, p), part in parts if p.element_size() < 4}
        self._copies = {name: part.detach().view(p.shape).clone() for name, (p, part) in short.items()}

    def read_buffers(self) -> Tensor:
        """Floating-point buffers: a copy."""
        return _flatten(list(self.buffers.values()), self.device)

    def read_all(self) -> Tensor:
        """Parameters, then floating-point buffers: a copy."""
        return torch.cat((self.read(), self.read_buffers()))

    def write_all_(self, x: Tensor) -> None:
        self.write_(x[: self.tensors.total])
        _unflatten_(list(self.buffers.values()), x[self.tensors.total :])

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Parameters and floating-point buffers are put back at the end, exactly, whatever their formats."""
        tensors, copies = [*self.parameters.values(), *self.buffers.values()], self._copies
        own = [x.detach().clone() for x in tensors]
        try:
            yield
        finally:
            self._copies = copies
            with torch.no_grad():
                for x, value in zip(tensors, own, strict=True):
                    x.copy_(value)

    def refuse_later(self) -> None:
        """Refuse a parameter that began to train later: it is not in the vector."""
        refuse_later(self.model, {id(p) for p in self.parameters.values()})

    def fingerprint(self) -> Tensor:
        return fingerprint_of(list(zip(self.tensors.names, self.tensors.shapes, strict=True)))

    # -- copies of parameters of 16 bits -------------------------------------------------------------------------------

    @property
    def floats_per_parameter(self) -> float:
        """How many float32 numbers are stored for each parameter."""
        return sum(copy.numel() for copy in self._copies.values()) / max(1, self.tensors.total)

    def save(self) -> dict[str, Tensor]:
        """The float32 copies, by parameter name."""
        return {f"{_SAVED}{name}": copy.clone().cpu() for name, copy in self._copies.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `save` returned. States of earlier versions have no copies; parameters are then read alone."""
        saved = {name: state[f"{_SAVED}{name}"] for name in self.parameters if f"{_SAVED}{name}" in state}
        self._copies = {name: copy.to(self.device, copy=True) for name, copy in saved.items()}

    def _precise(self) -> list[Tensor]:
        """Every parameter: where there is a copy, that copy and how the parameter differs from it when rounded."""
        read = []
        for name, p in self.parameters.items():
            copy = self._copies.get(name)
            own = p.detach()
            read.append(own if copy is None else copy + (own.to(copy) - copy.to(p.dtype).float()))
        return read


def _refuse_float64(parameters: Mapping[str, Tensor]) -> None:
    for name, p in parameters.items():
        if p.dtype == torch.float64:
            raise ValueError(
                f"the parameter {name!r} is float64, and replicas are mixed in float32, which would round it in every "
                "step; use model.float()"
            )


def _flatten(tensors: list[Tensor], device: torch.device) -> Tensor:
    return torch.cat([torch.zeros(0, device=device), *(x.detach().flatten().to(device).float() for x in tensors)])


def _unflatten_(tensors: list[Tensor], flat: Tensor) -> None:
    with torch.no_grad():
        for x, part in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
            x.copy_(part.view(x.shape))


@dataclass(frozen=True)
class GossipOptions:
    """What all ranks of a group must have in common; see `gossip` for each."""

    spec: str | GossipMethod
    codec: CodecSpec | None = None
    granularity: str = "layer"
    overlap: bool = False
    seed: int = 0

    def node(self, tensors: Segments, rank: int, world: int, elastic: bool = False) -> Node:
        """The gossip state of a rank.

        Raises:
            ValueError: The method, the codec, the graph and the options do not fit together.
        """
        method = gossip_method(self.spec)
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"granularity {self.granularity!r} is unknown; choose {' or '.join(GRANULARITIES)}")
        if method.compresses and self.codec is not None:
            raise ValueError(f"{method.name} compresses by itself; leave codec={str(self.codec)!r} out")
        codec = as_codec("fp32" if self.codec is None else self.codec)
        units = tensors if self.granularity == "layer" else tensors.merged()
        return Node(method, codec, method.graph.on(world), rank, self.seed, tensors, units, self.overlap, elastic)

    def describe(self, node: Node) -> str:
        """The method as text that two ranks, or a run and its checkpoint, can compare."""
        codec = "" if node.method.compresses else f", codec={node.codec}"
        overlap = ", overlap" if self.overlap else ""
        return f"{node.method}{codec}, {self.granularity}{overlap}"
