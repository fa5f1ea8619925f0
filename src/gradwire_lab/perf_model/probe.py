"""Probe: what the link between the ranks can do, measured by sending a little over it."""

from collections.abc import Callable
from datetime import timedelta

import torch

from gradwire.comm.alphabeta import AlphaBeta, seconds
from gradwire.comm.backend import Backend
from gradwire.comm.collectives import AllReduceOp, Collective
from gradwire.comm.rates import FASTEST_BITS, SLOWEST_BITS, LinkSpec
from gradwire.comm.torch_backend import connect
from gradwire_lab.perf_model.timing import now, slowest

_PROBES = 5
_ENOUGH, _ENOUGH_SECONDS = 1.25, 0.05  # what takes so much longer than the delay alone shows the rate well
_FIRST, _MOST = 2**14, 2**24  # bytes


def probe(timeout_seconds: float = 10.0) -> LinkSpec:
    """Measure the link among all ranks of the world; every rank calls this at once.

    Raises:
        ValueError: Some rank did not answer in time; the sentence says what to do.
    """
    try:
        return measured_link(connect(timeout=timedelta(seconds=timeout_seconds)))
    except RuntimeError:  # whatever a backend calls it
        raise ValueError(timeout_message(timeout_seconds)) from None


def timeout_message(timeout_seconds: float) -> str:
    """The error when a rank does not answer, or never came."""
    return (
        f"the link probe got no answer from some ranks within {timeout_seconds:g} s; start all of them, check that "
        "they reach each other, or give the link, as in 100mbit,20ms"
    )


def measured_link(link: Backend) -> LinkSpec:
    """The rate and delay of a link, the same on every rank."""
    if link.world < 2:
        return LinkSpec()
    delay = delay_of(link)
    idle = seconds("all_reduce", _FIRST, link.world, AlphaBeta(alpha=delay))
    nbytes = _FIRST
    while True:
        took = _fastest(link, AllReduceOp(torch.zeros(nbytes // 4, device=link.device), "sum"), 2)
        if took >= _ENOUGH * idle + _ENOUGH_SECONDS or nbytes >= _MOST:
            break
        nbytes *= 4
    found = fitting(took, delay, lambda spec: seconds("all_reduce", nbytes, link.world, spec))
    # In three digits, which are more than is known.
    return LinkSpec(float(f"{found.rate_bits:.3g}"), float(f"{found.delay_seconds:.3g}"))


def delay_of(link: Backend) -> float:
    """Seconds from one rank to the next, software included."""
    tiny = AllReduceOp(torch.zeros(1, device=link.device), "max")
    took = _fastest(link, tiny, _PROBES)
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


def _fastest(link: Backend, collective: Collective, repeats: int) -> float:
    """The fastest of several calls, on the slowest rank."""
    times = []
    for _ in range(repeats):
        began = now(link.device)
        link.move(collective)
        times.append(now(link.device) - began)
    return slowest(link, [min(times)])[0]
