"""The models of the simulated grid, and how fast one H200 is assumed to compute them.

Nothing here was measured. A step's arithmetic is counted as usual, 6 operations for each weight and token, or three
times the forward pass's for images. It is divided by the published peak of 989e12 bfloat16 operations a second, times
the share of the peak that such models are assumed to reach.
"""

from functools import cache
from typing import Any

import torch

from gradwire_lab.perf_model.model import ModelProfile
from gradwire_lab.perf_model.simulation import SimulatedModel
from gradwire_lab.train.models import build

PEAK = 989e12  # dense bfloat16 operations a second, from the data sheet
TRANSFORMER, CONVOLUTION, RECURRENT = 0.40, 0.08, 0.10  # shares of the peak

# name, maker, its options, arithmetic of a unit of batch (None: 6 for each weight), share of the peak, batches, unit
_MODELS: tuple[tuple[str, str, dict[str, Any], float | None, float, tuple[int, int], str], ...] = (
    ("ResNet-50", "resnet50", {"classes": 1000}, 3 * 8.2e9, CONVOLUTION, (32, 256), "images"),
    ("VGG-16", "vgg16", {"classes": 1000}, 3 * 31.0e9, CONVOLUTION, (32, 256), "images"),
    ("LSTM 2x1500", "lstm", {"vocab": 10_000, "hidden": 1500}, None, RECURRENT, (700, 5600), "tokens"),
    ("GPT-2 124M", "gpt2", {"vocab": 50_257}, None, TRANSFORMER, (8192, 32_768), "tokens"),
    (
        "GPT-2 1.5B",
        "gpt",
        {"vocab": 50_257, "context": 1024, "layers": 48, "width": 1600, "heads": 25},
        None,
        TRANSFORMER,
        (2048, 16_384),
        "tokens",
    ),
)


@cache
def simulated_models() -> tuple[SimulatedModel, ...]:
    """Five models with two batches each."""
    return tuple(
        _subject(name, model, work, share, batch, unit)
        for name, maker, options, work, share, batches, unit in _MODELS
        for model in (_model(maker, options),)
        for batch in batches
    )


def _subject(
    name: str,
    model: ModelProfile,
    work: float | None,
    share: float,
    batch: int,
    unit: str,
) -> SimulatedModel:
    each = 6.0 * model.elements if work is None else work
    note = f"assumed: {share:.0%} of 989 TFLOP/s on one H200; kernels measured"
    return SimulatedModel(name, f"{batch:,} {unit}", model, each * batch / (PEAK * share), note)


def _model(maker: str, options: dict[str, Any]) -> ModelProfile:
    with torch.device("meta"):
        made = build(maker, options)
    return ModelProfile({name: tuple(p.shape) for name, p in made.named_parameters() if p.requires_grad})
