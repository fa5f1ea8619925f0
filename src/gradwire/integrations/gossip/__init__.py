"""Handles of gossip: replicas that average their parameters with neighbors, after each step of the optimizer."""

from gradwire.integrations.gossip.attach import gossip
from gradwire.integrations.gossip.batched import BatchedGossip, SimulatedGossip, gossip_lockstep
from gradwire.integrations.gossip.elastic import ElasticGossip
from gradwire.integrations.gossip.gossip_sync import GossipSync
from gradwire.integrations.gossip.handle import GossipHandle
from gradwire.integrations.gossip.report import GossipReport

__all__ = [
    "BatchedGossip",
    "ElasticGossip",
    "GossipHandle",
    "GossipReport",
    "GossipSync",
    "SimulatedGossip",
    "gossip",
    "gossip_lockstep",
]
