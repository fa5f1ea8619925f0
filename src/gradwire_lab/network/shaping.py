"""Links held to a rate by the kernel: tbf for the rate and its queue, netem for delay, jitter and loss.

A token bucket lets a burst pass at once and holds the rest to the rate. Its burst is kept to a millisecond, so that
small messages pay for the wire too; its queue holds 50 ms, more where that would be too few frames.
"""

import json
import math

from gradwire.comm.rates import LinkSpec
from gradwire_lab.network.namespaces import HostsUnavailableError, tc

_BURST_SECONDS = 0.001
_QUEUE_SECONDS = 0.05
_QUEUE_BYTES = 100_000  # at least: several senders may send to one host at a time
_HEADER = 14  # bytes of Ethernet around a packet, which the bucket counts


def queue_seconds(rate_bits: float) -> float:
    """How long a frame may wait for its turn before it is dropped."""
    return max(_QUEUE_SECONDS, 8 * _QUEUE_BYTES / rate_bits)


def burst_bytes(rate_bits: float, mtu: int) -> int:
    return math.ceil(max(rate_bits / 8 * _BURST_SECONDS, 2 * (mtu + _HEADER)))


def tbf(rate_bits: float, mtu: int) -> list[str]:
    queue = f"{math.ceil(1e6 * queue_seconds(rate_bits))}us"
    burst = str(burst_bytes(rate_bits, mtu))
    return ["tbf", "rate", f"{round(rate_bits)}bit", "burst", burst, "latency", queue]


def netem(link: LinkSpec, mtu: int) -> list[str]:
    """Its queue holds what is under way at the link's rate, twice over."""
    under_way = (link.rate_bits or 10e9) * (link.delay_seconds + link.jitter_seconds) / 8 / mtu
    words = ["netem", "limit", str(1000 + math.ceil(2 * under_way))]
    words += ["delay", f"{round(1e6 * link.delay_seconds)}us", f"{round(1e6 * link.jitter_seconds)}us"]
    return [*words, "loss", f"{100 * link.loss:.6f}%"]


def has_netem(namespace: str, device: str) -> bool:
    """Whether the kernel knows netem, tried on a device that has no queue yet."""
    try:
        tc(namespace, "qdisc", "add", "dev", device, "root", "netem", "delay", "1ms")
    except HostsUnavailableError:
        return False
    tc(namespace, "qdisc", "del", "dev", device, "root")
    return True


def hold_rate(namespace: str, device: str, link: LinkSpec, mtu: int) -> None:
    """Send through this device at the link's rate; a plain queue, where there is none, counts."""
    queue = ["pfifo", "limit", "10000"] if link.rate_bits is None else tbf(link.rate_bits, mtu)
    tc(namespace, "qdisc", "add", "dev", device, "root", *queue)


def hold_rate_and_delay(namespace: str, device: str, link: LinkSpec, mtu: int) -> None:
    """Send through this device late, then at the link's rate."""
    tc(namespace, "qdisc", "add", "dev", device, "root", "handle", "1:", *netem(link, mtu))
    if link.rate_bits is not None:
        tc(namespace, "qdisc", "add", "dev", device, "parent", "1:1", *tbf(link.rate_bits, mtu))


def sent_bytes(namespace: str, device: str) -> int:
    """Bytes sent through this device in frames of a wire.

    The device itself counts fewer: the kernel hands it several frames under one header where it can.
    """
    shown = json.loads(tc(namespace, "-s", "-j", "qdisc", "show", "dev", device, "root"))
    return int(shown[0]["bytes"])
