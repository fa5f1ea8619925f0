"""Extend: all that authors of codecs, feedbacks and exchanges need, under one stable name.

Names here are public: they change with a warning for one release, whatever happens behind them.

    from gradwire.extend import Quantizer, Traits, register, roundtrip
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec, codec
from gradwire.codecs.stage import (
    Decoded,
    EncodeInput,
    IndexCoder,
    Memory,
    Quantizer,
    Selector,
    Stage,
    StateSpec,
    Transform,
)
from gradwire.core.keys import Key
from gradwire.core.payload import CorruptMessageError, Payload, as_bytes, from_bytes
from gradwire.core.registry import register, registered
from gradwire.core.requests import CommGenerator, Gather, Max, SendRecv, Sum
from gradwire.core.segments import Segments
from gradwire.core.traits import Traits
from gradwire.exchanges.batch import RankBatch, Simulated, blank, sizes_of, stacked, starts_of
from gradwire.exchanges.exchange import Aggregate, CommContext, Exchange, Message
from gradwire.exchanges.servers import SERVER_ERROR, server_slice
from gradwire.feedback.feedback import Feedback
from gradwire.kernels.bits import pack, packed_bytes, unpack
from gradwire.kernels.groups import blocks_of, largest, num_blocks, spread
from gradwire.kernels.philox import uniform

__all__ = [
    "SERVER_ERROR",
    "Aggregate",
    "Codec",
    "CommContext",
    "CommGenerator",
    "CorruptMessageError",
    "Decoded",
    "EncodeInput",
    "Exchange",
    "Feedback",
    "Gather",
    "IndexCoder",
    "Key",
    "Max",
    "Memory",
    "Message",
    "Payload",
    "Quantizer",
    "RankBatch",
    "Roundtrip",
    "Segments",
    "Selector",
    "SendRecv",
    "Simulated",
    "Stage",
    "StateSpec",
    "Sum",
    "Traits",
    "Transform",
    "as_bytes",
    "blank",
    "blocks_of",
    "codec",
    "from_bytes",
    "largest",
    "num_blocks",
    "pack",
    "packed_bytes",
    "register",
    "registered",
    "roundtrip",
    "server_slice",
    "sizes_of",
    "spread",
    "stacked",
    "starts_of",
    "uniform",
    "unpack",
]


class Roundtrip(NamedTuple):
    """What becomes of a tensor that is sent.

    Attributes:
        decoded: What every receiver decodes, in the tensor's shape.
        payload: The message.
        ratio: Bytes of the tensor in float32, over those of the message.
    """

    decoded: Tensor
    payload: Payload
    ratio: float


def roundtrip(spec: str | Stage | Codec, tensor: Tensor, key: Key | None = None) -> Roundtrip:
    """Encode and decode a tensor as one segment, without feedback, in this process.

    Args:
        spec: A codec, a stage or a spec: ``"topk(0.01) | sign"``.
        tensor: Of any shape; its values are taken as float32.
        key: Where random bits come from; by default those of seed 0, step 0 and rank 0.
    """
    chain, key = codec(spec), key or Key(0, 0, 0)
    flat = tensor.detach().float().flatten()
    segments = Segments.single(flat.numel())
    memory = {name: torch.zeros_like(flat) for name in chain.memories}
    payload = chain.encode(EncodeInput(flat, flat, memory, segments), key).payload
    decoded = chain.decode(payload, segments, key).view(tensor.shape)
    return Roundtrip(decoded, payload, 4 * flat.numel() / max(1, payload.nbytes))
