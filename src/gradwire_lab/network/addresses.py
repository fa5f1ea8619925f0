"""Addresses for hosts, none of them in use on the machine."""

import ipaddress
import os

from gradwire_lab.network.namespaces import HostsUnavailableError, listed

_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")  # RFC 1918


def mac(host: int) -> str:
    return f"02:67:77:00:00:{host:02x}"  # 02: given by hand, not by a maker


def private(subnet: str, count: int) -> ipaddress.IPv4Network:
    try:
        network = ipaddress.IPv4Network(subnet)
    except ValueError as wrong:
        raise ValueError(f"cannot read the subnet {subnet!r}, for example 10.77.0.0/24: {wrong}") from None
    if not any(network.subnet_of(ipaddress.IPv4Network(wide)) for wide in _PRIVATE):
        raise ValueError(f"the subnet {subnet} belongs to others; take a private one, for example 10.77.0.0/24")
    if network.num_addresses - 2 < count:
        raise ValueError(f"the subnet {subnet} has no room for {count} hosts; take a larger one")
    return network


def unused(count: int) -> ipaddress.IPv4Network:
    """A subnet that holds none of this machine's own addresses."""
    own = [ipaddress.IPv4Address(info["local"]) for device in listed("-4", "addr") for info in device["addr_info"]]
    start = os.getpid()
    subnets = (private(f"10.77.{(start + step) % 256}.0/24", count) for step in range(256))
    free = next((subnet for subnet in subnets if not any(address in subnet for address in own)), None)
    if free is None:
        raise HostsUnavailableError("every subnet 10.77.x.0/24 is in use on this machine; name another one")
    return free
