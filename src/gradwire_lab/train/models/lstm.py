"""LSTM language model: embedding, layers of LSTM, a softmax over the vocabulary; dropout before and after every layer.

Papers: Zaremba et al., "Recurrent neural network regularization", 2014. https://arxiv.org/abs/1409.2329
        Press and Wolf, "Using the output embedding to improve language models", EACL 2017, for the tied weights.
        https://arxiv.org/abs/1608.05859

Every layer is an `nn.LSTM` of its own: dropout inside a deep one would come from a state of cuDNN that no checkpoint
can hold, and a resumed run would not be the same run.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

State = tuple[Tensor, Tensor]  # hidden and cell, each [layers, batch, hidden]


class LanguageLSTM(nn.Module):
    """Tokens [batch, time] and a state -> logits [batch, time, vocab] and the next state."""

    def __init__(
        self,
        vocab: int,
        hidden: int = 650,
        layers: int = 2,
        embed: int | None = None,
        dropout: float = 0.5,
        tied: bool = False,
        init_range: float = 0.1,
    ) -> None:
        """By default, ``embed`` is as wide as ``hidden``.

        The embedding and the softmax start uniform in +-``init_range``, the LSTM as torch would have it.
        """
        embed = hidden if embed is None else embed
        if layers < 1:
            raise ValueError(f"an LSTM has at least one layer, not {layers}")
        if tied and embed != hidden:
            raise ValueError(f"a tied embedding is as wide as the hidden state, but embed={embed} and hidden={hidden}")
        super().__init__()
        self.hidden, self.dropout = hidden, dropout
        self.embedding = nn.Embedding(vocab, embed)
        widths = [embed] + [hidden] * (layers - 1)
        self.layers = nn.ModuleList(nn.LSTM(width, hidden, batch_first=True) for width in widths)
        self.head = nn.Linear(hidden, vocab)
        nn.init.uniform_(self.head.weight, -init_range, init_range)
        nn.init.zeros_(self.head.bias)
        if tied:
            self.embedding.weight = self.head.weight
        else:
            nn.init.uniform_(self.embedding.weight, -init_range, init_range)

    def start(self, batch: int) -> State:
        """The state before the first token: zeros."""
        zeros = self.head.weight.new_zeros(len(self.layers), batch, self.hidden)
        return zeros, zeros.clone()

    def forward(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        x = F.dropout(self.embedding(tokens), self.dropout, self.training)
        hiddens, cells = [], []
        for i, layer in enumerate(self.layers):
            x, (h, c) = layer(x, (state[0][i : i + 1], state[1][i : i + 1]))
            x = F.dropout(x, self.dropout, self.training)
            hiddens.append(h)
            cells.append(c)
        return self.head(x), (torch.cat(hiddens), torch.cat(cells))
