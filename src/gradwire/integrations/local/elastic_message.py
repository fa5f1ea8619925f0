"""The message of one worker of an elastic group in a round, and what the messages of all lead to."""

import struct
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.comm.elastic_rounds import ElasticRounds
from gradwire.core import Gather, Payload, Request, Sum, byte_tensor, raw_bytes
from gradwire.core.requests import intercept, run
from gradwire.engine import Engine, Grads, RoundGenerator, StepResult, interleave
from gradwire.engine.drive import T
from gradwire.integrations.local.outer import OuterWeights


class MissedRound(Exception):
    """The message of this worker did not count."""


class RoundTransport:
    """Answers the requests of a round, whose contents travel as one message."""

    def __init__(self, rounds: ElasticRounds, world: int) -> None:
        self._rounds, self._world = rounds, world

    def answer(self, requests: Sequence[Request]) -> list[Any]:
        """The answers of all messages that count.

        Raises:
            MissedRound: That of this worker does not.
        """
        mine = [_content(one) for one in requests]

        def fits(body: bytes) -> bool:
            """Whether a message has the parts that this one has; encoded ones may have other lengths."""
            try:
                parts = _unpack(body)
            except (struct.error, RuntimeError, ValueError, TypeError):  # torch has the last of lengths beyond 2**63
                return False
            triples = zip(requests, mine, parts, strict=False)
            alike = (isinstance(one, Gather) or x.nbytes == part.numel() for one, x, part in triples)
            return len(parts) == len(mine) and all(alike)

        messages = self._rounds.exchange(_pack(mine), fits)
        if messages is None:
            raise MissedRound
        parts = {rank: _unpack(body) for rank, body in messages.items()}
        columns = ({rank: part[i] for rank, part in parts.items()} for i in range(len(mine)))
        return [_answer(one, column, self._world) for one, column in zip(requests, columns, strict=True)]


def in_one_message(engine: Engine, grads: Grads, buffers: Tensor, outer: OuterWeights) -> RoundGenerator[StepResult]:
    """A step whose buckets make their requests together; the model's buffers are averaged with them."""
    buckets = [engine.run_bucket(i, grads) for i in range(len(engine.plan.buckets))]
    *results, total = yield from _together([*buckets, _total(buffers)])
    result = yield from engine.finish(results, grads)
    if not result.skipped:
        run(outer.average_buffers(buffers, engine.world), lambda _: [total])
    return result


def _total(x: Tensor) -> RoundGenerator[Any]:
    (total,) = yield [Sum(x)]
    return total


def _together(steps: Sequence[RoundGenerator[T]]) -> RoundGenerator[list[T]]:
    """The requests of all steps in one list."""

    def serve(rounds: list[list[Request]]) -> Generator[list[Request], list[Any], list[list[Any]]]:
        answers = iter((yield [request for requests in rounds for request in requests]))
        return [[next(answers) for _ in requests] for requests in rounds]

    return intercept(interleave(steps), serve)


def _content(request: Request) -> Tensor:
    assert isinstance(request, Gather | Sum), f"a round has one exchange, and {request} needs another"
    return request.payload.data if isinstance(request, Gather) else request.tensor


def _answer(request: Request, parts: Mapping[int, Tensor], world: int) -> Any:
    """Of a gather: payloads by rank, None for those that do not count. Of a sum: as if those had sent the mean."""
    if isinstance(request, Gather):
        size = max(x.numel() for x in parts.values())
        padded = {rank: nn.functional.pad(x, (0, size - x.numel())) for rank, x in parts.items()}
        device = request.payload.data.device
        return [Payload(padded[rank].to(device)) if rank in padded else None for rank in range(world)]
    like = _content(request)
    total = torch.zeros_like(like)
    for rank in sorted(parts):
        total += parts[rank].view(like.dtype).view_as(like).to(like.device)
    return total if len(parts) == world else (total.float() * (world / len(parts))).to(total.dtype)


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
