"""Arrangement: find out which ranks share a host, before anything else is agreed on."""

import os

from gradwire.adapters.agreement import compare, telling
from gradwire.links.grouping import Across, Grouping, seated
from gradwire.links.hierarchical import HierarchicalLink, subdivide
from gradwire.links.link import Link


def arrange(link: Link, across: Across | None) -> Link:
    """The link to train over. With ``across``, one that knows hosts; all ranks must ask for the same.

    Raises:
        ValueError: Ranks ask for different things, or hosts cannot be told apart, or are not alike.
    """
    if across is None or isinstance(link, HierarchicalLink):
        return link
    with telling(link):
        asked = across if isinstance(across, str) else [[int(rank) for rank in host] for host in across]
    notes = compare(link, {"spec": f"across={asked}", "across": asked, "seated": seated(os.environ)})
    if asked == "hosts":
        grouping = Grouping.found([None if note["seated"] is None else tuple(note["seated"]) for note in notes])
    elif isinstance(asked, str):
        raise ValueError(f"across={asked!r} is unknown; write 'hosts', or the ranks of each, as in [[0, 1], [2, 3]]")
    else:
        grouping = Grouping.of(asked)
    grouping.check(link.world)
    return subdivide(link, grouping)
