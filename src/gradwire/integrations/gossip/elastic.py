"""The handle of one rank of an elastic group, which continues when neighbors die or stall, and takes them back."""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.comm.backend import delegated
from gradwire.comm.collectives import Traffic
from gradwire.comm.peer_edges import UNCOUNTED
from gradwire.comm.peer_mesh import PeerMesh
from gradwire.core import CorruptMessageError, Payload, Request, SendRecv, byte_tensor, raw_bytes
from gradwire.engine import execute, interleave
from gradwire.integrations.elastic_place import ElasticPlace
from gradwire.integrations.gossip.flat_params import FlatParams, GossipOptions
from gradwire.integrations.gossip.handle import RankHandle
from gradwire.integrations.gossip.membership import Membership, snapshot_of
from gradwire.integrations.gossip.report import GossipReport, summarize

_SMALL_BYTES = 2**20  # headers of messages, and the numbers of an evaluation
_log = logging.getLogger("gradwire.gossip")


class ElasticGossip(RankHandle):
    """Gossips one model's parameters with the neighbors that are connected. Call it after ``optimizer.step()``.

    A lost neighbor's weight returns to its owner. If only one end of an edge finished its last round, the mean model
    has moved by what flowed over it, over the number of ranks; the last flow that is known is logged, and `report` adds
    them up. A rank that comes back, or was left behind, takes a neighbor's parameters and step, and both ends of each
    of its edges then exchange theirs whole.

    Attributes:
        mesh: The connections to the neighbors.
        drift: About how far the mean model has moved by rounds that only one end finished.
        rejoined: How many times an edge came back.
        rounds_made: Rounds that this rank has made itself.
        messages_sent: Messages that it has sent in them, one to each neighbor that was there.
    """

    elastic = True
    resyncs = delegated("_membership", "resyncs")

    def __init__(self, model: nn.Module, options: GossipOptions, place: ElasticPlace) -> None:
        flat, rank, world = FlatParams(model), place.rank, place.world
        node = options.node(flat.tensors, rank, world, elastic=True)
        super().__init__(flat, node, tuple((rank,) for rank in range(world)), options.describe(node), rank)
        self.world, self.drift, self.rejoined = world, 0.0, 0
        self.rounds_made = self.messages_sent = 0
        self._logged = 0  # losses
        self._known: set[int] = set()  # neighbors that have ever taken part
        self._gathers = (-1, 0)  # a step, and how many times `gather_reachable` was called in it
        whole = f"{self.description}; seed {options.seed}; world {world}; {flat.fingerprint().tolist()}"
        most_bytes = _SMALL_BYTES + world * (4 + 4 * flat.read_all().numel())  # what `gather_models` sends at its end
        self.mesh = place.connect(node.topology.peers(rank), whole, most_bytes)
        self._membership = Membership(flat, node, self.mesh)
        try:
            self._membership.join()
        except BaseException:
            self.close()
            raise
        self.node.begin(flat.read())

    # -- a round -------------------------------------------------------------------------------------------------------

    def mix(self, x: Tensor) -> Tensor:
        """One round of gossip. ``x`` are the model's parameters, unless this rank must take a neighbor's instead."""
        self.wait()
        if self.mesh.is_left_behind(self.node.step, slack=self.world):
            self._membership.join()
            x = self.flat.read()
        buffers = self.flat.read_buffers()  # now, since training continues
        return self.run_or_overlap(x, lambda x: self._run(x, buffers))

    def _run(self, x: Tensor, buffers: Tensor) -> Tensor:
        step = self.node.step
        self.mesh.yield_to_successor()
        live = self.mesh.begin(step)
        self._log_rejoined(live, step)
        self._log_lost(step)  # now, while flows are those of the last round
        self.node.flows = {peer: flow for peer, flow in self.node.flows.items() if live.get(peer) is False}
        mixed = self._mix_without_corrupt(x, live)
        self._log_lost(step)
        self.rounds_made += 1
        self.messages_sent += len(live)
        self.mesh.publish(step + 1, snapshot_of(mixed, buffers))
        return mixed

    def _mix_without_corrupt(self, x: Tensor, live: Mapping[int, bool]) -> Tensor:
        """A neighbor whose message is corrupt is dropped, and the round made without it, from what was received."""
        transport = _PeerTransport(self.mesh, self.node.step, x.device)
        for corrupt in ((), *((peer,) for peer in live), tuple(live)):
            transport.restart(without=corrupt)
            try:  # a node changes only at the end of a round
                (mixed,) = execute(interleave([self.node.run(x, live)]), transport, self.clock)
            except CorruptMessageError as error:
                if corrupt == tuple(live):
                    raise
                _log.debug("rank %d received a corrupt message: %s", self.rank, error)
            else:
                break
        for peer in corrupt:
            self.mesh.drop(peer, "sent a corrupt message")
        return mixed

    def _log_rejoined(self, live: Mapping[int, bool], step: int) -> None:
        for peer, new in live.items():
            if new and peer in self._known:
                self.rejoined += 1
                _log.info("rank %d has neighbor %d back at step %d", self.rank, peer, step)
            self._known.add(peer)

    def _log_lost(self, step: int) -> None:
        """Log the neighbors lost since the last round, and what may have flowed one way only."""
        lost = self.mesh.edges.lost[self._logged :]
        self._logged += len(lost)
        for peer in lost:
            flow = float(self.node.flows.pop(peer, 0.0)) / self.world
            self.drift += flow
            _log.warning(
                "rank %d lost neighbor %d before the end of step %d; the mean model may have moved by about %.3g",
                *(self.rank, peer, step, flow),
            )

    # -- over all ranks ------------------------------------------------------------------------------------------------

    def average_rows(self, grads: Tensor) -> Tensor:
        """A node has one rank."""
        return grads

    def gather_models(self) -> dict[int, Tensor]:
        """Parameters and floating-point buffers of every rank that can be reached, by rank."""
        self.wait()
        return self.gather_reachable(self.flat.read_all())

    def gather_reachable(self, own: Tensor) -> dict[int, Tensor]:
        """The tensors of all ranks that can be reached, of one shape, by rank.

        They travel from neighbor to neighbor, uncounted. All ranks must call it at the same step: one that does not is
        waited for as for a dead one.
        """
        self.wait()
        known, new = {self.rank: own}, {self.rank: own}
        step = self.node.step
        self._gathers = step, self._gathers[1] + 1 if self._gathers[0] == step else 0
        partners = self.mesh.partners(step)
        for hop in range(self.world - 1):  # no path is longer
            index = UNCOUNTED + self._gathers[1] * self.world + hop
            received = self.mesh.exchange(step, index, dict.fromkeys(partners, _pack(new)))
            tensors = {rank: x for peer, body in received.items() for rank, x in self._unpack(peer, body, own).items()}
            new = {rank: x for rank, x in tensors.items() if rank not in known}
            known |= new
        return dict(sorted(known.items()))

    def _unpack(self, peer: int, body: bytes, like: Tensor) -> dict[int, Tensor]:
        """What `_pack` packed; a neighbor that sent something else is dropped."""
        size = 4 + like.element_size() * like.numel()
        records = [body[at : at + size] for at in range(0, len(body), size)]
        ranks = [int.from_bytes(record[:4], "little") for record in records]
        if len(body) % size or any(rank >= self.world for rank in ranks):
            self.mesh.drop(peer, f"sent {len(body)} bytes of models, where each takes {size}")
            return {}
        tensors = [byte_tensor(record[4:]).view(like.dtype).view_as(like).to(like.device) for record in records]
        return dict(zip(ranks, tensors, strict=True))

    def reduce_over_processes(self, numbers: Tensor, op: str) -> tuple[Tensor, int]:
        """The sum or maximum over all ranks that can be reached, and how many they are. All of them must call it."""
        rows = torch.stack(list(self.gather_reachable(numbers).values()))
        return rows.sum(0) if op == "sum" else rows.amax(0), len(rows)

    # -- state and report ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Copies, gamma and step."""
        self.wait()
        return self.save_node(self.node, self.flat)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from this rank's own state, and join the group at its step, or at the group's if that is further.

        An edge continues as it was if both its ends come back with the same step and copies, within `timeout` of each
        other; any other starts again, with whole parameters.
        """
        self.wait()
        self.check_state(state, self.node)
        self._check_seed(int(state["gradwire/seed"]))
        self.node.load(state)
        self.flat.load(state)
        self.node.step = self.node.number = int(state["gradwire/step"])
        self.mesh.leave()
        self._membership.join(resumes=True)
        self._logged = len(self.mesh.edges.lost)
        self.node.flows.clear()

    def _check_seed(self, saved: int) -> None:
        """Refuse another seed than neighbors have: what they decode of random entries would be others' values."""
        if saved != self.node.seed:
            raise ValueError(
                f"the state was saved with seed {saved}, and this group has seed {self.node.seed}; attach all ranks "
                f"with seed={saved}"
            )

    def report(self, rank: int = 0) -> GossipReport:
        """Bytes, distance, memory, gamma and losses so far."""
        del rank
        self.wait()
        parameters = self.flat.tensors.total
        snapshot = 1 + sum(buffer.numel() for buffer in self.flat.buffers.values()) / max(1, parameters)
        return summarize(
            self.node,
            self.flat,
            self.mesh.edges.traffic,
            dense=self.node.method.dense_bytes(parameters, self.messages_sent, self.world),
            memory_floats=self.node.floats_per_parameter + self.flat.floats_per_parameter + snapshot,
            dropped=len(self.mesh.edges.lost),
            rejoined=self.rejoined,
            drift=self.drift,
            rounds=self.rounds_made,
            messages=self.messages_sent,
        )

    def counters(self) -> list[list[float]]:
        count = self.mesh.edges.traffic
        return [[count.sent, count.received, count.collectives, self.rounds_made, self.messages_sent]]

    def load_counters(self, counters: Sequence[Sequence[float]]) -> None:
        (own,) = counters
        self.mesh.edges.traffic = Traffic(own[0], own[1], int(own[2]))
        if len(own) > 3:  # older checkpoints do not have them
            self.rounds_made, self.messages_sent = int(own[3]), int(own[4])

    def close(self) -> None:
        """Leave the group."""
        try:
            self.wait()
        finally:
            self.mesh.close()


class _PeerTransport:
    """Answers the requests of one round over the peer mesh, and again from what was received."""

    def __init__(self, mesh: PeerMesh, step: int, device: torch.device) -> None:
        self._mesh, self._step, self._device = mesh, step, device
        self._answers: list[dict[int, bytes]] = []
        self.restart()

    def restart(self, without: Collection[int] = ()) -> None:
        """Answer from the first request on, as if some peers were lost."""
        self._index, self._without = 0, without

    def answer(self, requests: Sequence[Request]) -> list[Any]:
        (request,) = requests
        assert isinstance(request, SendRecv)
        if self._index == len(self._answers):
            # Without neighbors, a node sends an empty message to itself.
            out = {peer: raw_bytes(payload.data) for peer, payload in request.out.items() if peer != self._mesh.rank}
            self._answers.append(self._mesh.exchange(self._step, self._index, out))
        received = {peer: body for peer, body in self._answers[self._index].items() if peer not in self._without}
        self._index += 1
        return [{peer: Payload(byte_tensor(body).to(self._device)) for peer, body in received.items()}]


def _pack(vectors: Mapping[int, Tensor]) -> bytes:
    """Rank by rank: a uint32, then the vector; all have the same length."""
    return b"".join(rank.to_bytes(4, "little") + raw_bytes(x) for rank, x in vectors.items())
