"""A replica: a model's parameters as one flat vector, and the node that gossips them."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradwire.codecs import Codec, Stage
from gradwire.codecs import codec as as_codec
from gradwire.core import Segments
from gradwire.engine.checkpoint import fingerprint_of
from gradwire.gossip import GossipMethod, Node, gossip_method
from gradwire.integrations.model import trainable

GRANULARITIES = ("layer", "model")
CodecSpec = str | Stage | Codec


class FlatParams:
    """The trainable parameters of a model as one float32 vector, and back; with or without its float buffers."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = trainable(model.named_parameters())
        self.device = next(iter(self.parameters.values())).device
        self.tensors = Segments(tuple(self.parameters), tuple(tuple(p.shape) for p in self.parameters.values()))
        self.buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}

    def read(self) -> Tensor:
        return _flatten(list(self.parameters.values()), self.device)

    def write_(self, x: Tensor) -> None:
        _unflatten_(list(self.parameters.values()), x)

    def read_buffers(self) -> Tensor:
        """Floating-point buffers: a copy."""
        return _flatten(list(self.buffers.values()), self.device)

    def read_all(self) -> Tensor:
        """Parameters, then floating-point buffers: a copy."""
        return _flatten([*self.parameters.values(), *self.buffers.values()], self.device)

    def write_all_(self, x: Tensor) -> None:
        _unflatten_([*self.parameters.values(), *self.buffers.values()], x)

    def fingerprint(self) -> Tensor:
        return fingerprint_of(list(zip(self.tensors.names, self.tensors.shapes, strict=True)))


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
