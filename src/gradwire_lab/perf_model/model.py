"""Model: what a forecast knows of a network: its tensors, when their gradients arrive, and what is sent of them."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from gradwire.engine.plan import BUCKET_BYTES, Plan, build, default_rules
from gradwire_lab.perf_model.candidates import arguments
from gradwire_lab.perf_model.comm_schedule import SETTLED, BucketSchedule, schedule
from gradwire_lab.perf_model.loopback import CollectiveCall

# What everything is measured against: DistributedDataParallel, plain or with one of torch's hooks.
DENSE = ("ddp-fp32", "ddp-bf16", "ddp-fp16")
DTYPES = {"ddp-fp32": torch.float32, "ddp-bf16": torch.bfloat16, "ddp-fp16": torch.float16}

_FORMATS = {str(dtype).removeprefix("torch."): dtype for dtype in (*DTYPES.values(), torch.float64)}
_FIRST_BUCKET = 2**20  # bytes: DDP's first bucket is small, so that something is on the wire early
_BUCKET = 25 * 2**20


@dataclass(frozen=True, eq=False)  # one of a kind: looking plans up by hundreds of shapes would cost more than they do
class ModelProfile:
    """A network's trainable tensors.

    Attributes:
        shapes: By name, in order of registration.
        arrival: When in the backward pass each gradient is there, 0 to 1, if that was measured.
        dtype: Of the gradients, which DDP adds up as they are.
    """

    shapes: Mapping[str, tuple[int, ...]]
    arrival: Mapping[str, float] = field(default_factory=dict)
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in _FORMATS:
            raise ValueError(f"there are no forecasts for gradients in {self.dtype}, only in {', '.join(_FORMATS)}")

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor], arrival: Mapping[str, float] | None = None) -> "ModelProfile":
        """A network by its parameters; of mixed formats, the one that most elements have."""
        shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        found: Counter[str] = Counter()
        for p in parameters.values():
            found[str(p.dtype).removeprefix("torch.")] += p.numel()
        return cls(shapes, arrival or {}, found.most_common(1)[0][0])

    @property
    def format(self) -> torch.dtype:
        return _FORMATS[self.dtype]

    @property
    def dense(self) -> tuple[str, ...]:
        """Ways that do not compress: DDP as it is, which is called ddp-fp32 here, and hooks that send fewer bytes."""
        return tuple(spec for spec in DENSE if spec == DENSE[0] or DTYPES[spec].itemsize < self.format.itemsize)

    def called(self, spec: str) -> str:
        """A way by the format that it really sends: plain DDP's is that of the gradients."""
        short = {dtype: name for name, dtype in DTYPES.items()}
        return spec if spec != DENSE[0] else short.get(self.format, f"ddp-{self.dtype}")

    def summed(self, spec: str) -> torch.dtype:
        """In what format a dense way adds gradients up: a hook's, unless they are as short already."""
        return DTYPES[spec] if DTYPES[spec].itemsize < self.format.itemsize else self.format

    @cached_property
    def kind(self) -> str:
        """What kind of network, by the names and shapes of its tensors; empty, where they do not tell.

        ``transformer``: a name has "attn" or "attention" in it. Else ``recurrent``: one has "weight_hh", as those of
        `torch.nn.RNNBase` and its cells. Else ``convolutional``: a tensor has three dimensions or more.
        """
        names = " ".join(self.shapes).lower()
        if "attn" in names or "attention" in names:
            return "transformer"
        if "weight_hh" in names:
            return "recurrent"
        return "convolutional" if any(len(shape) > 2 for shape in self.shapes.values()) else ""

    @cached_property
    def elements(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    @cached_property
    def ready(self) -> dict[str, float]:
        """When each gradient is there; where it was not measured, as if any weight took as long as any other."""
        arrived, found = 0, {}
        for name in reversed(list(self.shapes)):
            arrived += math.prod(self.shapes[name])
            found[name] = self.arrival.get(name, arrived / self.elements)
        return found

    @cached_property
    def delivered(self) -> dict[str, float]:
        """When DDP hands each gradient over: with its bucket."""
        found = {}
        for bucket in self._buckets(DENSE[0]):
            found.update(dict.fromkeys(bucket.names, max(self.ready[name] for name in bucket.names)))
        return found

    def plan(self, spec: str, world: int, bucket_bytes: int = BUCKET_BYTES) -> Plan:
        """The plan that `gradwire.compress` makes of a spec."""
        text, options = arguments(spec)
        return build(self.shapes, default_rules(text, **options), world, bucket_bytes)  # type: ignore[arg-type]

    def buckets(self, spec: str, world: int, bucket_bytes: int = BUCKET_BYTES) -> tuple[BucketSchedule, ...]:
        """What is sent in a step once all warm-up is over, in order."""
        key = (spec, world, bucket_bytes)
        if key not in self._known:
            dense = spec in DENSE
            buckets = self._buckets(spec) if dense else schedule(self.plan(*key), SETTLED)
            self._known[key] = tuple(
                replace(bucket, ready=max(self.delivered[name] for name in bucket.names)) for bucket in buckets
            )
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[str, int, int], tuple[BucketSchedule, ...]]:
        return {}

    def _buckets(self, spec: str) -> Iterator[BucketSchedule]:
        """What DDP sends: gradients in the reverse order of registration, a bucket closed once it is full."""
        held: list[str] = []
        nbytes, limit = 0, _FIRST_BUCKET
        for name in reversed(list(self.shapes)):
            held.append(name)
            nbytes += self.format.itemsize * math.prod(self.shapes[name])
            if nbytes >= limit:
                yield _bucket(held, self.shapes, self.summed(spec))
                held, nbytes, limit = [], 0, _BUCKET
        if held:
            yield _bucket(held, self.shapes, self.summed(spec))


def _bucket(names: Sequence[str], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> BucketSchedule:
    elements = sum(math.prod(shapes[name]) for name in names)
    return BucketSchedule(tuple(names), elements, (CollectiveCall("all_reduce", elements * dtype.itemsize, dtype),))
