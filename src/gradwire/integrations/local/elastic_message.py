"""The message of one worker of an elastic group in a round, and what the messages of all lead to."""

import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.core.payload import Payload, byte_tensor, raw_bytes
from gradwire.core.requests import Finished, Gather, Request, advance, run
from gradwire.engine.drive import interleave
from gradwire.engine.step import StepResult
from gradwire.integrations.local.outer import OuterWeights
from gradwire.integrations.wire import Wire


class RoundMessage:
    """The bytes of all buckets and buffers, which travel as one message.

    Attributes:
        body: What is sent.
    """

    def __init__(self, wire: Wire, differences: dict[str, Tensor], buffers: Tensor | None) -> None:
        self._wire, self._differences = wire, differences
        self._buffers = torch.zeros(0) if buffers is None else buffers
        wire.setup.check_model()
        began = time.perf_counter()
        engine = wire.engine.unwrapped
        self._steps = interleave([engine.run_bucket(i, differences) for i in range(len(engine.plan.buckets))])
        asked = advance(self._steps)
        assert not isinstance(asked, Finished)
        self._asked = asked
        self.body = _pack([*(_content(one) for bucket in asked for one in bucket), self._buffers])
        wire.clock.work(time.perf_counter() - began, decoding=False)

    def fits(self, body: bytes) -> bool:
        """Whether a message has the parts that this one has; encoded ones may have other lengths."""
        try:
            parts = _unpack(body)
        except (struct.error, RuntimeError, ValueError, TypeError):  # torch has the last of lengths beyond 2**63
            return False
        asked = [*(one for bucket in self._asked for one in bucket), None]
        mine = _unpack(self.body)
        alike = (
            isinstance(one, Gather) or a.numel() == b.numel() for one, a, b in zip(asked, mine, parts, strict=False)
        )
        return len(parts) == len(mine) and all(alike)

    def finish(self, messages: Mapping[int, bytes], outer: OuterWeights) -> StepResult:
        """Decode the messages, keep the error, and return the mean difference."""
        engine, began = self._wire.engine.unwrapped, time.perf_counter()
        parts = {rank: _unpack(body) for rank, body in messages.items()}
        columns = [{rank: part[i] for rank, part in parts.items()} for i in range(len(parts[engine.rank]))]
        *answers, buffers = columns
        found = iter(answers)
        done = advance(
            self._steps, [[_answer(one, next(found), engine.world) for one in bucket] for bucket in self._asked]
        )
        assert isinstance(done, Finished)
        skipped = engine.skipped
        result = run(engine.finish(done.value, self._differences), _refuse)
        if engine.skipped == skipped and self._buffers.numel():
            total = _sum(self._buffers, buffers)
            run(outer.average_buffers(self._buffers, len(buffers)), lambda _: [total])
        self._wire.clock.work(time.perf_counter() - began, decoding=True)
        return result


def _refuse(requests: list[Request]) -> Any:
    raise AssertionError(f"a round has one exchange, and {requests} need another")


def _content(request: Request) -> Tensor:
    return request.payload.data if isinstance(request, Gather) else request.tensor  # type: ignore[union-attr]


def _answer(request: Request, parts: Mapping[int, Tensor], world: int) -> Any:
    """Of a gather: payloads by rank, None for those that do not count. Of a sum: as if those had sent the mean."""
    if isinstance(request, Gather):
        size = max(x.numel() for x in parts.values())
        padded = {rank: nn.functional.pad(x, (0, size - x.numel())) for rank, x in parts.items()}
        device = request.payload.data.device
        return [Payload(padded[rank].to(device)) if rank in padded else None for rank in range(world)]
    total = _sum(_content(request), parts)
    return total if len(parts) == world else (total.float() * (world / len(parts))).to(total.dtype)


def _sum(like: Tensor, parts: Mapping[int, Tensor]) -> Tensor:
    """In the order of ranks."""
    total = torch.zeros_like(like)
    for rank in sorted(parts):
        total += parts[rank].view(like.dtype).view_as(like).to(like.device)
    return total


def _pack(tensors: Sequence[Tensor]) -> bytes:
    """Their number, their lengths in bytes, and the bytes."""
    parts = [raw_bytes(x) for x in tensors]
    return struct.pack(f"<{1 + len(parts)}Q", len(parts), *map(len, parts)) + b"".join(parts)


def _unpack(body: bytes) -> list[Tensor]:
    (count,) = struct.unpack_from("<Q", body)
    if 8 + 8 * count > len(body):
        raise ValueError(f"a message of {len(body)} bytes cannot have {count} parts")
    lengths = struct.unpack_from(f"<{count}Q", body, 8)
    whole = byte_tensor(body[8 + 8 * count :])
    return [part.clone() for part in whole.split(list(lengths))]
