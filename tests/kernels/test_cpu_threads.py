"""CPU kernels say the same with any number of threads, and when several Python threads call them at once.

The tests have one thread, so this is a program of its own, run with four; there even small tensors are shared out.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

LENGTHS = (70_001, 0, 5, 60_000)
N = sum(LENGTHS)
COUNTS = (1, 3, 4)
CALLERS = 2


def test_any_number_of_threads() -> None:
    more = {"NUMBA_NUM_THREADS": "4", "OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "passive"}
    environment = {**os.environ, **more}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["kernels"] > 25
    assert said["threads"] == {str(count): [count, count] for count in COUNTS}  # Numba's and torch's
    assert len(said["wrong"]) == len(COUNTS) + CALLERS and not any(said["wrong"].values()), said["wrong"]


def outcomes() -> Iterator[tuple[str, Tensor]]:
    """All that kernels make of the same numbers."""
    x = torch.randn(N, generator=torch.Generator().manual_seed(3))
    yield from coded(x)
    yield from selected(x)
    yield from merged(x)


def coded(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    from gradwire.core.keys import Key
    from gradwire.kernels import quantize, select

    key, table, names = Key(1, 2, 3), torch.tensor(LENGTHS), tuple("abcd")
    coders = {
        "sign": (quantize.sign_encode(x, table, False), lambda data: quantize.sign_decode(data, table)),
        "onebit": (quantize.onebit_encode(x, table), lambda data: quantize.onebit_decode(data, table)),
        "ternary": (
            quantize.ternary_encode(x, table, names, key, 2.5),
            lambda data: quantize.ternary_decode(data, table),
        ),
        "natural": (quantize.natural_encode(x, table, names, key), lambda data: quantize.natural_decode(data, N)),
        "qsgd": (
            quantize.qsgd_encode(x, table, names, key, 127, 100),
            lambda data: quantize.qsgd_decode(data, table, 127, 100, False),
        ),
        "int4": (quantize.integer_encode(x, table, 4, 5), lambda data: quantize.integer_decode(data, table, 4, 5)),
        "fp16": (quantize.cast_encode(x, torch.float16), quantize.cast_decode),
    }
    for name, (data, decode) in coders.items():
        yield f"{name} encode", data
        yield f"{name} decode", decode(data)
    yield "draw", select.draw(key, names, LENGTHS, (700, 0, 5, 60_000), torch.device("cpu"))


def selected(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    from gradwire.kernels import fused

    counts = tuple(-(-n // 100) for n in LENGTHS)
    yield "topk", fused.topk(x, LENGTHS, counts)
    for name, grad in (("fp32", x), ("bf16", x.bfloat16())):
        residual, momentum = x.flip(0).clone(), x.roll(9).clone()
        found = fused.carry_topk_(
            grad, (residual, momentum), (residual, momentum), fused.Accumulation(momentum=0.9), LENGTHS, counts
        )
        yield f"carry_topk_ {name}", torch.cat((found.indices, found.values, residual, momentum))
        for bits in (1, 4):
            residual = x.flip(0).clone()
            how = (grad, residual, 0.9, LENGTHS)
            data, _ = fused.feedback_sign_(*how, False) if bits == 1 else fused.feedback_integer_(*how, bits, 100)
            yield f"feedback {bits} {name}", torch.cat((data, residual))


def merged(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    from gradwire.kernels import fused, quantize

    table, bounds = torch.tensor(LENGTHS), (0, 30_000, 60_000, 90_000)
    draws = [torch.Generator().manual_seed(rank) for rank in range(3)]
    indices = torch.cat([torch.randperm(N, generator=draw)[:30_000].sort().values for draw in draws])
    yield "scatter_mean", fused.scatter_mean(x[:90_000], indices, bounds, N, 3)
    out = torch.empty(N)
    fused.scatter_mean_(out, x[:90_000], indices, bounds, 3)
    yield "scatter_mean_", out
    ways = (
        (fused.merge_integer, (4, 256), lambda y: quantize.integer_encode(y, table, 4, 256)),
        (fused.merge_sign, (False,), lambda y: quantize.sign_encode(y, table, False)),
    )
    for merge, how, encode in ways:
        data, debt = merge(torch.stack([encode(x.roll(i)) for i in range(3)]), x.flip(0).clone(), LENGTHS, *how)
        assert debt is not None
        yield merge.__name__, torch.cat((data, debt))


def main() -> None:
    import numba

    from gradwire.kernels.cpu import threads
    from gradwire.kernels.dispatch import reference_only

    threads._SMALL = 0
    torch.set_num_threads(1)
    with reference_only():
        known = dict(outcomes())
    wrong: dict[str, list[str]] = {}
    counts: dict[int, tuple[int, int]] = {}

    def compare(title: str) -> None:
        found = dict(outcomes())
        wrong[title] = [name for name in known if not torch.equal(found[name], known[name])]

    for count in COUNTS:
        torch.set_num_threads(count)
        compare(f"{count} threads")
        counts[count] = numba.get_num_threads(), torch.get_num_threads()
    callers = [threading.Thread(target=compare, args=(f"caller {i}",)) for i in range(CALLERS)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    print(json.dumps({"kernels": len(known), "threads": counts, "wrong": wrong}))


if __name__ == "__main__":
    main()
