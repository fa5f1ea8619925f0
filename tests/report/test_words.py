"""Words of figures that a reader meets first: rules, and the line of specs worth choosing from."""

from pathlib import Path

import pytest

from gradwire_lab.report.charts import tradeoff
from gradwire_lab.report.load import load
from gradwire_lab.report.rule_names import in_words
from gradwire_lab.report.run_groups import tasks
from run_folders import write_run


@pytest.mark.parametrize(
    ("label", "alone", "words"),
    [
        ("*", True, "all tensors"),
        ("*", False, "all other tensors"),
        ("dim<=1", False, "1-D tensors (biases, norms)"),
        ("head.*", False, "head.*"),
        ("head.* dim>=2 size<=1000000", False, "head.* of 2 dimensions or more and 1,000,000 elements or fewer"),
        ("size>=1000", False, "tensors of 1,000 elements or more"),
    ],
)
def test_rules_are_named_in_words(label: str, alone: bool, words: str) -> None:
    assert in_words(label, alone) == words


def test_the_line_of_specs_worth_choosing_is_explained(tmp_path: Path) -> None:
    captions = []
    for values in ([[0.90], [0.95]], [[0.90, 0.92], [0.91, 0.93]], [[0.900, 0.901], [0.950, 0.951]]):
        root = tmp_path / str(len(captions))
        for spec, of_seeds in zip(("topk(0.01) | sign", "fp32"), values, strict=True):
            for seed, value in enumerate(of_seeds):
                write_run(root, spec, seed, epochs=1, values=[value])
        (task,) = tasks([load(folder) for folder in root.iterdir()])
        found = tradeoff.metric_over_bytes(task)
        assert found is not None
        captions.append(found.caption)
    assert all("worth choosing from" in caption for caption in captions)
    assert (
        "two seeds or more" in captions[0]
        and "no spec that sends more" in captions[1]
        and "dotted line joins" in captions[2]
    )
