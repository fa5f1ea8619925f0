"""Handles of gossip: replicas that average their parameters with neighbors, after each step of the optimizer."""

from gradwire.integrations.gossip.attach import gossip as gossip
from gradwire.integrations.gossip.batched import BatchedGossip as BatchedGossip
from gradwire.integrations.gossip.batched import SimulatedGossip as SimulatedGossip
from gradwire.integrations.gossip.batched import gossip_lockstep as gossip_lockstep
from gradwire.integrations.gossip.elastic import ElasticGossip as ElasticGossip
from gradwire.integrations.gossip.gossip_sync import GossipSync as GossipSync
from gradwire.integrations.gossip.handle import GossipHandle as GossipHandle
from gradwire.integrations.gossip.report import GossipReport as GossipReport
