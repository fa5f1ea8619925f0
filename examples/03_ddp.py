"""DistributedDataParallel with one line more.

`python examples/03_ddp.py` starts two processes by itself; under `torchrun --nproc-per-node 2 examples/03_ddp.py` it is
one of those that torchrun started.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradwire

STEPS = 50


def train() -> None:
    """Train in a process group that is there already."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    teacher = nn.Linear(64, 10)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    wire = gradwire.compress(model, "topk(0.05) | sign")  # this line
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    data = torch.Generator().manual_seed(rank)  # every rank sees its own data
    for _ in range(STEPS):
        images = torch.randn(64, 64, generator=data)
        with torch.no_grad():
            labels = teacher(images).argmax(1)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()  # DDP calls the wire here, bucket by bucket
        optimizer.step()
    if rank == 0:
        print(f"rank {rank} of {world}: loss {loss.item():.4f}\n{wire.report()}")


def start(rank: int, world: int, meeting: str) -> None:
    """One of the processes that this script starts; they meet in a file."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    train()
    dist.destroy_process_group()  # when the model that uses it is gone


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        train()
        dist.destroy_process_group()
    else:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(start, (2, f"{folder}/meeting"), nprocs=2)
