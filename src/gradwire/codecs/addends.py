"""Addends: payloads of linear codecs, which are added as they are."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.codecs.encoding import Encoded
from gradwire.core import Payload

if TYPE_CHECKING:
    from gradwire.codecs.codec import Codec


def dtype_of(codec: "Codec") -> torch.dtype:
    """The format that a linear codec's values are sent in.

    Raises:
        ValueError: A stage of one's own promises to be linear, but does not say of which numbers its messages are.
    """
    dtype = getattr(codec.quantizer, "dtype", None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"{codec.quantizer} promises linear, but has no dtype; leave linear out of its traits, "
            "or set dtype = torch.float16 where a message is such numbers, which may be added"
        )
    return dtype


def as_addend(codec: "Codec", payload: Payload) -> Tensor:
    """A linear codec's message as numbers that may be added across ranks."""
    return payload.data.view(dtype_of(codec))  # the sender's own bytes, which lie where a tensor begins


def clip_for_sum(encoded: Encoded, world: int) -> Encoded:
    """The same with every value limited, where it lies, so that ``world`` of them may be added."""
    dtype = dtype_of(encoded.codec)
    limit = max_addend(dtype, world)
    encoded.body.view(dtype).clamp_(-limit, limit)
    return replace(encoded, exact=None)


def max_addend(dtype: torch.dtype, world: int) -> float:
    """The largest magnitude of which ``world`` may be added in ``dtype``, in any order, without overflow."""
    info = torch.finfo(dtype)
    # Each addition rounds up by eps/2 at most; and as soon as that matters more than the addend, sums cease to grow.
    growth = min(2.0, (1 + info.eps) ** world)
    return info.max / world / growth
