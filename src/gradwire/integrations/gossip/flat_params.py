"""A replica: a model's parameters as one flat vector, and the node that gossips them."""

import hashlib
import json

import torch
from torch import Tensor, nn

from gradwire.codecs import Codec
from gradwire.codecs import codec as as_codec
from gradwire.codecs.stage import Stage
from gradwire.core.segments import Segments
from gradwire.gossip import GossipMethod, Node, gossip_method
from gradwire.integrations.model import home, trainable

GRANULARITIES = ("layer", "model")
CodecSpec = str | Stage | Codec


class FlatParams:
    """The trainable parameters of a model as one float32 vector, and back; with or without its float buffers."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = trainable(model.named_parameters())
        self.device = home(self.parameters.values())
        self.tensors = Segments(tuple(self.parameters), tuple(tuple(p.shape) for p in self.parameters.values()))
        self.buffers = {
            name: buffer for name, buffer in model.named_buffers() if buffer is not None and buffer.is_floating_point()
        }

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
        shapes = list(zip(self.tensors.names, self.tensors.shapes, strict=True))
        return torch.tensor(list(hashlib.sha256(json.dumps(shapes).encode()).digest()[:8]), dtype=torch.uint8)


def _flatten(tensors: list[Tensor], device: torch.device) -> Tensor:
    return torch.cat([torch.zeros(0, device=device), *(x.detach().flatten().to(device).float() for x in tensors)])


def _unflatten_(tensors: list[Tensor], flat: Tensor) -> None:
    with torch.no_grad():
        for x, part in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
            x.copy_(part.view(x.shape))


def make_node(
    flat: FlatParams,
    spec: str | GossipMethod,
    codec: CodecSpec | None,
    rank: int,
    world: int,
    granularity: str,
    seed: int,
    overlap: bool = False,
    elastic: bool = False,
) -> Node:
    """A rank's node.

    Raises:
        ValueError: The method, the codec, the graph and the options do not fit together.
    """
    method = gossip_method(spec)
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity {granularity!r} is unknown; choose {' or '.join(GRANULARITIES)}")
    if method.compresses and codec is not None:
        raise ValueError(f"{method.name} compresses by itself; leave codec={str(codec)!r} out")
    chosen = as_codec("fp32" if codec is None else codec)
    units = flat.tensors if granularity == "layer" else flat.tensors.merged()
    topology = method.graph.on(world)
    return Node(method, chosen, topology, rank, seed, flat.tensors, units, overlap, elastic)


def handle_repr(handle: object, description: str, node: Node, step: int, rank: int | None = None) -> str:
    """A handle in one line, as print shows it; it waits for nothing."""
    where = "" if rank is None else f"rank {rank}, "
    return f"<{type(handle).__name__}: {description}; {node.topology}; {where}step {step}>"


def describe(node: Node, granularity: str) -> str:
    """The method as text that two ranks, or a run and its checkpoint, can compare."""
    codec = "" if node.method.compresses else f", codec={node.codec}"
    overlap = ", overlap" if node.overlap else ""
    return f"{node.method}{codec}, {granularity}{overlap}"
