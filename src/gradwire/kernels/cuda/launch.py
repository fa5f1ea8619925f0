"""Launches that cost the host little: a compiled kernel is found by a few facts, not by a look at every argument.

Triton works out at every launch how each argument would be specialized, and asks the driver about each pointer; for a
kernel with twenty arguments that takes longer than many a kernel. Where the caller knows by few facts that nothing but
some addresses has changed, the compiled kernel is called at once.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

_MOST = 4096
_known: dict[tuple[Any, ...], tuple[Any, ...]] = {}


def launch(
    kernel: Any, programs: int, facts: Hashable, fresh: tuple[Tensor, ...], rest: tuple[Any, ...], **options: Any
) -> None:
    """Run ``programs`` programs of a kernel.

    Args:
        kernel: A function of `triton.jit`; its parameters are those of ``fresh``, then those of ``rest``.
        programs: How many.
        facts: Whatever decides how the kernel is compiled, and ``rest``. Equal facts must mean fresh tensors of equal
            `form`, and the very same rest.
        fresh: Tensors that may be others at every launch. All are on one device, the current one.
        rest: Arguments, tensors and constants, that follow from the facts.
        options: Options of the compiler; they follow from the facts, too.
    """
    device = fresh[0].get_device()
    key = (id(kernel), device, facts)  # its own hash is one of its source
    known = _known.get(key)
    if known is not None:
        run, function, packed, tail, _ = known
        stream = torch._C._cuda_getCurrentRawStream(device)
        # No hooks: they are for profilers of Triton's own, and would be handed a description of every launch.
        run(programs, 1, 1, stream, function, packed, None, None, None, *[x.data_ptr() for x in fresh], *tail)
        return
    compiled = kernel[(programs, 1, 1)](*map(_plain, fresh), *rest, **options)
    # The interpreter compiles nothing; and a graph that is being captured has memory of its own, which it alone holds.
    if compiled is not None and not torch.cuda.is_current_stream_capturing():
        if len(_known) >= _MOST:
            _known.clear()
        tail = [x.data_ptr() if isinstance(x, Tensor) else x for x in rest]
        # Tensors of rest are held as well: addresses outlive them otherwise, and come to mean something else.
        _known[key] = compiled.run, compiled.function, compiled.packed_metadata, tail, rest


def form(*tensors: Tensor) -> tuple[Any, ...]:
    """What a compiled kernel takes for granted of tensors: their types, and whether they are aligned to 16 bytes."""
    return tuple([(x.dtype, x.data_ptr() % 16 == 0) for x in tensors])


def _plain(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.bool else x
