"""A quantizer of your own, in forty lines, that composes with all the others.

Run it with `python examples/04_your_own_codec.py`. `gradwire new codec NAME` writes such a file with a card, which
commands read with `--import`; CONTRIBUTING.md has more of them.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

import gradwire
from gradwire.extend import (
    Key,
    Quantizer,
    Traits,
    as_bytes,
    from_bytes,
    largest,
    pack,
    packed_bytes,
    register,
    spread,
    unpack,
)


@register("crowd", kind="quantizer")
class Crowd(Quantizer):
    """Four bits a value: fifteen levels, closer to each other the closer they are to zero."""

    examples: ClassVar[tuple[str, ...]] = ("crowd",)

    def size(self, lengths: tuple[int, ...]) -> int:
        return 4 * len(lengths) + packed_bytes(sum(lengths), 4)

    def encode(self, values: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        scales = largest(values.abs(), lengths)
        share = values.abs() / spread(scales.where(scales != 0, 1.0), lengths)  # 0..1
        k = (7 * share.sqrt()).floor() * values.sign()
        return torch.cat((as_bytes(scales), pack(k.int() + 7, 4)))

    def decode(self, data: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        head = 4 * lengths.numel()
        scales = spread(from_bytes(data[:head], torch.float32), lengths)
        k = unpack(data[head:], 4, scales.numel()) - 7
        return scales * k.sign() * (k / 7).square()

    @property
    def traits(self) -> Traits:
        return Traits(contraction=True)


replicas = [nn.Linear(256, 256, bias=False) for _ in range(4)]
for spec in ("crowd", "topk(0.05) | crowd", "hadamard | crowd"):
    sync = gradwire.lockstep(replicas, spec)
    for rank, model in enumerate(replicas):
        model.weight.grad = torch.randn(256, 256, generator=torch.Generator().manual_seed(rank))
    mean = torch.stack([model.weight.grad for model in replicas]).mean(0)
    sync()
    error = float((replicas[0].weight.grad - mean).norm() / mean.norm())
    report = sync.wires[0].report()
    print(f"{spec:<20} {gradwire.method(spec)}")
    print(f"{'':<20} {report.payload} bytes, {report.payload_ratio:.1f}x smaller; error of one step {error:.2f}")
