"""Gossip methods: how replicas that exchange messages with neighbors only stay close."""

from gradwire.gossip.centralized import Centralized as Centralized
from gradwire.gossip.choco import Choco as Choco
from gradwire.gossip.deepsqueeze import DeepSqueeze as DeepSqueeze
from gradwire.gossip.dpsgd import DPSGD as DPSGD
from gradwire.gossip.gossip import GossipMethod as GossipMethod
from gradwire.gossip.gossip import MixResult as MixResult
from gradwire.gossip.gossip import gossip_method as gossip_method
from gradwire.gossip.local_gossip import LocalGossip as LocalGossip
from gradwire.gossip.message import Diverged as Diverged
from gradwire.gossip.message import GossipContext as GossipContext
from gradwire.gossip.node import Node as Node
from gradwire.gossip.noloco import NoLoCo as NoLoCo
from gradwire.gossip.powergossip import PowerGossip as PowerGossip
from gradwire.gossip.sgp import SGP as SGP
from gradwire.gossip.unbiased import DCD as DCD
from gradwire.gossip.unbiased import ECD as ECD
