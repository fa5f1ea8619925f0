"""A gossip method from its text, or itself."""

from gradwire.core.registry import registered
from gradwire.core.spec import parse
from gradwire.gossip.gossip import Gossip


def gossip_method(spec: str | Gossip) -> Gossip:
    """``"choco(ring, gamma=auto)"`` is ``Choco(Ring())``."""
    made = parse(spec) if isinstance(spec, str) else spec
    if not isinstance(made, Gossip):
        raise ValueError(
            f"{spec!r} is no way to gossip but a {getattr(made, 'kind', type(made).__name__)}; "
            f"write one of {', '.join(registered('gossip'))} with a graph, for example choco(ring)"
        )
    return made
