"""The costs of collectives: their properties, and what was measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.comm.alphabeta import AlphaBeta, Kind, cost, framed, seconds
from gradwire.comm.rates import LinkSpec

KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "all_to_all", "broadcast", "swap")
kinds = st.sampled_from(KINDS)
sizes = st.floats(0, 1e9)
worlds = st.integers(2, 64)
links = st.builds(AlphaBeta, st.floats(0, 0.1), st.floats(1e-11, 1e-3))


@given(kinds, sizes, worlds, links)
def test_busy_and_waiting_make_the_whole(kind: Kind, n: float, world: int, link: AlphaBeta) -> None:
    busy, wait = cost(kind, n, world, link)
    assert busy >= 0 and wait >= -1e-9
    assert busy + wait == pytest.approx(seconds(kind, n, world, link))


@given(kinds, sizes, worlds, links)
def test_more_bytes_never_arrive_earlier(kind: Kind, n: float, world: int, link: AlphaBeta) -> None:
    assert seconds(kind, 2 * n, world, link) >= seconds(kind, n, world, link)


@pytest.mark.parametrize("kind", KINDS)
def test_alone_nothing_travels(kind: Kind) -> None:
    assert seconds(kind, 1e6, 1, LinkSpec.parse("1mbit,20ms")) == 0.0


def test_half_duplex_is_half_as_fast() -> None:
    both, one = AlphaBeta(0.0, 1e-7), AlphaBeta(0.0, 1e-7, duplex=False)
    assert seconds("all_reduce", 1e6, 4, one) == pytest.approx(2 * seconds("all_reduce", 1e6, 4, both))


@pytest.mark.parametrize(
    ("kind", "nbytes", "world", "measured"),
    [
        ("all_reduce", 4e6, 4, 0.549),
        ("all_reduce", 4e5, 4, 0.055),
        ("all_gather", 4e6, 4, 1.076),
        ("all_gather", 4e5, 4, 0.112),
        ("all_to_all", 3e6, 4, 0.326),
        ("swap", 4e6, 4, 0.431),
        ("swap", 4e6, 2, 0.354),
        ("broadcast", 4e6, 4, 0.943),
    ],
)
def test_seconds_are_those_of_shaped_hosts(kind: Kind, nbytes: float, world: int, measured: float) -> None:
    """Medians of gloo's collectives among namespaces on links of 100 mbit."""
    assert seconds(kind, nbytes, world, LinkSpec.parse("100mbit")) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("kind", "nbytes", "link", "measured"),
    [
        ("all_reduce", 8, "100mbit,20ms", 0.164),
        ("all_reduce", 4096, "100mbit,20ms", 0.246),
        ("all_reduce", 2**20, "100mbit,20ms", 0.339),
        ("all_reduce", 2**22, "100mbit,20ms", 0.654),
        ("all_reduce", 2**18, "100mbit,5ms", 0.089),
        ("all_reduce", 2**22, "100mbit,5ms", 0.568),
        ("all_gather", 8, "100mbit,20ms", 0.125),
        ("all_gather", 2**18, "100mbit,20ms", 0.171),
        ("all_gather", 2**20, "100mbit,5ms", 0.290),
        ("all_to_all", 4096, "100mbit,20ms", 0.042),
        ("all_to_all", 2**20, "100mbit,20ms", 0.146),
        ("swap", 2**22, "100mbit,20ms", 0.482),
    ],
)
def test_seconds_are_those_of_distant_hosts(kind: Kind, nbytes: float, link: str, measured: float) -> None:
    """Medians among four namespaces whose frames are late."""
    assert seconds(kind, nbytes, 4, LinkSpec.parse(link)) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("kind", "nbytes", "link", "measured"),
    [
        ("all_gather", 2**16, "100mbit,5ms", 0.0170),
        ("all_gather", 2**18, "100mbit,5ms", 0.0338),
        ("all_gather", 2**20, "100mbit,20ms", 0.134),
        ("all_reduce", 2**18, "100mbit,5ms", 0.0437),
        ("all_reduce", 2**20, "100mbit,20ms", 0.178),
        ("all_reduce", 2**22, "100mbit,20ms", 0.458),
        ("all_gather", 2**20, "100mbit", 0.0965),
    ],
)
def test_seconds_are_those_of_two_hosts(kind: Kind, nbytes: float, link: str, measured: float) -> None:
    """Between two hosts, the notice of readiness queues behind the own bytes, and nothing hides it."""
    assert seconds(kind, nbytes, 2, LinkSpec.parse(link)) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("sent", "messages", "measured"),
    [(3_000, 12, 7_769), (300_000, 12, 322_828), (3_000_000, 12, 3_191_429), (600_000, 6, 640_061), (12, 6, 2_480)],
)
def test_framed_bytes_are_those_that_the_interface_counted(sent: float, messages: float, measured: float) -> None:
    """Bytes at the queue of a host's interface, for an all-reduce or all-gather of 4 ranks."""
    assert framed(sent, sent, messages) == pytest.approx(measured, rel=0.08)
