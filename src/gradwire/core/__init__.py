"""The words of all rooms: specs and their registry, segments, payloads, requests to the group, keys of random bits.

Other rooms import these from here. What is not listed is a mechanism, and has its own module.
"""

from gradwire.core.arguments import check_argument as check_argument
from gradwire.core.arguments import check_fraction as check_fraction
from gradwire.core.arguments import is_count as is_count
from gradwire.core.arguments import is_number as is_number
from gradwire.core.keys import PER_RANK as PER_RANK
from gradwire.core.keys import Key as Key
from gradwire.core.payload import CorruptMessageError as CorruptMessageError
from gradwire.core.payload import Payload as Payload
from gradwire.core.payload import as_bytes as as_bytes
from gradwire.core.payload import byte_tensor as byte_tensor
from gradwire.core.payload import from_bytes as from_bytes
from gradwire.core.payload import raw_bytes as raw_bytes
from gradwire.core.registry import register as register
from gradwire.core.registry import registered as registered
from gradwire.core.requests import CommGenerator as CommGenerator
from gradwire.core.requests import Gather as Gather
from gradwire.core.requests import Max as Max
from gradwire.core.requests import Request as Request
from gradwire.core.requests import Scope as Scope
from gradwire.core.requests import SendRecv as SendRecv
from gradwire.core.requests import Sum as Sum
from gradwire.core.segments import Segments as Segments
from gradwire.core.segments import by_rank as by_rank
from gradwire.core.segments import on as on
from gradwire.core.spec import Named as Named
from gradwire.core.spec import parse as parse
from gradwire.core.traits import Traits as Traits
