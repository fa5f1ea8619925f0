"""GPT: a decoder-only transformer, with learned or rotary positions.

Papers: Radford et al., "Language models are unsupervised multitask learners", 2019 (GPT-2).
        Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021, for the rotary positions.
        https://arxiv.org/abs/2104.09864

`gpt2` has the 124,439,808 parameters of GPT-2 small; the defaults of `GPT` make a model of about five million.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.proj = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, turn: Tensor | None) -> Tensor:
        b, t, width = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # each [b, heads, t, d]
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return F.dropout(self.proj(y.transpose(1, 2).reshape(b, t, width)), self.dropout, self.training)


class TransformerBlock(nn.Module):
    """Attention, then two linear layers, each on a normed input and added to what came in."""

    def __init__(self, width: int, heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, bias=bias)
        self.attention = Attention(width, heads, dropout, bias)
        self.norm2 = nn.LayerNorm(width, bias=bias)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.proj = nn.Linear(4 * width, width, bias=bias)
        self.dropout = dropout

    def forward(self, x: Tensor, turn: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm1(x), turn)
        y = self.proj(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + F.dropout(y, self.dropout, self.training)


class GPT(nn.Module):
    """Tokens [batch, time] -> logits [batch, time, vocab]."""

    turns: Tensor

    def __init__(
        self,
        vocab: int = 256,
        width: int = 256,
        layers: int = 6,
        heads: int = 8,
        context: int = 256,
        positions: str = "learned",
        dropout: float = 0.0,
        tied: bool = True,
        bias: bool = True,
    ) -> None:
        """``positions`` are ``learned`` or ``rotary``, ``tied`` shares the embedding with the head."""
        rotary = positions == "rotary"
        if positions not in ("learned", "rotary"):
            raise ValueError(f"there are no positions called {positions!r}; choose 'learned' or 'rotary'")
        if width % heads or (rotary and width // heads % 2):
            raise ValueError(
                f"a width of {width} does not make {heads} heads of one (for rotary: even) size; change either"
            )
        super().__init__()
        self.context, self.dropout = context, dropout
        self.embedding = nn.Embedding(vocab, width)
        self.positions = None if rotary else nn.Embedding(context, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, dropout, bias) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=bias)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        turns = angles(context, width // heads) if rotary else torch.empty(0)
        self.register_buffer("turns", turns, persistent=False)
        self._init(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        t = tokens.shape[1]
        if t > self.context:
            raise ValueError(
                f"{t} tokens do not fit into this GPT's context of {self.context}; cut them, or raise context"
            )
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[:t]
        x = F.dropout(x, self.dropout, self.training)
        turn = self.turns[:, :t] if self.positions is None else None
        for block in self.blocks:
            x = block(x, turn)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _init(self, layers: int) -> None:
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(weight)
            elif weight.dim() == 2:
                # What is added to the residual stream 2 * layers times starts smaller by the root of that.
                scale = (2 * layers) ** -0.5 if name.endswith("proj.weight") else 1.0
                nn.init.normal_(weight, 0.0, 0.02 * scale)


def gpt2(
    vocab: int = 50257, context: int = 1024, positions: str = "learned", dropout: float = 0.0, tied: bool = True
) -> GPT:
    """GPT-2 small: 124 million parameters."""
    return GPT(vocab, 768, 12, 12, context, positions, dropout, tied)


def angles(context: int, size: int) -> Tensor:
    """Cosines and sines of every position's turns. -> [2, context, size / 2]."""
    speeds = 10000.0 ** (-torch.arange(0, size, 2).float() / size)
    turns = torch.arange(context).float()[:, None] * speeds
    return torch.stack((turns.cos(), turns.sin()))


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turn each pair (i, i + size / 2) of the last axis by its position's angle."""
    cos, sin = turn.to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)
