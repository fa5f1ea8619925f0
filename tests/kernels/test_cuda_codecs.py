"""Whole messages and steps by the Triton kernels, against the definitions.

Without a GPU, tensors stay on the CPU, and are handed to the Triton kernels all the same, under their interpreter.
"""

import importlib.util
import os

import pytest
import torch
from torch import nn

import gradwire
from gradwire.codecs.codec import codec
from gradwire.codecs.stage import EncodeInput
from gradwire.core.keys import Key
from gradwire.core.payload import CorruptMessageError, Payload, as_rows
from gradwire.core.segments import Segments
from gradwire.kernels import dispatch
from gradwire.kernels.dispatch import reference_only

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNITS = Segments(("a", "b", "c"), ((50, 40), (8,), (1000,)))
KEYS = [Key(seed=1, step=2, rank=rank) for rank in range(3)]


@pytest.fixture(autouse=True)
def by_triton(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(dispatch, "faster", lambda device: faster("cuda"))


faster = dispatch.faster


def messages(chain):
    torch.manual_seed(0)
    said = []
    for key in KEYS:
        x = torch.randn(UNITS.total)
        with reference_only():
            said.append(chain.encode(EncodeInput(x, x, {}, UNITS), key).payload)
        found = chain.encode(EncodeInput(x.to(DEVICE), x.to(DEVICE), {}, UNITS), key).payload
        assert torch.equal(found.data.cpu(), said[-1].data)
    longest = max(payload.nbytes for payload in said)
    rows = torch.stack([nn.functional.pad(payload.data, (0, longest - payload.nbytes)) for payload in said])
    return rows


@pytest.mark.parametrize(
    "spec", ["topk(0.05)", "topk(0.05) | sign", "threshold(1.0)", "topk(0.05) | gap16", "topk(0.05) | rows", "int4"]
)
def test_messages(spec):
    chain = codec(spec)
    rows = messages(chain)
    with reference_only():
        expected = chain.decoder.mean([Payload(row) for row in rows], UNITS, KEYS)
    found = chain.decoder.mean([Payload(row) for row in rows.to(DEVICE)], UNITS, KEYS)
    assert torch.equal(found.cpu(), expected)


def test_a_damaged_message_is_refused_with_the_same_words():
    chain = codec("topk(0.05)")
    rows = messages(chain)
    rows[1, 4] ^= 3
    words = []
    for where in ("cpu", DEVICE):
        with pytest.raises(CorruptMessageError) as told, reference_only() if where == "cpu" else torch.no_grad():
            chain.decoder.mean([Payload(row) for row in rows.to(where)], UNITS, KEYS)
        words.append(str(told.value))
    assert words[0] == words[1]


def test_rows_lie_where_the_messages_lie():
    data = torch.arange(40, dtype=torch.uint8)
    together = as_rows([Payload(data[i : i + 10]) for i in (0, 13, 26)])
    assert together.data_ptr() == data.data_ptr() and together.stride() == (13, 1)
    apart = as_rows([Payload(data[i : i + 10]) for i in (0, 13, 25)])
    assert torch.equal(apart[2], data[25:35]) and torch.equal(apart[1], together[1])


@pytest.mark.parametrize(
    "spec, exchange",
    [("dgc(0.05)", None), ("topk(0.05) | sign", None), ("sign", "two_way"), ("int4", "two_way"), ("ef_signsgd", None)],
)
def test_steps(spec, exchange):
    def train(device):
        models = []
        for _ in range(3):
            torch.manual_seed(0)
            models.append(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).to(device))
        sync = gradwire.lockstep(models, spec, feedback="residual" if exchange else None, exchange=exchange)
        for step in range(3):
            for rank, model in enumerate(models):
                x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))
                model.zero_grad()
                for p, g in zip(model.parameters(), _gradients(model, x), strict=True):
                    p.grad = g.to(device)
            sync()
            with torch.no_grad():
                for model in models:
                    for p in model.parameters():
                        p -= 0.1 * p.grad
        return torch.cat([p.detach().flatten().cpu() for p in models[0].parameters()])

    with reference_only():
        expected = train("cpu")
    assert torch.equal(train(DEVICE), expected)


def _gradients(model, x):
    """Computed on the CPU, so that all devices see the same."""
    copy = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))
    copy.load_state_dict({name: p.cpu() for name, p in model.state_dict().items()})
    copy(x).square().mean().backward()
    return [p.grad for p in copy.parameters()]
