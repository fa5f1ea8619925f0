"""Arrangement: find out which ranks share a host, before anything else is agreed on."""

import os

from gradwire.comm.backend import Backend
from gradwire.comm.host_backend import HostBackend, subdivide
from gradwire.comm.host_layout import Across, HostLayout, seated
from gradwire.integrations.consistency import compare, telling


def arrange(link: Backend, across: Across | None) -> Backend:
    """The link to train over. With ``across``, one that knows hosts; all ranks must ask for the same.

    Raises:
        ValueError: Ranks ask for different things, or hosts cannot be told apart, or are not alike.
    """
    if across is None or isinstance(link, HostBackend):
        return link
    with telling(link):
        asked = across if isinstance(across, str) else [[int(rank) for rank in host] for host in across]
    notes = compare(link, {"spec": f"across={asked}", "across": asked, "seated": seated(os.environ)})
    if asked == "hosts":
        grouping = HostLayout.found([None if note["seated"] is None else tuple(note["seated"]) for note in notes])
    elif isinstance(asked, str):
        raise ValueError(f"across={asked!r} is unknown; write 'hosts', or the ranks of each, as in [[0, 1], [2, 3]]")
    else:
        grouping = HostLayout.of(asked)
    grouping.check(link.world)
    return subdivide(link, grouping)
