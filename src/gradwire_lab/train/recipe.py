"""Recipe: everything that decides a training, in eight tables of TOML.

    [data]      which examples, cut and shuffled how
    [model]     which network
    [train]     how long, in which batches, in which precision
    [sync]      what the workers send each other: the arguments of `gradwire.compress`
    [gossip]    or how they average with neighbors: the arguments of `gradwire.gossip`
    [local]     or how they agree on weights every few steps: the arguments of `gradwire.local`
    [optimizer] what is done with the agreed gradient, or with each worker's own
    [schedule]  how the learning rate changes

A recipe that was read is a value; `recipe_files` finds, merges and overrides the files that it is read from, and
`run` trains by it.
"""

import warnings
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from gradwire_lab.train.call_with_options import nearest
from gradwire_lab.train.data import known
from gradwire_lab.train.data.partition import KINDS

LARGEST = 2**63
LARGEST_FLOAT = 2.0**128
Count = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(ge=0.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Kind = Literal["constant", "steps", "cosine", "linear", "exponential", "plateau"]


def _renamed(value: object) -> object:
    if value != "in turn":
        return value
    warnings.warn('passes = "in turn" is now "sequential"', FutureWarning, stacklevel=2)
    return "sequential"


PassMode = Annotated[Literal["auto", "together", "sequential"], BeforeValidator(_renamed)]


class Table(BaseModel):
    """One table of a recipe: no other keys, and no type that is not the key's own."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class DataTable(Table):
    name: Annotated[str, AfterValidator(known)] = "digits"  # or file.py:data
    root: str = ""  # the folder that --data names
    partition: Literal[KINDS] = "shuffled"  # type: ignore[valid-type]
    reshuffle: bool = True
    crop: Annotated[int, Field(ge=0)] = 0  # images: pixels of padding before a random crop
    border: Literal["zero", "reflect"] = "zero"
    flip: bool = False
    cutout: Annotated[int, Field(ge=0)] = 0
    size: Count = 224  # image files: pixels on a side
    sizes: list[list[int]] = []  # images: [epoch, pixels on a side] from that epoch on; empty: always the same
    threads: Count = 8  # image files: decoders
    length: Count = 35  # text: tokens in a row, which is how far back gradients reach
    columns: Count = 10  # text: columns that evaluation reads side by side
    options: dict[str, Any] = {}  # what only this data set knows, such as strict = false

    @model_validator(mode="after")
    def _sizes_in_order(self) -> "DataTable":
        pairs = [entry for entry in self.sizes if len(entry) == 2 and entry[1] >= 1]
        epochs = [pair[0] for pair in pairs]
        if len(pairs) < len(self.sizes) or epochs != sorted(set(epochs)) or epochs[:1] not in ([], [0]):
            raise ValueError("sizes must be pairs [epoch, pixels] by rising epoch from 0, such as [[0, 24], [10, 32]]")
        return self


class ModelTable(Table):
    name: str = "cnn"  # one of gradwire_lab.train.models, an entry point of gradwire.models, or file.py:make
    options: dict[str, Any] = {}  # keywords of its maker


class TrainTable(Table):
    workers: Count = 4
    epochs: Annotated[float, Field(gt=0)] = 18
    iterations: Annotated[int, Field(ge=0)] = 0  # stop after so many steps; 0: by epochs, which the schedule spans
    batch: Count = 60
    batch_per: Literal["worker", "world"] = "worker"  # of whom the batch is
    accumulate: Count = 1  # backward passes to a step; each sees `batch` examples
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    label_smoothing: Share = 0.0
    seed: int = 0
    eval_batch: Count = 500
    eval_every: Count = 1  # epochs
    log_every: Count = 20  # steps
    save_every: Annotated[int, Field(ge=0)] = 0  # steps; 0: at every evaluation
    buffers: Literal["average", "first"] = "average"  # whose batch-norm statistics are evaluated
    channels_last: bool = False
    passes: PassMode = "auto"  # of simulated workers, through the model; auto: see forward_backward.Passes
    graphs: bool = True  # replay forward and backward as CUDA graphs, where there is a GPU
    deterministic: bool = False


class RuleTable(Table):
    """See `gradwire.Rule`."""

    spec: str
    name: str = "*"
    min_dim: int = 0
    max_dim: int | None = None
    min_size: int = 0
    max_size: int | None = None
    feedback: str | None = None
    exchange: str | None = None
    granularity: Literal["layer", "bucket", "model"] = "layer"


class CompressionTable(Table):
    """What [sync] and [local] have in common."""

    spec: str = "dense"
    feedback: str = "auto"  # auto: what the spec needs
    exchange: str = "auto"
    granularity: Literal["layer", "bucket", "model"] = "layer"
    bundle: str = "fp16"  # the codec of 1-D tensors; none: that of all others

    @property
    def parts(self) -> dict[str, str | None]:
        """Feedback and exchange, None where the spec decides."""
        named = {"feedback": self.feedback, "exchange": self.exchange}
        return {part: None if text == "auto" else text for part, text in named.items()}

    @property
    def layout(self) -> dict[str, Any]:
        """Which tensors are compressed together, and how 1-D ones are."""
        return {"granularity": self.granularity, "bundle": None if self.bundle == "none" else self.bundle}


class SyncTable(CompressionTable):
    rules: list[RuleTable] = []
    ramp: Amount = 0.0  # epochs of warm-up, in which the density falls to the spec's own
    densities: list[Annotated[float, Field(gt=0, le=1)]] = []  # of equal parts of the ramp; empty: 1/4, 1/16, ...
    bucket_mb: Annotated[float, Field(gt=0)] = 25.0
    rollback: bool = True  # keep memories of before a step until it is agreed on; false: half the memory
    across: Literal["ranks", "hosts"] | list[list[int]] = "ranks"  # between whom; lists: the ranks of each host
    timeout: Annotated[float, Field(gt=0, le=1e9)] = 300.0  # seconds that a rank waits for others in a step


class GossipTable(Table):
    """See `gradwire.gossip`; where a method is named, workers gossip, and [sync] is not used."""

    method: str = ""  # choco, dpsgd, ...; empty: none
    graph: str = "ring"
    options: dict[str, Any] = {}  # further keywords of the method, such as gamma = 0.45
    H: Count = 1  # local steps before a round
    codec: str = ""  # what messages are written in; empty: float32
    granularity: Literal["layer", "model"] = "layer"
    overlap: bool = False  # whether messages of neighbors are used a step late
    across: Literal["ranks", "hosts"] | list[list[int]] = "ranks"  # who is a node; lists: the ranks of each
    elastic: bool = False  # whether processes go on when one of them dies or stalls, and take it back
    timeout: Annotated[float, Field(gt=0, le=1e9)] = 30.0  # seconds after which they give up a silent neighbor
    passes: PassMode = "auto"  # of simulated workers, through the model


class LocalTable(CompressionTable):
    """See `gradwire.local`; where a spec is given, workers take local steps, and [sync] is not used."""

    spec: str = ""  # sparseloco(H=5), diloco(H=30), ...; empty: none
    codec: str = ""  # how differences are encoded; empty: as the spec says
    passes: PassMode = "auto"  # of simulated workers, through the model

    @property
    def message(self) -> dict[str, str | None]:
        """Codec, feedback and exchange, None where the spec decides."""
        return {"codec": self.codec or None, **self.parts}


class OptimizerTable(Table):
    name: Literal["sgd", "adamw"] = "sgd"
    lr: Annotated[float, Field(gt=0)] = 0.05
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # before compression, where the feedback corrects momentum
    nesterov: bool = False
    weight_decay: Amount = 0.0
    decay_norms: bool = True  # whether 1-D tensors (norms, biases) decay too
    beta1: Share = 0.9
    beta2: Share = 0.999
    eps: Amount = 1e-8
    clip: Amount = 0.0  # longest agreed gradient; 0: any
    local_clip: Amount = 0.0  # longest gradient of one worker, before compression; 0: any


class ScheduleTable(Table):
    kind: Kind = "constant"
    epochs: Amount = 0.0  # what the epochs below are written for: a run of other length stretches them; 0: never
    scale: Literal["none", "linear", "sqrt", "graph"] = "none"  # of the rate, by how much larger the batch is
    base_batch: Annotated[int, Field(ge=0)] = 0  # larger than this one; 0: than one worker's
    warmup: Amount = 0.0  # epochs
    warmup_from: Amount = 1.0  # times the unscaled rate
    milestones: list[float] = []  # steps: epochs
    points: list[list[float]] = []  # linear: [epoch, share of the rate]
    factor: Annotated[float, Field(gt=0)] = 0.1  # steps, plateau: at each; exponential: each epoch
    floor: Share = 0.0  # cosine: the share left at the end
    patience: Annotated[int, Field(ge=0)] = 0  # plateau: evaluations without a better one

    @model_validator(mode="after")
    def _points_rise(self) -> "ScheduleTable":
        places = [point[0] for point in self.points if len(point) == 2]
        if len(places) < len(self.points) or places != sorted(places) or (self.kind == "linear" and len(places) < 2):
            raise ValueError("points must be pairs [epoch, share] by rising epoch, such as [[0, 0], [5, 1], [24, 0]]")
        if self.milestones != sorted(self.milestones):
            raise ValueError(f"milestones must rise, and {self.milestones} do not")
        return self


class Recipe(Table):
    data: DataTable = DataTable()
    model: ModelTable = ModelTable()
    train: TrainTable = TrainTable()
    sync: SyncTable = SyncTable()
    gossip: GossipTable = GossipTable()
    local: LocalTable = LocalTable()
    optimizer: OptimizerTable = OptimizerTable()
    schedule: ScheduleTable = ScheduleTable()

    @property
    def own_models(self) -> bool:
        """Whether each worker steps a model of its own."""
        return bool(self.gossip.method or self.local.spec)


TABLES: dict[str, type[Table]] = {name: type(field.default) for name, field in Recipe.model_fields.items()}


def read(tables: dict[str, Any]) -> Recipe:
    """Check raw tables and make a recipe of them. The files of a user's own model and data are run.

    Raises:
        ValueError: A wrong key, type or value; the message names it and the nearest right one.
    """
    from gradwire_lab.train.recipe_checks import check  # which knows recipes

    recipe = validate(tables)
    check(recipe)
    return recipe


def validate(tables: dict[str, Any]) -> Recipe:
    """The same by keys, types and values alone; nothing is run."""
    _refuse_odd(tables)
    try:
        return Recipe.model_validate(_with_new_keys(tables))
    except ValidationError as error:
        raise ValueError("; ".join(map(_sentence, error.errors()))) from None


def _sentence(error: Any) -> str:
    path = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return _unknown(error["loc"])
    given = f"{path} = {error['input']!r}"
    if error["type"] == "literal_error":
        words = (word.strip(" '") for word in error["ctx"]["expected"].replace(" or ", ",").split(","))
        return f"{given} is refused; {nearest(str(error['input']), words)}"
    if error["type"] == "value_error":
        return f"{path}: {error['ctx']['error']}"
    return f"{given} is refused: {error['msg'].lower()}"


def _unknown(path: tuple[Any, ...]) -> str:
    if len(path) == 1:
        return f"a recipe has no table [{path[0]}]; {nearest(str(path[0]), TABLES)}"
    table, key = path[0], path[-1]
    fields = RuleTable.model_fields if len(path) > 2 else TABLES[table].model_fields
    return f"[{table}] has no key {key!r}; {nearest(str(key), fields)}"


def _refuse_odd(value: object, path: str = "") -> None:
    """Refuse dates, floats that are not finite in float32, and integers of more than 64 bits.

    Raises:
        ValueError: The message names the key.
    """
    if isinstance(value, Mapping | list):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, each in pairs:
            _refuse_odd(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, int | float):
        if not abs(value) < (LARGEST_FLOAT if isinstance(value, float) else LARGEST):
            raise ValueError(f"{path} = {value} is refused: a number must fit into float32, an integer into 64 bits")
    elif value is not None and not isinstance(value, str):
        raise ValueError(f"{path} = {value} is refused: write a number, a text, true or false, a list or a table")


def _with_new_keys(tables: dict[str, Any]) -> dict[str, Any]:
    """The same tables with the new name of a key that was renamed."""
    sync = tables.get("sync")
    if not isinstance(sync, Mapping) or "launch_mb" not in sync:
        return tables
    warnings.warn("launch_mb in [sync] is now bucket_mb", FutureWarning, stacklevel=2)
    rest = {key: value for key, value in sync.items() if key != "launch_mb"}
    return {**tables, "sync": {"bucket_mb": sync["launch_mb"], **rest}}
