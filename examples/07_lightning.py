"""Lightning, with one callback more.

`python examples/07_lightning.py FOLDER` trains in two processes on a CPU, the second of which Lightning starts by
itself, and leaves a checkpoint in the folder. It needs `pip install gradwire[lightning]`.
"""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from gradwire.integrations.lightning import LightningCompression


class Student(LightningModule):
    """A small network that learns from a linear teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


torch.manual_seed(0)
teacher = nn.Linear(64, 10)
images = torch.randn(4096, 64)
with torch.no_grad():
    labels = teacher(images).argmax(1)
loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True)

compression = LightningCompression("topk(0.05) | sign")  # this line, and the callback below
trainer = Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=2,
    accumulate_grad_batches=2,
    callbacks=[compression],
    default_root_dir=sys.argv[1],
    enable_progress_bar=False,
    logger=False,
)
trainer.fit(Student(), loader)  # checkpoints hold the residuals of every rank

if trainer.is_global_zero and compression.wire is not None:
    print(f"{trainer.world_size} processes, checkpoint {trainer.checkpoint_callback.best_model_path}")
    print(compression.wire.report())
