"""The models of the simulated grid, and how fast one H200 is assumed to compute them.

Nothing here was measured. A step's arithmetic is counted as usual, 6 operations for each weight and token, or three
times the forward pass's for images, which are the ``operations`` of one in `simulated_models.jsonl`. It is divided by
the published peak of 989e12 bfloat16 operations a second, times the share of the peak that such models are assumed to
reach.
"""

import json
from collections.abc import Iterator
from functools import cache
from importlib import resources

import torch

from gradwire.integrations.model import trainable
from gradwire_lab.perf_model.model import ModelProfile
from gradwire_lab.perf_model.simulation import SimulatedModel
from gradwire_lab.train.models import build

PEAK = 989e12  # dense bfloat16 operations a second, from the data sheet


@cache
def simulated_models() -> tuple[SimulatedModel, ...]:
    """Five models with two batches each."""
    return tuple(_models())


def _models() -> Iterator[SimulatedModel]:
    text = (resources.files("gradwire_lab.cli") / "simulated_models.jsonl").read_text(encoding="utf-8")
    for one in map(json.loads, text.splitlines()):
        with torch.device("meta"):
            model = ModelProfile.of(trainable(build(one["maker"], one["options"]).named_parameters()))
        note = f"assumed: {one['share']:.0%} of 989 TFLOP/s on one H200; kernels measured"
        each = one["operations"] or 6.0 * model.elements
        for batch in one["batches"]:
            seconds = each * batch / (PEAK * one["share"])
            yield SimulatedModel(one["name"], f"{batch:,} {one['unit']}", model, seconds, note)
