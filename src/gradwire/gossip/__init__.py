"""Gossip methods: how replicas that exchange messages with neighbors only stay close."""

from gradwire.gossip.centralized import Centralized
from gradwire.gossip.choco import Choco
from gradwire.gossip.deepsqueeze import DeepSqueeze
from gradwire.gossip.dpsgd import DPSGD
from gradwire.gossip.gossip import GossipMethod, MixResult, gossip_method
from gradwire.gossip.local_gossip import LocalGossip
from gradwire.gossip.message import Diverged, GossipContext
from gradwire.gossip.node import Node
from gradwire.gossip.noloco import NoLoCo
from gradwire.gossip.powergossip import PowerGossip
from gradwire.gossip.sgp import SGP
from gradwire.gossip.unbiased import DCD, ECD

__all__ = [
    "DCD",
    "DPSGD",
    "ECD",
    "SGP",
    "Centralized",
    "Choco",
    "DeepSqueeze",
    "Diverged",
    "GossipContext",
    "GossipMethod",
    "LocalGossip",
    "MixResult",
    "NoLoCo",
    "Node",
    "PowerGossip",
    "gossip_method",
]
