"""A replica: a model's parameters as one flat vector, and the node that gossips them."""

import hashlib
import json

import torch
from torch import Tensor, nn

from gradwire.codecs import Codec
from gradwire.codecs import codec as as_codec
from gradwire.codecs.stage import Stage
from gradwire.core.segments import Segments
from gradwire.gossip import Gossip, Node, gossip_method
from gradwire.integrations.model import home, trainable

GRANULARITIES = ("layer", "model")
CodecSpec = str | Stage | Codec


class Flat:
    """The trainable parameters of a model as one float32 vector, and back."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = trainable(model.named_parameters())
        self.device = home(self.parameters.values())
        self.tensors = Segments(tuple(self.parameters), tuple(tuple(p.shape) for p in self.parameters.values()))
        self.buffers = {
            name: buffer for name, buffer in model.named_buffers() if buffer is not None and buffer.is_floating_point()
        }

    def read(self) -> Tensor:
        return torch.cat([p.detach().flatten().to(self.device).float() for p in self.parameters.values()])

    def write_(self, x: Tensor) -> None:
        with torch.no_grad():
            for p, part in zip(self.parameters.values(), x.split(list(self.tensors.lengths)), strict=True):
                p.copy_(part.view(p.shape))

    def fingerprint(self) -> Tensor:
        shapes = list(zip(self.tensors.names, self.tensors.shapes, strict=True))
        return torch.tensor(list(hashlib.sha256(json.dumps(shapes).encode()).digest()[:8]), dtype=torch.uint8)


def make_node(
    flat: Flat,
    spec: str | Gossip,
    codec: CodecSpec | None,
    rank: int,
    world: int,
    granularity: str,
    seed: int,
    overlap: bool = False,
    elastic: bool = False,
) -> Node:
    """A rank's node, or a sentence that says why there is none."""
    method = gossip_method(spec)
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity {granularity!r} is unknown; choose {' or '.join(GRANULARITIES)}")
    if method.late and codec is not None:
        raise ValueError(f"{method.name} compresses by itself; leave codec={str(codec)!r} out")
    chosen = as_codec("fp32" if codec is None else codec)
    units = flat.tensors if granularity == "layer" else flat.tensors.merged()
    topology = method.graph.on(world)
    return Node(method, chosen, topology, rank, seed, flat.tensors, units, overlap, elastic)


def show(kind: str, said: str, node: Node, step: int, rank: int | None = None) -> str:
    """A net in one line, as print shows it; it waits for nothing."""
    who = "" if rank is None else f"rank {rank}, "
    return f"<{kind}: {said}; {node.topology}; {who}step {step}>"


def describe(node: Node, granularity: str) -> str:
    """The method as text that two ranks, or a run and its checkpoint, can compare."""
    said = "" if node.method.late else f", codec={node.codec}"
    late = ", overlap" if node.overlap else ""
    return f"{node.method}{said}, {granularity}{late}"
