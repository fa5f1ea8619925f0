"""The network, for real: shaped hosts on one machine."""

from gradwire.comm.rates import LinkSpec
from gradwire_lab.network.hosts import Hosts
from gradwire_lab.network.launch import Ended
from gradwire_lab.network.namespaces import HostsUnavailableError, sweep

__all__ = ["Ended", "Hosts", "HostsUnavailableError", "LinkSpec", "sweep"]
