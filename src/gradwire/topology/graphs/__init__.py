"""The graphs, each with its card."""

from gradwire.topology.graphs.arrows import Arrows
from gradwire.topology.graphs.complete import Complete
from gradwire.topology.graphs.datacenter import DataCenter
from gradwire.topology.graphs.edges import Edges
from gradwire.topology.graphs.erdos_renyi import ErdosRenyi
from gradwire.topology.graphs.expander import Expander
from gradwire.topology.graphs.exponential import Exponential
from gradwire.topology.graphs.hypercube import Hypercube
from gradwire.topology.graphs.margulis import Margulis
from gradwire.topology.graphs.matrix import Matrix
from gradwire.topology.graphs.one_peer_exponential import OnePeerExponential
from gradwire.topology.graphs.path import Path
from gradwire.topology.graphs.ring import Ring
from gradwire.topology.graphs.social import Social
from gradwire.topology.graphs.star import Star
from gradwire.topology.graphs.torus import Torus

__all__ = [
    "Arrows",
    "Complete",
    "DataCenter",
    "Edges",
    "ErdosRenyi",
    "Expander",
    "Exponential",
    "Hypercube",
    "Margulis",
    "Matrix",
    "OnePeerExponential",
    "Path",
    "Ring",
    "Social",
    "Star",
    "Torus",
]
