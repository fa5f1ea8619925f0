"""A plain training loop over four workers, all of them in this process.

`gradwire.lockstep` steps four replicas together, with the code and the bytes of four real processes. Run it with
`python examples/02_plain_loop.py`, or with another spec behind it.
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import gradwire

spec = sys.argv[1] if len(sys.argv) > 1 else "topk(0.05) | sign"
torch.manual_seed(0)

teacher = nn.Linear(64, 10)
images = torch.randn(512, 64)
labels = teacher(images).argmax(1)

replicas = [nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)) for _ in range(4)]
sync = gradwire.lockstep(replicas, spec)  # all replicas now start as the first
optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in replicas]

for step in range(100):
    batch = torch.randperm(512)[:128]
    losses = []
    for rank, (model, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
        mine = batch[rank::4]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        losses.append(loss.item())
    sync()  # every p.grad is now what the group agreed on
    for optimizer in optimizers:
        optimizer.step()
    if step % 20 == 19:
        print(f"step {step + 1:>3}  loss {sum(losses) / 4:.4f}")

same = all(torch.equal(a, b) for a, b in zip(replicas[0].parameters(), replicas[3].parameters(), strict=True))
print(f"replicas agree bit for bit: {same}")
print(sync.wires[0].report())
