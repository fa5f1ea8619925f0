"""The ratio column of the Deep Gradient Compression paper (Lin et al., ICLR 2018, Tables 3 and 4), from `size` alone.

Their format is fp32 values with 16-bit run lengths for weights, the whole model as one unit at 0.1 %, and 1-D tensors
dense in fp32. Ours sends the same entries as fp16 with Rice-coded gaps, and 1-D tensors dense in fp16.

``python tests/codecs/test_paper_ratios.py`` writes docs/ratios.md.
"""

import math
from pathlib import Path

import pytest

from gradwire.engine import Plan, Rule, build, default_rules

Shapes = dict[str, tuple[int, ...]]
PAGE = Path(__file__).parents[2] / "docs" / "ratios.md"
THEIRS = (Rule("fp32", max_dim=1, granularity="model"), Rule("topk(0.001) | gap16", granularity="model"))
OURS = default_rules("topk(0.001) | fp16")


def resnet50() -> Shapes:
    """Bottlenecks of 3, 4, 6 and 3; batch norms have a weight and a bias, convolutions no bias."""
    shapes: Shapes = {"conv1": (64, 3, 7, 7), "bn1.weight": (64,), "bn1.bias": (64,)}
    inside = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for block in range(blocks):
            layers = [(width, inside, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            layers += [(4 * width, inside, 1, 1)] if block == 0 else []  # the shortcut
            for i, shape in enumerate(layers):
                name = f"layer{stage}.{block}.{i}"
                shapes |= {f"{name}.conv": shape, f"{name}.bn.weight": shape[:1], f"{name}.bn.bias": shape[:1]}
            inside = 4 * width
    return shapes | {"fc.weight": (1000, 2048), "fc.bias": (1000,)}


def alexnet() -> Shapes:
    """The original with its two groups, as in Caffe."""
    weights: Shapes = {
        "conv1": (96, 3, 11, 11),
        "conv2": (256, 48, 5, 5),
        "conv3": (384, 256, 3, 3),
        "conv4": (384, 192, 3, 3),
        "conv5": (256, 192, 3, 3),
        "fc6": (4096, 9216),
        "fc7": (4096, 4096),
        "fc8": (1000, 4096),
    }
    return weights | {f"{name}.bias": shape[:1] for name, shape in weights.items()}


def lstm() -> Shapes:
    """Two layers of 1500 for a vocabulary of 10,000; encoder and decoder share one matrix."""
    shapes: Shapes = {"embedding": (10000, 1500), "decoder.bias": (10000,)}
    for layer in range(2):
        shapes |= {f"lstm.w_ih{layer}": (6000, 1500), f"lstm.w_hh{layer}": (6000, 1500)}
        shapes |= {f"lstm.b_ih{layer}": (6000,), f"lstm.b_hh{layer}": (6000,)}
    return shapes


# Model, parameters, and the ratio that the paper prints, to the digits that its own format gives.
CASES = {
    "ResNet-50": (resnet50(), 25_557_032, 276.7),
    "AlexNet": (alexnet(), 60_965_224, 597.7),
    "LSTM 2 x 1500": (lstm(), 51_034_000, 461.8),
}


def parameters(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))


def message_bytes(shapes: Shapes, rules: tuple[Rule, ...]) -> int:
    """The most that one rank says in one step; counts of 4 bytes included."""
    plan: Plan = build(shapes, rules, world=2)
    return sum(lane.at(0)[0].size(lane.units) for lane in plan.lanes)


def ratio(shapes: Shapes, rules: tuple[Rule, ...]) -> float:
    return 4 * parameters(shapes) / message_bytes(shapes, rules)


@pytest.mark.parametrize("model", CASES)
def test_their_format_gives_their_ratio(model: str) -> None:
    shapes, count, printed = CASES[model]
    assert parameters(shapes) == count
    assert round(ratio(shapes, THEIRS), 1) == printed


@pytest.mark.parametrize("model", CASES)
def test_our_format_is_half_as_large_again(model: str) -> None:
    shapes, _, _ = CASES[model]
    assert ratio(shapes, OURS) >= 1.5 * ratio(shapes, THEIRS)


def page() -> str:
    """docs/ratios.md."""
    rows = []
    for model, (shapes, count, _) in CASES.items():
        theirs, ours = message_bytes(shapes, THEIRS), message_bytes(shapes, OURS)
        rows.append(
            f"| {model} | {count:,} | {theirs:,} | {4 * count / theirs:.1f} | {ours:,} | {4 * count / ours:.1f} "
            f"| {theirs / ours:.2f} |"
        )
    return "\n".join(
        [
            "# Ratios on the models of the DGC paper",
            "",
            "**At 0.1 % density a message of gradwire is 1.74 to 1.87 times smaller than one in the paper's format.**",
            "The table has the bytes of one rank's message, and how many times smaller they are than dense float32.",
            "Both formats are counted by `size()`: the most bytes that a message may take, headers included. *Gain*",
            "is the paper's bytes over ours.",
            "",
            "* *Paper's format*: float32 values and 16-bit run lengths. All weights are one unit, and 1-D tensors are",
            "  dense float32.",
            "* *gradwire*: `topk(0.001) | fp16`, with Rice-coded positions, layer by layer. 1-D tensors are dense",
            "  float16.",
            "",
            "| Model | Parameters | Paper's format, bytes | ratio | gradwire, bytes | ratio | gain |",
            "|---|--:|--:|--:|--:|--:|--:|",
            *rows,
            "",
            "`python tests/codecs/test_paper_ratios.py` writes this page, and a test compares the two.",
            "",
        ]
    )


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page()


if __name__ == "__main__":
    PAGE.write_text(page())
