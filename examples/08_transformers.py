"""Hugging Face's Trainer, with one callback more.

`torchrun --nproc-per-node 2 examples/08_transformers.py FOLDER` trains in two processes, on their GPUs or on a CPU, and
leaves checkpoints in the folder. It needs `pip install gradwire[transformers]`.
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from gradwire.integrations.transformers import TrainerCompression

torch.manual_seed(0)
starts = torch.randint(0, 16, (512, 1))
rows = (starts + 3 * torch.arange(24)) % 16  # counting by threes
data = [{"input_ids": row, "labels": row} for row in rows]

sizes = {"vocab_size": 16, "n_positions": 24, "n_embd": 64, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
arguments = TrainingArguments(
    sys.argv[1],
    max_steps=30,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    save_steps=30,
    report_to=[],
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(model, arguments, train_dataset=data)

compression = TrainerCompression(trainer, "int4")  # these two lines; the Trainer steps by AdamW
trainer.add_callback(compression)

loss = trainer.train().training_loss  # the folder's checkpoint holds the memories of every rank
if trainer.is_world_process_zero():
    print(f"loss {loss:.4f} on average\n{compression.wire.report()}")
trainer.accelerator.end_training()
