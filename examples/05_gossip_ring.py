"""Eight workers in a ring, each of which talks to its two neighbors only, in one bit per parameter.

There is no server and no all-reduce. `gradwire.gossip_lockstep` steps eight replicas in this process, with the code and
the bytes of eight real ones; a real rank calls `gradwire.gossip(model, ...)` and, after `optimizer.step()`, the net
that it returns. Run it with `python examples/05_gossip_ring.py`, or with another codec behind it.
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import gradwire

WORKERS = 8
codec = sys.argv[1] if len(sys.argv) > 1 else "sign"
torch.manual_seed(0)

teacher = nn.Linear(64, 10)
images = torch.randn(2048, 64)
labels = teacher(images).argmax(1)

replicas = [nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)) for _ in range(WORKERS)]
net = gradwire.gossip_lockstep(replicas, "choco(ring, gamma=auto)", codec)  # all replicas now start as the first
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in replicas]

for step in range(120):
    losses = []
    for rank, (model, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
        mine = torch.randint(0, 2048 // WORKERS, (32,)) * WORKERS + rank  # its own eighth of the data, always
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    net()  # a message to each neighbor; parameters move towards theirs
    if step % 20 == 19:
        mean = sum(losses) / WORKERS
        print(f"step {step + 1:>3}  loss {mean:.4f}  gamma {net.report().gamma:.3f}  distance {net.distance():.3f}")

average = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
net.mean_into_(average)
for name, model in (("one worker", replicas[0]), ("the mean model", average)):
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    print(f"{name} gets {accuracy:.1%} of all images right")
print(net.report())
