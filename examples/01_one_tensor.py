"""One tensor to bytes and back, and what becomes of the part that was lost.

Run it with `python examples/01_one_tensor.py`. No network is involved.
"""

import torch

import gradwire
from gradwire.extend import EncodeInput, Key, Segments

n = 100_000
gradient = torch.randn(n, generator=torch.Generator().manual_seed(0)) ** 3  # a few large entries, many small ones
table = Segments.single(n)
key = Key(seed=0, step=0, rank=0)  # where random bits come from, for codecs that draw any

print(f"{'codec':<28} {'bytes':>8} {'ratio':>7}   share of the gradient's length that is lost")
for spec in ("fp16", "int8", "qsgd(levels=7)", "sign", "topk(0.01)", "topk(0.01) | sign"):
    codec = gradwire.codec(spec)
    message = codec.encode(EncodeInput(gradient, gradient, {}, table), key)
    heard = codec.decode(message.payload, table, key)
    nbytes = message.payload.nbytes
    lost = float((gradient - heard).norm() / gradient.norm())
    print(f"{spec:<28} {nbytes:>8} {4 * n / nbytes:>6.1f}x   {lost:.3f}")

# With error feedback, what is lost today is said later: the average of what was heard tends to the gradient.
codec = gradwire.codec("topk(0.01) | sign")
debt, total = torch.zeros(n), torch.zeros(n)
for step in range(1, 201):
    target = gradient + debt
    heard = codec.decode(codec.encode(EncodeInput(gradient, target, {}, table), key).payload, table, key)
    debt = target - heard
    total += heard
    if step in (1, 10, 100, 200):
        lost = float((gradient - total / step).norm() / gradient.norm())
        print(f"with error feedback, lost after {step:>3} steps: {lost:.3f}")
