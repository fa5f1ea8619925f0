"""What the laws range over: everything registered, chains of it, and the tensors that break things.

Adding a class to the registry adds it here, and so to every law.
"""

from collections.abc import Mapping

import torch
from hypothesis import strategies as st
from torch import Tensor

import gradwire
from gradwire.codecs.codec import Codec, codec
from gradwire.codecs.stage import Decoded, EncodeInput
from gradwire.core.keys import Key
from gradwire.core.segments import Segments

SIZES = (1, 7, 8, 9, 1000)
KINDS = ("normal", "zeros", "spike", "denormal", "huge", "constant", "outlier", "bf16", "strided")


def examples(*kinds: str) -> list[str]:
    """The examples of every registered class of these kinds."""
    return [spec for made in gradwire.registered(*kinds).values() for spec in made.examples]


STAGES = examples("transform", "selector", "quantizer", "indices")
FEEDBACKS = examples("feedback")
EXCHANGES = examples("exchange")


def _chains() -> list[str]:
    quantizers, coders = examples("quantizer"), examples("indices")
    # Of one's own, a selector may have a single example.
    selectors = [(*made.examples, made.examples[0])[:2] for made in gradwire.registered("selector").values()]
    return [
        *quantizers,
        *examples("selector"),
        *(f"{s[0]} | {q}" for s in selectors for q in ("sign", "terngrad", "qsgd", "fp16", "int4")),
        *(f"{s[1]} | {i}" for s in selectors for i in coders if not s[1].startswith("randomk")),  # redrawn, not sent
        *(f"hadamard | {q}" for q in quantizers),
        *(f"{t} | {s}" for t in examples("transform") for s in ("sign", "topk(0.3)")),
        *(f"hadamard(block=256) | {s[1]}" for s in selectors if not s[1].startswith("variance")),
        # Hybrids of the literature: signs, trits or a few bits for the selected, by every index coder.
        *(f"topk(0.3) | {q} | {i}" for q in ("sign", "terngrad") for i in coders),
        "adacomp(bin=50) | terngrad | bitmap",
        "sampled_topk(0.01) | fp16 | gap16",
        "randomk(0.3, unbiased=True) | terngrad(clip=0)",
        "randomk(0.3, unbiased=True) | natural",
        "hadamard(block=8) | topk(0.3) | qsgd(levels=7, bucket=None) | bitmap",
        "hadamard | randomk(0.3, unbiased=True) | bf16",
        "dct | int8",
        "dct(side=4) | chunk_topk(2, chunk=16) | sign",
    ]


def _pairs() -> list[str]:
    selectors, quantizers = (
        [made.examples[0] for made in gradwire.registered(kind).values()] for kind in ("selector", "quantizer")
    )
    return [f"{selector} | {quantizer}" for selector in selectors for quantizer in quantizers]


CODECS: Mapping[str, Codec] = {str(made): made for made in map(codec, _chains())}
DRAWN = {**CODECS, **{str(made): made for made in map(codec, _pairs())}}  # what property tests draw from
STAGE_NAMES = [*gradwire.registered("transform", "selector", "quantizer", "indices")]


def table(*lengths: int) -> Segments:
    return Segments(tuple(f"w{i}" for i in range(len(lengths))), tuple((n,) for n in lengths))


def tensor(kind: str, n: int, seed: int = 0) -> Tensor:
    """A flat float32 vector that is ``n`` long and of one difficult kind."""
    x = torch.randn(2 * n, generator=torch.Generator().manual_seed(seed))
    match kind:
        case "zeros":
            return torch.zeros(n)
        case "spike":
            return torch.zeros(n).index_fill(0, torch.tensor([seed % n] if n else []).long(), -3.0)
        case "denormal":
            return x[:n] * 1e-40
        case "huge":
            return x[:n] * 1e30
        case "constant":
            return torch.full((n,), -0.7)
        case "outlier":  # what rounds small values down to the same side loses more than there is
            return torch.full((n,), -0.01).index_fill(0, torch.arange(seed % 7, max(n, seed % 7), 997), 3.0)
        case "bf16":
            return x[:n].bfloat16().float()  # full of ties
        case "strided":
            return x[::2]
    return x[:n]


def signal(segments: Segments, kind: str = "normal", seed: int = 0) -> EncodeInput:
    """What an encoder is given: today's gradient, a target beyond it, and a moment for those that keep one."""
    grad = tensor(kind, segments.total, seed)
    target = grad if kind in ("zeros", "spike", "outlier", "strided") else grad + tensor(kind, segments.total, seed + 1)
    memory = {"second_moment": grad.square().clamp(max=1e38)}
    return EncodeInput(grad, target, memory, segments)


def dense(sent: Decoded, n: int) -> Tensor:
    """What was sent, zeros where nothing was."""
    return sent.add_to(torch.zeros(n))


def codecs(name: str = "") -> st.SearchStrategy[Codec]:
    """Any chain; or those that hold a stage of this name, every quantizer behind every selector among them."""
    if not name:
        return st.sampled_from(list(CODECS.values()))
    return st.sampled_from([made for made in DRAWN.values() if name in names_of(made)])


def names_of(chain: Codec) -> list[str]:
    return [stage.name for stage in (chain.transform, chain.selector, chain.quantizer, chain.indices) if stage]


def keys() -> st.SearchStrategy[Key]:
    return st.builds(Key, st.integers(0, 2**40), st.integers(0, 2**33), st.integers(0, 7))


def tables() -> st.SearchStrategy[Segments]:
    """One segment or several, an empty one among them now and then."""
    lone = st.sampled_from(SIZES).map(table)
    lengths = st.lists(st.sampled_from((*SIZES, 0, 64, 300)), min_size=2, max_size=5)
    return lone | lengths.filter(any).map(lambda found: table(*found))


@st.composite
def signals(draw: st.DrawFn) -> EncodeInput:
    return signal(draw(tables()), draw(st.sampled_from(KINDS)), draw(st.integers(0, 2**31)))
