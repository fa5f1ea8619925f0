"""Gossip's doors: replicas that average their parameters with neighbors, after each step of the optimizer."""

from gradwire.adapters.gossip.door import gossip
from gradwire.adapters.gossip.elastic import ElasticNet
from gradwire.adapters.gossip.net import Net
from gradwire.adapters.gossip.report import GossipReport
from gradwire.adapters.gossip.stacked import StackedNet
from gradwire.adapters.gossip.virtual import VirtualNet, gossip_lockstep

__all__ = ["ElasticNet", "GossipReport", "Net", "StackedNet", "VirtualNet", "gossip", "gossip_lockstep"]
