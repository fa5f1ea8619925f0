"""Graphs and their mixing weights: which rank receives from which, and with what weight."""

from gradwire.topology import theory
from gradwire.topology.graph import Graph, graph
from gradwire.topology.graphs import *  # noqa: F403
from gradwire.topology.topology import Topology

__all__ = ["Graph", "Topology", "graph", "theory"]
