"""Golden bytes: the wire format, pinned.

A change of any byte raises `WIRE_FORMAT` and gets a line in the changelog. This file pins the bytes anew:
``python tests/wire/test_golden.py``.
"""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.codecs.codec import codec
from gradwire.codecs.stage import EncodeInput
from gradwire.core.keys import Key
from gradwire.core.payload import Payload, as_bytes
from gradwire.core.segments import Segments
from gradwire.engine import Engine, Lockstep, Rule, build, method
from gradwire.kernels.philox import philox
from gradwire.version import WIRE_FORMAT

GOLDEN = Path(__file__).with_name("golden.json")
KEY = Key(seed=7, step=3, rank=2)
TABLE = Segments(("conv.weight", "conv.bias"), ((2, 3, 5), (10,)))
SELECTED = "topk(0.2)"  # carries every index coder


def vector(n: int, salt: int = 0) -> Tensor:
    """Sixteenths, without a random generator; some are zero, some equal."""
    i = torch.arange(n)
    return ((i * 37 + salt * 11) % 101 - 50) / 16


def specs() -> list[str]:
    first = {
        kind: [made.examples[0] for made in gradwire.registered(kind).values()] for kind in ("quantizer", "selector")
    }
    coders = [f"{SELECTED} | {name}" for name in gradwire.registered("indices")]
    rotated = [f"{name} | int8" for name in gradwire.registered("transform")]
    return [*first["quantizer"], *first["selector"], *coders, *rotated]


def payload_of(spec: str) -> Payload:
    grad, target = vector(TABLE.total, salt=1), vector(TABLE.total)
    memory = {"second_moment": (vector(TABLE.total, salt=2) / 2).square()}
    return codec(spec).encode(EncodeInput(grad, target, memory, TABLE), KEY).payload


def updates() -> str:
    """Two steps of three ranks in lockstep: two lanes, two-way and gathered, under feedback."""
    shapes = {"fc.weight": (29, 7), "fc.bias": (29,), "out.weight": (3, 29)}
    rules = [Rule(method("sign", "residual", "two_way"), max_dim=1), Rule(method("topk(0.2) | qsgd", "residual"))]
    plan = build(shapes, rules, world=3)
    sessions = [Engine(plan, rank, 3, 7, torch.device("cpu")) for rank in range(3)]
    digest = hashlib.sha256()
    for step in range(2):
        grads = [
            {name: vector(torch.Size(s).numel(), salt=5 * rank + step).view(s) for name, s in shapes.items()}
            for rank in range(3)
        ]
        talks = [session.run(grad) for session, grad in zip(sessions, grads, strict=True)]
        first = Lockstep(3).drive(talks)[0]
        for name in shapes:
            digest.update(bytes(as_bytes(first.updates[name]).tolist()))
    return digest.hexdigest()


def pinned() -> dict[str, str]:
    found: dict[str, str] = json.loads(GOLDEN.read_text())
    return found


@pytest.mark.parametrize("spec", specs())
def test_bytes_are_as_pinned(spec: str) -> None:
    assert bytes(payload_of(spec).data.tolist()).hex() == pinned()[spec]


def test_a_step_of_three_ranks_is_as_pinned() -> None:
    assert updates() == pinned()["lockstep"]


def test_pins_are_of_this_format_and_complete() -> None:
    assert pinned()["format"] == str(WIRE_FORMAT)
    assert pinned().keys() == {"format", "lockstep", *specs()}


@pytest.mark.parametrize("spec", specs())
def test_pinned_bytes_are_decoded(spec: str) -> None:
    payload = Payload(torch.tensor(list(bytes.fromhex(pinned()[spec])), dtype=torch.uint8))
    decoded = codec(spec).decode(payload, TABLE, KEY)
    assert decoded.shape == (TABLE.total,) and decoded.isfinite().all()


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(counter: str, key: str, words: str) -> None:
    c0, c1, c2, c3 = (torch.tensor(int(word, 16)) for word in counter.split())
    k0, k1 = (torch.tensor(int(word, 16)) for word in key.split())
    drawn = philox((c0, c1, c2, c3), (k0, k1)).tolist()
    assert [f"{word:08x}" for word in drawn] == words.split()


if __name__ == "__main__":
    pins = {"format": str(WIRE_FORMAT), "lockstep": updates()}
    pins |= {spec: bytes(payload_of(spec).data.tolist()).hex() for spec in specs()}
    GOLDEN.write_text(json.dumps(pins, indent=1) + "\n")
