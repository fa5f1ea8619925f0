"""The graphs, each with its card."""

from gradwire.topology.graphs.custom import *  # noqa: F403
from gradwire.topology.graphs.generated import *  # noqa: F403
from gradwire.topology.graphs.standard import *  # noqa: F403
