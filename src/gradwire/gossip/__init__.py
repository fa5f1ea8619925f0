"""Gossip methods: how replicas that exchange messages with neighbors only stay close."""

from gradwire.gossip.centralized import Centralized
from gradwire.gossip.choco import Choco
from gradwire.gossip.dcd import DCD
from gradwire.gossip.deepsqueeze import DeepSqueeze
from gradwire.gossip.dpsgd import DPSGD
from gradwire.gossip.ecd import ECD
from gradwire.gossip.gossip import GossipContext, GossipMethod, MixResult
from gradwire.gossip.message import Diverged
from gradwire.gossip.node import Node
from gradwire.gossip.powergossip import PowerGossip
from gradwire.gossip.sgp import SGP
from gradwire.gossip.spec import gossip_method

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
    "MixResult",
    "Node",
    "PowerGossip",
    "gossip_method",
]
