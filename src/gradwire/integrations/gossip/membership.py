"""Membership of an elastic group: how a rank joins it, at its start, after a loss, or from a checkpoint."""

import hashlib
import logging
from functools import partial

import torch
from torch import Tensor

from gradwire.comm.peer_agreement import Snapshot
from gradwire.comm.peer_mesh import PeerMesh
from gradwire.core import byte_tensor, raw_bytes
from gradwire.gossip import Node
from gradwire.integrations.gossip.flat_params import FlatParams

_log = logging.getLogger("gradwire.gossip")


class Membership:
    """One rank's place in the group.

    Attributes:
        resyncs: How often this rank has taken over a neighbor's parameters, buffers and step.
    """

    def __init__(self, flat: FlatParams, node: Node, mesh: PeerMesh) -> None:
        self._flat, self._node, self._mesh = flat, node, mesh
        self._neighbors = tuple(node.topology.peers(node.rank))
        self.resyncs = 0

    def join(self, resumes: bool = False) -> None:
        """Take over what a neighbor holds, if one is ahead, and let all neighbors join this rank.

        Args:
            resumes: Whether copies are those of this step, so that edges may continue where both ends have the same.
        """
        further = partial(self._copy, at_least=self._node.step + 1)
        copied = self._mesh.catch_up(self._node.step, further) is not None
        if self._node.step == 0:
            self._copy_root()
            copied = True
        if copied:
            self._mesh.leave()  # edges that were agreed on for the old step are of no use
        digests = self._digests() if resumes and not copied else {}
        self._mesh.join(self._node.step, snapshot_of(self._flat.read_all()), digests)
        self._copy_first_partner()
        self._warn_of_missing()

    def _copy_first_partner(self) -> None:
        """Take over what a neighbor has come to meanwhile: it waits for this rank in the first step of their edge."""
        starts = self._mesh.await_edges((), 0.0)
        step, peer = min(((step, peer) for peer, step in starts.items()), default=(0, 0))
        if step > self._node.step + self._node.topology.size and self._copy(peer, at_least=step):
            self._publish()

    def _publish(self) -> None:
        self._mesh.publish(self._node.step, snapshot_of(self._flat.read_all()))

    def _warn_of_missing(self) -> None:
        """Say which neighbors have not connected: a rank that none can reach would train alone unnoticed."""
        missing = sorted({*self._neighbors} - {edge.peer for edge in self._mesh.edges.snapshot()})
        if missing:
            _log.warning(
                "rank %d begins at step %d without neighbors %s, which did not connect within %g s; if they run, check "
                "their host=, meeting= and GRADWIRE_SECRET",
                *(self._node.rank, self._node.step, missing, self._mesh.timeout),
            )

    def _digests(self) -> dict[int, bytes]:
        """Of each edge's copies, equal at both ends if these are: the lower rank's copy comes first."""
        digests = {}
        for peer in self._neighbors:
            names = (f"to_{peer}", f"from_{peer}") if self._node.rank < peer else (f"from_{peer}", f"to_{peer}")
            copies = (self._node.memory[name] for name in names if name in self._node.memory)
            digests[peer] = hashlib.sha256(b"".join(raw_bytes(x) for x in copies)).digest()
        return digests

    def _copy(self, peer: int, at_least: int = 0) -> bool:
        """Take over a neighbor's parameters, buffers and step, once it has come to some step, if it is not lost."""
        state = self._mesh.pull(peer, at_least)
        if state is None:
            return False
        step, body = state
        if len(body) != 4 * self._flat.read_all().numel():
            self._mesh.drop(peer, f"sent {len(body)} bytes of parameters and buffers")
            return False
        if self._node.step:
            _log.warning(
                "rank %d was at step %d, and takes parameters and step %d of neighbor %d",
                *(self._node.rank, self._node.step, step, peer),
            )
        self._flat.write_all_(byte_tensor(body).view(torch.float32).to(self._flat.device))
        self._node.step = self._node.number = step
        self._node.pending = None  # it belonged to other parameters
        self.resyncs += 1
        return True

    def _copy_root(self) -> None:
        """Start from rank 0's parameters: each rank from a neighbor that is nearer to rank 0."""
        distances = self._node.topology.distances(0)
        nearer = [peer for peer in self._neighbors if distances[peer] < distances[self._node.rank]]
        if nearer and not any(self._mesh.await_peer(peer) and self._copy(peer) for peer in nearer):
            raise RuntimeError(
                f"rank {self._node.rank} found no neighbor with the parameters of rank 0 in {self._mesh.timeout} s: "
                f"none of {nearer}; start rank 0 and those in time, or give timeout= more"
            )
        self._publish()


def snapshot_of(*parts: Tensor) -> Snapshot:
    """Parameters and buffers, made into bytes only if a peer asks."""
    return lambda: raw_bytes(torch.cat(parts))
