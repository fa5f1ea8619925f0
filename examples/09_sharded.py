"""A sharded model: FSDP2 reduces inside a replica, and gradwire compresses between replicas.

Run it with `torchrun --standalone --nproc-per-node 4 examples/09_sharded.py`. Two replicas of two ranks each are
trained on the handwritten digits, on CPUs over gloo.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    fully_shard(model, mesh=mesh["shard"])
    wire = gradwire.compress(model, "topk(0.02) | sign", across=mesh["replicate"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    digits, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(digits[rank::world], dtype=torch.float32) / 16, torch.tensor(labels[rank::world])
    for step in range(50):
        batch = torch.arange(32 * step, 32 * (step + 1)) % len(x)
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()  # hooks average the gradient
        optimizer.step()
    accuracy = (model(x).argmax(1) == y).float().mean()
    dist.all_reduce(accuracy)
    if rank == 0:
        print(wire.report())
        print(f"accuracy {accuracy / world:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
