"""`gossip`: one call after which a model gossips."""

from pathlib import Path

import torch
from torch import nn

from gradwire.comm.backend import Backend
from gradwire.comm.host_layout import Across
from gradwire.gossip import GossipMethod
from gradwire.integrations.consistency import find_backend
from gradwire.integrations.ddp import find_ddp
from gradwire.integrations.elastic_place import LOOPBACK, elastic_place_of
from gradwire.integrations.gossip.elastic import ElasticGossip
from gradwire.integrations.gossip.flat_params import CodecSpec, GossipOptions
from gradwire.integrations.gossip.gossip_sync import GossipSync


def gossip(
    model: nn.Module,
    spec: str | GossipMethod,
    codec: CodecSpec | None = None,
    *,
    granularity: str = "layer",
    overlap: bool = False,
    process_group: "torch.distributed.ProcessGroup | None" = None,
    seed: int = 0,
    across: Across | None = None,
    link: Backend | None = None,
    elastic: bool = False,
    timeout: float = 30.0,
    meeting: str | Path | None = None,
    rank: int | None = None,
    world: int | None = None,
    host: str = LOOPBACK,
) -> "GossipSync | ElasticGossip":
    """Train replicas that exchange messages with neighbors only; call the returned handle after ``optimizer.step()``.

    Args:
        model: This rank's replica. It starts with the parameters and buffers of rank 0, so load a checkpoint of it
            afterwards.
        spec: A method with its graph, such as ``"choco(ring, gamma=auto)"`` or ``"dpsgd(torus)"``.
        codec: What messages are encoded with, such as ``"sign"``; by default float32.
        granularity: What the codec sees as one vector: each ``"layer"``, or the whole ``"model"``.
        overlap: Whether messages are sent during the next forward and backward pass; their effect comes a step late.
        process_group: The group to train over; by default the whole world.
        seed: The seed of all random bits; equal on all ranks.
        across: ``"hosts"`` makes one node of all ranks of a host, which are found from the environment that torchrun,
            mpirun or srun sets; so does a list of the ranks of each, ``[[0, 1], [2, 3]]``. The loop then calls
            ``average_gradients()`` of the handle before ``optimizer.step()``.
        link: A backend that carries messages instead of torch.distributed.
        elastic: Whether to continue when neighbors die or stall, and to take them back; over connections of its own, so
            no process group is needed.
        timeout: Seconds after which a silent neighbor is dropped, with ``elastic=True``.
        meeting: Where elastic peers find each other: a folder that all share, or ``tcp://host:port`` of a TCPStore.
        rank: Which elastic peer this is; by default RANK of the environment.
        world: How many elastic peers there are; by default WORLD_SIZE.
        host: The address under which the other elastic peers reach this one. Unless it is a loopback address, all peers
            need the same ``GRADWIRE_SECRET`` in the environment.

    Returns:
        A handle: ``report()``, ``state_dict()``, ``evaluate_mean(...)``, ``distance()``.
    """
    options = GossipOptions(spec, codec, granularity, overlap, seed)
    if elastic and (link is not None or process_group is not None):
        raise ValueError("elastic=True opens connections of its own; leave link and process_group out")
    if elastic and across is not None:
        raise ValueError("elastic=True has nodes of one rank, which may come and go; leave across out")
    place = elastic_place_of(elastic, rank, world, meeting, timeout, host)
    if place is not None:
        return ElasticGossip(model, options, place)
    link = find_backend(link, process_group, across)
    ddp = find_ddp(model) if link.host_layout is None or link.host_layout.ranks_per_host == 1 else None
    if ddp is not None and ddp.process_group.size() > 1:
        # Replicas that step by the same mean gradient never differ, and messages between them are wasted.
        raise ValueError(
            f"DistributedDataParallel averages gradients over {ddp.process_group.size()} ranks, so their replicas are "
            "equal and need no gossip; pass the module inside, or with across= the ranks that are one node"
        )
    return GossipSync(model, link, options)
