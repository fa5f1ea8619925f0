"""Inquiry: a rank that was cut off asks its peers how far they are.

What a peer has announced may be out of date, since it announces its step once for each edge. Its threads answer
questions at any time, also while its caller computes.
"""

import time
from collections.abc import Set

from gradwire.comm.framing import Edge, FrameKind
from gradwire.comm.peer_edges import EdgeTable


def ask_steps(edges: EdgeTable, step: int, awaited: Set[int]) -> bool:
    """Ask all peers, and those that connect meanwhile. Returns whether one is further, and none takes part in the step.

    Peers that are awaited need not be there yet. One that is silent for `timeout` seconds is dropped.
    """
    deadline = time.monotonic() + edges.timeout
    with edges.changed:
        for edge in edges.live():
            edge.asked, edge.answer = False, None
    while unasked := _await_answers(edges, step, awaited, deadline):
        for edge in unasked:
            edge.asked = True
            edges.send(edge, FrameKind.ASK)
    with edges.changed:
        return edges.is_cut_off(step) and edges.furthest(step) is not None


def _await_answers(edges: EdgeTable, step: int, awaited: Set[int], deadline: float) -> list[Edge]:
    """Wait for answers until enough is known. Returns the edges that are there but not asked yet."""

    def unasked() -> list[Edge]:
        return [] if _is_settled(edges, step, awaited) else [edge for edge in edges.live() if not edge.asked]

    with edges.changed:
        left = deadline - time.monotonic()
        if not edges.changed.wait_for(lambda: _is_settled(edges, step, awaited) or unasked(), left):
            for edge in [edge for edge in edges.live() if edge.answer is None]:
                edges.drop(edge)
        return unasked()


def _is_settled(edges: EdgeTable, step: int, awaited: Set[int]) -> bool:
    """Whether a peer is further, or takes part in the step, or all have answered."""
    if edges.furthest(step) is not None or not edges.is_cut_off(step):
        return True
    return all(edge.answer is not None for edge in edges.live()) and awaited <= edges.by_peer.keys()
