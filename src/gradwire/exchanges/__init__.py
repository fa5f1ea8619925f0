"""How ranks agree on one mean."""

from gradwire.exchanges.allgather import AllGather
from gradwire.exchanges.allreduce import AllReduce
from gradwire.exchanges.auto import Auto, choose
from gradwire.exchanges.delayed import Delayed
from gradwire.exchanges.exchange import Aggregate, CommContext, Exchange, Message
from gradwire.exchanges.majority import Majority
from gradwire.exchanges.noop import Noop
from gradwire.exchanges.powersgd import PowerSGD
from gradwire.exchanges.two_way import TwoWay

__all__ = [
    "Aggregate",
    "AllGather",
    "AllReduce",
    "Auto",
    "CommContext",
    "Delayed",
    "Exchange",
    "Majority",
    "Message",
    "Noop",
    "PowerSGD",
    "TwoWay",
    "choose",
]
