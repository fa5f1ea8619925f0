"""Probe: what the link between the ranks can do, measured by sending a little over it."""

import time
from collections.abc import Callable
from datetime import timedelta

import torch

from gradwire.comm.alphabeta import AlphaBeta, seconds
from gradwire.comm.backend import Backend
from gradwire.comm.collectives import AllReduceOp, Collective
from gradwire.comm.rates import FASTEST_BITS, SLOWEST_BITS, LinkSpec
from gradwire.comm.torch_backend import connect

_PROBES = 5
_ENOUGH, _ENOUGH_SECONDS = 1.25, 0.05  # what takes so much longer than the delay alone tells the rate well
_FIRST, _MOST = 2**14, 2**24  # bytes


def probe(patience_seconds: float = 10.0) -> LinkSpec:
    """Measure the link among all ranks of the world; every rank calls this at once.

    Raises:
        ValueError: Some rank did not answer in time; the sentence says what to do.
    """
    try:
        return found(connect(patience=timedelta(seconds=patience_seconds)))
    except RuntimeError:  # whatever a backend calls it
        raise ValueError(unheard(patience_seconds)) from None


def unheard(patience_seconds: float) -> str:
    """What to say when somebody does not answer, or never came."""
    return (
        f"the link probe did not hear from all ranks within {patience_seconds:g} s; start all of them, see that "
        "they reach each other, or say what the link is, as in 100mbit,20ms"
    )


def found(link: Backend) -> LinkSpec:
    """The rate and delay of a link, the same on every rank."""
    if link.world < 2:
        return LinkSpec()
    delay = delay_of(link)
    idle = seconds("all_reduce", _FIRST, link.world, AlphaBeta(alpha=delay))
    nbytes = _FIRST
    while True:
        took = _slowest(link, min(_seconds(link, _sum(link, nbytes)) for _ in range(2)))
        if took >= _ENOUGH * idle + _ENOUGH_SECONDS or nbytes >= _MOST:
            break
        nbytes *= 4
    return _round(fitting(took, delay, lambda spec: seconds("all_reduce", nbytes, link.world, spec)))


def delay_of(link: Backend) -> float:
    """Seconds from one rank to the next, software included."""
    tiny = AllReduceOp(torch.zeros(1, device=link.device), "max")
    took = _slowest(link, min(_seconds(link, tiny) for _ in range(_PROBES)))
    return took / seconds("all_reduce", tiny.tensor.element_size(), link.world, AlphaBeta(alpha=1.0))


def fitting(took: float, delay: float, table: Callable[[LinkSpec], float]) -> LinkSpec:
    """The link on which something takes as long as it took, by the same table that forecasts are made with.

    Args:
        took: Seconds.
        delay: Of the link. What it explains of the time is limited: short messages may have been disturbed.
        table: How long it would take on a link.
    """
    waited = table(LinkSpec(FASTEST_BITS, delay))
    delay *= min(1.0, 0.9 * took / waited)
    low, high = SLOWEST_BITS, FASTEST_BITS
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if table(LinkSpec(middle, delay)) > took else (low, middle)
    return LinkSpec(low, delay)


def _sum(link: Backend, nbytes: int) -> AllReduceOp:
    return AllReduceOp(torch.zeros(nbytes // 4, device=link.device), "sum")


def _round(link: LinkSpec) -> LinkSpec:
    """In three digits, which are more than is known."""
    assert link.rate_bits is not None
    return LinkSpec(float(f"{link.rate_bits:.3g}"), float(f"{link.delay_seconds:.3g}"))


def _seconds(link: Backend, collective: Collective) -> float:
    began = time.perf_counter()
    link.move(collective)
    if link.device.type == "cuda":
        torch.cuda.synchronize(link.device)
    return time.perf_counter() - began


def _slowest(link: Backend, seconds: float) -> float:
    told = torch.tensor([seconds], dtype=torch.float64, device=link.device)
    return float(link.move(AllReduceOp(told, "max")))
