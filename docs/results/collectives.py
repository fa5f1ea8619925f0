"""How long collectives take among hosts on shaped links.

gradwire hosts run --hosts 4 --rate 100mbit --delay 5ms -- python docs/results/collectives.py 100mbit,5ms
"""

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from gradwire.comm.backend import Backend
from gradwire.comm.collectives import AllGatherOp, AllReduceOp, AllToAllOp, Collective
from gradwire.comm.torch_backend import connect

SIZES = (8, 4096, 2**16, 2**18, 2**20, 2**22)


def straight(link: Backend, each: int, peers: set[int]) -> AllToAllOp:
    shares = tuple(each if peer in peers else 0 for peer in range(link.world))
    return AllToAllOp(torch.zeros(sum(shares), dtype=torch.uint8), shares, shares)


def makers(link: Backend, n: int) -> dict[str, Callable[[], Collective]]:
    others = set(range(link.world)) - {link.rank}
    beside = {(link.rank + 1) % link.world, (link.rank - 1) % link.world}
    return {
        "all_reduce": lambda: AllReduceOp(torch.zeros(n // 2, dtype=torch.float16), "sum"),
        "all_gather": lambda: AllGatherOp(torch.zeros(n, dtype=torch.uint8)),
        "all_to_all": lambda: straight(link, max(1, n // len(others)), others),
        "swap": lambda: straight(link, max(1, n // 2), beside),
    }


def seconds(link: Backend, make: Callable[[], Collective], repeats: int) -> float:
    found = []
    for _ in range(repeats + 1):
        collective = make()
        dist.barrier()
        began = time.perf_counter()
        link.move(collective)
        found.append(time.perf_counter() - began)
    slowest = torch.tensor([statistics.median(found[1:])], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def main(text: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    link = connect()
    for n in SIZES:
        for kind, make in makers(link, n).items():
            if kind == "all_gather" and n > 2**20:
                continue
            took = seconds(link, make, 9 if n < 2**20 else 5)
            if link.rank == 0:
                row = {"link": text, "world": link.world, "kind": kind, "bytes": n, "ms": round(1e3 * took, 2)}
                print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
