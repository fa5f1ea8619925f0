"""How workers agree."""

from gradwire.exchanges.allgather import AllGather
from gradwire.exchanges.allreduce import AllReduce
from gradwire.exchanges.auto import Auto, choose
from gradwire.exchanges.delayed import Delayed
from gradwire.exchanges.exchange import Agreed, Exchange, Round, Said
from gradwire.exchanges.majority import Majority
from gradwire.exchanges.noop import Noop
from gradwire.exchanges.powersgd import PowerSGD
from gradwire.exchanges.two_way import TwoWay

__all__ = [
    "Agreed",
    "AllGather",
    "AllReduce",
    "Auto",
    "Delayed",
    "Exchange",
    "Majority",
    "Noop",
    "PowerSGD",
    "Round",
    "Said",
    "TwoWay",
    "choose",
]
