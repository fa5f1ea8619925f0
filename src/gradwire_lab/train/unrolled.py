"""Unrolled: a layer of LSTM for the columns of several workers, step by step, with weight gradients of each worker.

    i, f, g, o = W x_t + U h_(t-1) + b, the first, second and last through a sigmoid, the third through tanh
    c_t = f c_(t-1) + i g;  h_t = o tanh(c_t)

cuDNN's LSTM adds the gradients of all columns up. Unrolled, the gradients of the gates lie in memory when the last step
is undone, and one product for each worker makes its weight gradients of them.
"""

from typing import Any

import torch
from torch import Tensor


class Unrolled(torch.autograd.Function):
    """x [columns, time, width], h and c [columns, hidden] -> all h, and the last h and c."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h: Tensor,
        c: Tensor,
        w: Tensor,
        u: Tensor,
        bw: Tensor,
        bu: Tensor,
        workers: int,
        places: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = x.transpose(0, 1).contiguous()  # by time
        driven = torch.addmm(bw + bu, x.flatten(0, 1), w.t()).view(*x.shape[:2], -1)
        hiddens, cells, gates = [h], [c], []
        for told in driven:
            h, c, gate = _cell(told, h @ u.t(), c)
            hiddens.append(h)
            cells.append(c)
            gates.append(gate)
        ctx.save_for_backward(x, w, u, *hiddens, *cells, *gates)
        ctx.workers, ctx.places = workers, places
        return torch.stack(hiddens[1:], 1), h, c

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dh: Tensor, dc: Tensor) -> Any:
        x, w, u, *rest = ctx.saved_tensors
        steps = len(x)
        hiddens, cells, gates = rest[: steps + 1], rest[steps + 1 : 2 * steps + 2], rest[2 * steps + 2 :]
        found = []
        for t in reversed(range(steps)):
            gate, dc = _cell_back(dh + dy[:, t], dc, cells[t], cells[t + 1], gates[t])
            dh = gate @ u
            found.append(gate)
        undone = torch.stack(found[::-1])
        _share(ctx, undone, x, torch.stack(hiddens[:-1]))
        dx = (undone @ w).transpose(0, 1) if ctx.needs_input_grad[0] else None
        return dx, dh, dc, *(None,) * 6


def _share(ctx: Any, gates: Tensor, x: Tensor, h: Tensor) -> None:
    """Each worker's weight gradients. All arguments are [time, workers * columns, ...]."""
    gates, x, h = (each.unflatten(1, (ctx.workers, -1)).transpose(0, 1).flatten(1, 2) for each in (gates, x, h))
    of_w, of_u, *of_biases = ctx.places
    for place, inputs in ((of_w, x), (of_u, h)):
        if place is not None:
            place.copy_(gates.transpose(1, 2) @ inputs)
    for place in of_biases:
        if place is not None:
            place.copy_(gates.sum(1))


def _cell(told: Tensor, kept: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """h, c, and the gates."""
    if told.is_cuda:
        made: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._thnn_fused_lstm_cell(told, kept, c)
        return made
    i, f, g, o = (told + kept).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = f * c + i * g
    return o * c.tanh(), c, torch.cat((i, f, g, o), 1)


def _cell_back(dh: Tensor, dc: Tensor, before: Tensor, c: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the gates, before they went through their functions, and of the last c."""
    if dh.is_cuda:
        of_gates, of_c, _ = torch.ops.aten._thnn_fused_lstm_cell_backward_impl(dh, dc, before, c, gates, False)
        return of_gates, of_c
    i, f, g, o = gates.chunk(4, 1)
    bent = c.tanh()
    dc = dc + dh * o * (1 - bent * bent)
    parts = dc * g * i * (1 - i), dc * before * f * (1 - f), dc * i * (1 - g * g), dh * bent * o * (1 - o)
    return torch.cat(parts, 1), dc * f
