"""Ray Train: a `TorchTrainer` whose workers compress their gradients.

Run it with `python examples/10_ray.py` after `pip install 'ray[train]'`. Ray starts the workers and makes their process
group, so a loop of DistributedDataParallel needs one line more.
"""

import ray.train
import ray.train.torch
import torch
from sklearn.datasets import load_digits
from torch import nn

import gradwire


def train() -> None:
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    wire = gradwire.compress(model, "topk(0.02) | sign")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank, world = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    digits, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(digits[rank::world], dtype=torch.float32) / 16, torch.tensor(labels[rank::world])
    for step in range(50):
        batch = torch.arange(32 * step, 32 * (step + 1)) % len(x)
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ray.train.report({"loss": loss.item(), "ratio": wire.report().payload_ratio})
    if rank == 0:
        print(wire.report())


def main() -> None:
    scaling = ray.train.ScalingConfig(num_workers=2, use_gpu=False)
    ray.train.torch.TorchTrainer(train, scaling_config=scaling).fit()


if __name__ == "__main__":
    main()
