"""Complaint: what a rank has to tell the group beside its payloads. It rides along, and costs no round of its own."""

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from gradwire.core.decode_cache import shared
from gradwire.core.payload import Payload
from gradwire.core.requests import Gather, Request, SendRecv, Sum

# One byte, or one number that is added up.
BROKEN = 1  # my gradient is not finite
MISSING = 2  # some of my parameters have no gradient
UNFIT = 4  # my gradient is none that can be compressed


def byte(complaint: int, broken: Sequence[Tensor], device: torch.device) -> Payload:
    """A complaint as a message; it also complains if any of ``broken`` holds, which nobody has to wait for."""
    if broken and not complaint:
        return Payload(any_of(broken).reshape(1).view(torch.uint8))
    said = torch.full((1,), complaint, dtype=torch.uint8, device=device)
    return Payload(said | any_of(broken) if broken else said)


def rider(complaint: int, broken: Sequence[Tensor], ask: Request, world: int, device: torch.device) -> Request:
    """A complaint as an ask that fuses with another one of the same round."""
    if isinstance(ask, Sum):
        loud = ask.tensor.new_full((1,), _loud(complaint))
        return Sum(torch.where(any_of(broken), math.inf, loud) if broken else loud)
    said = byte(complaint, broken, device)
    if isinstance(ask, Gather):
        return Gather(said, 1)
    assert isinstance(ask, SendRecv)
    return SendRecv(dict.fromkeys(range(world), said), dict.fromkeys(range(world), 1))


def complaints_in(answer: Any) -> int:
    """What anybody complained of, by the answer to a rider."""
    if isinstance(answer, Tensor):
        return shared([answer], ("complaints",), lambda: _worst(float(answer)))
    said = _bytes(answer)
    return shared(said, ("complaints",), lambda: reduce(or_, torch.cat(said).tolist(), 0))


def dropped_in(answer: Any) -> Tensor:
    """Whether anybody complained, as one bool that nobody looks at; for steps in which all that can be is `BROKEN`."""
    if isinstance(answer, Tensor):
        return (answer != 0).view(())
    said = _bytes(answer)
    return (said[0] != 0).view(()) if len(said) == 1 else (torch.cat(said) != 0).any()


def any_of(flags: Sequence[Tensor]) -> Tensor:
    """Whether any of several bools holds."""
    return flags[0] if len(flags) == 1 else torch.stack(list(flags)).any()


def _bytes(answer: Any) -> list[Tensor]:
    return [payload.data[:1] for payload in (answer.values() if isinstance(answer, Mapping) else answer)]


def _loud(complaint: int) -> float:
    """A number whose sum over ranks tells the worst of their complaints."""
    if complaint & UNFIT:
        return math.nan
    return math.inf if complaint & BROKEN else float(bool(complaint & MISSING))


def _worst(total: float) -> int:
    if math.isnan(total):
        return UNFIT
    return 0 if total == 0.0 else MISSING if total < math.inf else BROKEN
