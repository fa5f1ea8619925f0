"""How ranks agree on one mean."""

from gradwire.exchanges.allgather import AllGather as AllGather
from gradwire.exchanges.allreduce import AllReduce as AllReduce
from gradwire.exchanges.auto import Auto as Auto
from gradwire.exchanges.auto import choose as choose
from gradwire.exchanges.delayed import Delayed as Delayed
from gradwire.exchanges.exchange import Aggregate as Aggregate
from gradwire.exchanges.exchange import CommContext as CommContext
from gradwire.exchanges.exchange import Exchange as Exchange
from gradwire.exchanges.exchange import Message as Message
from gradwire.exchanges.majority import Majority as Majority
from gradwire.exchanges.noop import Noop as Noop
from gradwire.exchanges.powersgd import PowerSGD as PowerSGD
from gradwire.exchanges.two_way import TwoWay as TwoWay
