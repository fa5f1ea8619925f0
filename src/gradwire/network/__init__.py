"""The network, for real: shaped hosts on one machine."""

from gradwire.links.rates import LinkSpec
from gradwire.network.hosts import Hosts
from gradwire.network.launch import Ended
from gradwire.network.namespaces import Refused, sweep

__all__ = ["Ended", "Hosts", "LinkSpec", "Refused", "sweep"]
