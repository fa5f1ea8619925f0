"""Probe: what the link between the ranks can do, measured by sending a little over it."""

import time
from datetime import timedelta

import torch

from gradwire.links.collectives import AllGather, AllReduce, Collective
from gradwire.links.link import Link
from gradwire.links.rates import FASTEST_BITS, SLOWEST_BITS, LinkSpec
from gradwire.links.torch import connect

_PROBES = 5
_ENOUGH_SECONDS = 0.05  # a message that takes so long tells the rate well
_FIRST, _MOST = 2**14, 2**24  # bytes


def probe(patience_seconds: float = 10.0) -> LinkSpec:
    """Measure the link among all ranks of the world; every rank calls this at once.

    Raises:
        ValueError: Some rank did not answer in time; the sentence says what to do.
    """
    try:
        return found(connect(patience=timedelta(seconds=patience_seconds)))
    except RuntimeError:  # whatever a backend calls it
        raise ValueError(
            f"the link probe did not hear from all ranks within {patience_seconds:g} s; start all of them, see that "
            "they reach each other, or say what the link is, as in 100mbit,20ms"
        ) from None


def found(link: Link) -> LinkSpec:
    """The rate and delay of a link, the same on every rank."""
    if link.world < 2:
        return LinkSpec()
    delay = delay_of(link)
    nbytes = _FIRST
    while True:
        took = _slowest(link, min(_seconds(link, _shout(link, nbytes)) for _ in range(2)))
        if took >= _ENOUGH_SECONDS or nbytes >= _MOST:
            break
        nbytes *= 4
    busy = max(took - (link.world - 1) * delay, took / 10)
    return LinkSpec(clipped(8 * (link.world - 1) * nbytes / busy), delay)


def delay_of(link: Link) -> float:
    """Seconds from one rank to the next, software included."""
    tiny = AllReduce(torch.zeros(1, device=link.device), "max")
    hops = 2 * (link.world - 1)
    return _slowest(link, min(_seconds(link, tiny) for _ in range(_PROBES))) / hops


def clipped(bits: float) -> float:
    """A rate that a link can have."""
    return min(FASTEST_BITS, max(SLOWEST_BITS, bits))


def _shout(link: Link, nbytes: int) -> AllGather:
    return AllGather(torch.zeros(nbytes, dtype=torch.uint8, device=link.device))


def _seconds(link: Link, collective: Collective) -> float:
    began = time.perf_counter()
    link.move(collective)
    if link.device.type == "cuda":
        torch.cuda.synchronize(link.device)
    return time.perf_counter() - began


def _slowest(link: Link, seconds: float) -> float:
    told = torch.tensor([seconds], dtype=torch.float64, device=link.device)
    return float(link.move(AllReduce(told, "max")))
