"""What gossip methods require of codecs, graphs and consensus steps; each function raises a ValueError otherwise."""

from gradwire.codecs import Codec
from gradwire.codecs.quantizers.cast import Cast
from gradwire.core import is_number
from gradwire.gossip.gossip import GossipMethod
from gradwire.topology import Topology


def require_cast(method: GossipMethod, codec: Codec) -> None:
    if codec.selector or codec.transform or not isinstance(codec.quantizer, Cast):
        raise ValueError(
            f"{method.name} sends whole models and has no error feedback, so {codec} would lose too much; "
            "use fp32, fp16 or bf16, or choco with that codec"
        )


def require_stateless(method: GossipMethod, codec: Codec) -> None:
    if codec.memories:
        raise ValueError(f"{codec} remembers past gradients, and {method.name} sends differences of models; use topk")


def require_contraction(method: GossipMethod, codec: Codec) -> None:
    require_stateless(method, codec)
    if not codec.traits.contraction:
        raise ValueError(
            f"{method.name} needs a codec that is a contraction, and {codec} is none; "
            "write biased=True for qsgd, unbiased=False for randomk, or use sign or topk"
        )


def require_unbiased(method: GossipMethod, codec: Codec, allow_biased: bool) -> None:
    require_stateless(method, codec)
    if not (codec.traits.unbiased or allow_biased):
        raise ValueError(
            f"{method.name} was made for unbiased codecs, and {codec} is none: it may diverge; use choco, or write "
            f"{method.name}({method.graph}, allow_biased=True), in a recipe gossip.options.allow_biased=true"
        )


def require_doubly_stochastic(method: GossipMethod, topology: Topology) -> None:
    if not topology.doubly_stochastic:
        raise ValueError(
            f"{method.name} averages with rows and columns that sum to 1, and those of {topology} do not; use sgp on it"
        )


def require_static_symmetric(method: GossipMethod, topology: Topology) -> None:
    require_doubly_stochastic(method, topology)
    if topology.period > 1 or not topology.symmetric:
        what = "changes from step to step" if topology.period > 1 else "is directed"
        raise ValueError(f"{method.name} needs a static graph with edges both ways, and {topology} {what}; use choco")


def require_consensus_step(gamma: object, name: str) -> None:
    if not (is_number(gamma) and 0.0 < gamma <= 1.0):  # type: ignore[operator]
        raise ValueError(f"{name} takes a consensus step in (0, 1], not gamma={gamma!r}; 1 is a whole average")
