"""A gossip method from its text, or itself."""

from gradwire.core.registry import registered
from gradwire.core.spec import parse
from gradwire.gossip.gossip import GossipMethod


def gossip_method(spec: str | GossipMethod) -> GossipMethod:
    """``"choco(ring, gamma=auto)"`` is ``Choco(Ring())``."""
    made = parse(spec) if isinstance(spec, str) else spec
    if not isinstance(made, GossipMethod):
        raise ValueError(
            f"{spec!r} is no gossip method but a {getattr(made, 'kind', type(made).__name__)}; "
            f"write one of {', '.join(registered('gossip'))} with a graph, for example choco(ring)"
        )
    return made
