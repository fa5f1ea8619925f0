"""The LSTM of local-network.jsonl, 9.0 million parameters: a workload of `gradwire bench network`."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradwire_lab.train.models.lstm import LanguageLSTM

VOCAB, BATCH, LENGTH = 10_000, 2, 35


def lstm() -> tuple[nn.Module, object]:
    """Two layers of 350, on random tokens."""
    torch.manual_seed(0)
    model = LanguageLSTM(VOCAB, hidden=350, layers=2)
    tokens, state = torch.randint(VOCAB, (BATCH, LENGTH + 1)), model.start(BATCH)

    def loss(run: nn.Module) -> Tensor:
        logits, _ = run(tokens[:, :-1], state)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return model, loss
