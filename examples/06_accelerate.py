"""Hugging Face Accelerate, with one line more.

`torchrun --nproc-per-node 2 examples/06_accelerate.py FOLDER` trains in two processes, on their GPUs or on a CPU, and
leaves a checkpoint in the folder. It needs `pip install gradwire[accelerate]`.
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from gradwire.integrations.accelerate import attach

torch.manual_seed(0)
teacher = nn.Linear(64, 10)
images = torch.randn(4096, 64)
with torch.no_grad():
    labels = teacher(images).argmax(1)

accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

wire = attach(accelerator, model, "topk(0.05) | sign")  # this line

for _ in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)  # every second time, DDP calls the wire here
            optimizer.step()
            optimizer.zero_grad()

accelerator.save_state(sys.argv[1])  # with the residuals of every rank
accelerator.wait_for_everyone()
accelerator.load_state(sys.argv[1])

accelerator.print(f"loss {loss.item():.4f} in {accelerator.num_processes} processes\n{wire.report()}")
accelerator.end_training()
