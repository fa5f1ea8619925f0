"""A compressed reduce-scatter for FSDP2, where there are no replicas to compress between.

Every rank sends each other rank its rows, encoded, and adds up what it receives in float32. No error is kept: it would
take memory for the whole gradient on every rank. So a codec must be unbiased, or have at least four bits an entry.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from gradwire.codecs import Codec, EncodeInput, codec
from gradwire.comm.torch_backend import TorchBackend, connect
from gradwire.core import Key, Payload, Segments, SendRecv
from gradwire.integrations.consistency import agree, errors_on_all_ranks
from gradwire.integrations.sharded.fsdp import explain_errors, param_groups

_SAMPLE = Segments.single(2**16)


@dataclass(frozen=True)
class ReduceScatterReport:
    """Bytes so far.

    Attributes:
        calls: How many gradients of groups were reduced.
        sent: Bytes that this rank sent.
        dense: Bytes that it would have sent in float32.
    """

    calls: int
    sent: float
    dense: float


class CompressedReduceScatter:
    """What FSDP calls to reduce gradients."""

    def __init__(self, chosen: Codec, seed: int = 0) -> None:
        self._codec, self._seed = chosen, seed
        self._calls, self._dense = 0, 0.0
        self._backends: dict[dist.ProcessGroup, TorchBackend] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a gradient."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Write the mean or the sum of all ranks' rows for this rank to the output.

        Raises:
            ValueError: The gradient is to be divided by another number than that of the ranks.
        """
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise ValueError(
                f"gradients are reduced by {op}, whose factor torch does not show; leave out "
                "set_gradient_divide_factor, or divide the loss"
            )
        backend = self._backends.setdefault(group, TorchBackend(group))
        rows = input_tensor.view(backend.world, -1).float()
        total = self._exchange(rows, backend)
        output_tensor.copy_(total / backend.world if op == dist.ReduceOp.AVG else total)
        self._calls += 1
        self._dense += 4 * rows.numel() * (backend.world - 1) / backend.world

    def _exchange(self, rows: Tensor, backend: TorchBackend) -> Tensor:
        """The sum of all ranks' rows for this rank. This rank's own is exact."""
        me, world, n = backend.rank, backend.world, rows.shape[1]
        key = Key(self._seed, self._calls, me)
        tables = [Segments.single(n, f"row {rank}") for rank in range(world)]
        out = {peer: Payload(self._message(rows[peer], tables[peer], key)) for peer in range(world) if peer != me}
        sizes = {peer: payload.nbytes for peer, payload in out.items()}  # rows are equally long
        (received,) = backend.answer([SendRecv(out, sizes)]) if out else ({},)
        total, nonfinite = rows[me].clone(), torch.zeros((), dtype=torch.bool, device=rows.device)
        for peer, payload in received.items():
            total += self._codec.decode(Payload(payload.data[:-1]), tables[me], key.of(peer))
            nonfinite |= payload.data[-1] > 0
        return total.masked_fill_(nonfinite, torch.nan)

    def _message(self, row: Tensor, table: Segments, key: Key) -> Tensor:
        """A row, encoded; the last byte says whether it has entries that are not finite, which no codec can encode."""
        finite = torch.isfinite(row).all()
        row = torch.where(finite, row, 0.0)
        payload = self._codec.encode(EncodeInput(row, row, {}, table), key).payload
        return torch.cat([payload.data, (~finite).to(torch.uint8).view(1)])

    def report(self) -> ReduceScatterReport:
        """Bytes so far."""
        return ReduceScatterReport(self._calls, sum(x.traffic.sent for x in self._backends.values()), self._dense)


def compress_reduce_scatter(model: nn.Module, spec: str | Codec, *, seed: int = 0) -> CompressedReduceScatter:
    """Compress the reduce-scatter of all parts of a model under ``fully_shard``. All ranks must call it.

    Args:
        model: Sharded already.
        spec: Such as ``"int8"``, ``"fp8"``, ``"hadamard | int4"`` or ``"bf16"``.
        seed: The seed of all random bits; equal on all ranks.

    Returns:
        A handle: ``report()``.
    """
    backend = connect()
    with errors_on_all_ranks(backend):
        chosen = codec(spec)
        _check(chosen)
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        if not modules:
            raise ValueError("no part of the model is sharded; call fully_shard first")
        if not hasattr(modules[0], "set_custom_reduce_scatter"):
            raise ValueError(f"torch {torch.__version__} takes no other reduce-scatter; install torch 2.9 or newer")
    agree(backend, f"reduce-scatter by {chosen}; seed {seed}", {})
    compressed = CompressedReduceScatter(chosen, seed)
    if backend.barrier is not None:
        explain_errors(param_groups(model), backend.barrier.explain)
    for module in modules:
        module.set_custom_reduce_scatter(compressed)  # type: ignore[arg-type]
    return compressed


def _check(chosen: Codec) -> None:
    bits = 8 * chosen.size(_SAMPLE) / _SAMPLE.total
    if not chosen.traits.fixed or chosen.memories:
        raise ValueError(f"messages of {chosen} vary in length or need memory; take int8, fp8, hadamard | int4 or bf16")
    if bits < 4 and not chosen.traits.unbiased:
        raise ValueError(
            f"{chosen} loses too much without error feedback, for which FSDP has no memory; take int8, fp8, "
            "hadamard | int4 or bf16, or compress between replicas"
        )
