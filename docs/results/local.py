"""A GPT on bytes of a text, trained with local steps: loss and bytes by method.

Workers are simulated in one process, on a GPU where there is one. Their weights are rows of one tensor, so that a
forward pass serves all of them; gradwire sees one model and one optimizer for each. A run is one JSON object on the
command line, or a line of a file that is named with an @; a row of results is appended to the file of --out. Runs that
it has already are skipped.

    python docs/results/local.py --text wikitext-2 --out local.jsonl @runs.jsonl \
        '{"name": "dense", "spec": "dense"}' \
        '{"name": "center", "spec": "sparseloco(H={H}, start={start})", "H": 5, "start": 225, "lr": 1e-3, "seed": 0}'

The folder of --text has train.txt and test.txt. The spec "dense" averages float32 gradients in every step. Other keys
of a run, with their defaults: "lr_after" (1.0, a factor of the learning rate after the start), "codec", "feedback" and
"exchange" (those of the spec), "inner" ("adamw", or "muon" for the matrices of the blocks), "workers" (8), "batch" (16
sequences a worker), "warm_up" (steps in which the learning rate rises; null: 5 % of all), "beta2" (0.95, AdamW's
second), "final" (0.1, the share of the learning rate at the end). Where a start sends nothing (first=None, or a phase
of it as in first={0: None, 75: int4}), all workers take the same batches. A run ends with a whole round, so that it may
be up to H - 1 steps shorter. A spec of gossip, as in "local_gossip(choco(ring), H={H})", has no start, and the mean of
all models is evaluated.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradwire
from gradwire.gossip import GossipMethod

VOCAB, WARM_UP, CLIP, DECAY, BETA = 256, 0.05, 1.0, 0.1, 0.9
RUN = {
    "spec": "dense",
    "H": 5,
    "lr": 1e-3,
    "lr_after": 1.0,
    "start": 0,
    "seed": 0,
    "codec": None,
    "feedback": None,
    "exchange": None,
    "inner": "adamw",
    "workers": 8,
    "batch": 16,
    "warm_up": None,
    "beta2": 0.95,
    "final": 0.1,
}

Train: TypeAlias = Callable[[dict[str, Any], Path, "Shape", int, torch.device, int], dict[str, Any]]
RATIOS = ("payload_ratio", "wire_ratio", "payload_ratio_all_in", "wire_ratio_all_in")


class Shape(argparse.Namespace):
    """Of the model: width, layers, heads, context; and whether its losses are compiled by torch."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name. Matrices map rows."""
        c = self.width
        blocks = {"qkv": (c, 3 * c), "proj": (c, c), "up": (c, 4 * c), "down": (4 * c, c), "norm1": (c,), "norm2": (c,)}
        inner = {f"blocks.{i}.{name}": shape for i in range(self.layers) for name, shape in blocks.items()}
        return {"embedding": (VOCAB, c), "positions": (self.context, c), **inner, "norm": (c,), "head": (c, VOCAB)}


class Replicas:
    """The same GPT several times.

    Attributes:
        models: With parameters that are rows of the leaves.
        leaves: [workers, ...] by name. Gradients of rows are rows of their gradients.
        grads: Of the leaves.
        size: Parameters of a model.
    """

    def __init__(self, shape: Shape, workers: int, seed: int, device: torch.device) -> None:
        self.shape = shape
        self.models = [nn.Module() for _ in range(workers)]
        self.leaves: dict[str, Tensor] = {}
        draw = torch.Generator().manual_seed(seed)
        for name, s in shape.tensors().items():
            rows = self._initial(name, s, draw).to(device).expand(workers, *s).contiguous()
            leaf = self.leaves[name] = rows.requires_grad_()
            leaf.grad = torch.zeros_like(leaf)
            for row, model in enumerate(self.models):
                p = nn.Parameter(leaf.detach()[row])
                p.grad = leaf.grad[row]
                register(model, name, p)
        self.grads = [leaf.grad for leaf in self.leaves.values() if leaf.grad is not None]
        self.size = sum(g[0].numel() for g in self.grads)
        self._losses = torch.compile(self.losses) if shape.compile else self.losses

    def _initial(self, name: str, s: tuple[int, ...], draw: torch.Generator) -> Tensor:
        if len(s) == 1:
            return torch.ones(s)
        residual = name.endswith(("proj", "down"))
        return torch.randn(s, generator=draw) * 0.02 / (math.sqrt(2 * self.shape.layers) if residual else 1.0)

    def backward(self, tokens: Tensor) -> Tensor:
        """Gradients of all workers, each clipped by its own norm. Returns the mean loss."""
        torch._foreach_zero_(self.grads)
        losses = self._losses(tokens)
        losses.sum().backward()
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in self.grads]).norm(dim=0)
        factors = (CLIP / (norms + 1e-6)).clamp(max=1.0)
        for g in self.grads:
            g.mul_(factors.view(-1, *[1] * (g.dim() - 1)))
        return losses.detach().mean()

    def losses(self, tokens: Tensor) -> Tensor:
        """Of each worker. tokens: [workers, batch, time + 1]."""
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            logits = self._forward(tokens[..., :-1])
        loss = F.cross_entropy(logits.float().view(-1, VOCAB), tokens[..., 1:].reshape(-1), reduction="none")
        return loss.view(len(tokens), -1).mean(1)

    def _forward(self, tokens: Tensor) -> Tensor:
        w, width, (k, b, t) = self.leaves, self.shape.width, tokens.shape
        rows = tokens + torch.arange(k, device=tokens.device)[:, None, None] * VOCAB
        x = F.embedding(rows, w["embedding"].reshape(k * VOCAB, width)) + w["positions"][:, None, :t]
        x = x.view(k, b * t, width)
        normed = lambda x, name: F.layer_norm(x, (width,)) * w[name][:, None]  # noqa: E731
        for i in range(self.shape.layers):
            qkv = torch.bmm(normed(x, f"blocks.{i}.norm1"), w[f"blocks.{i}.qkv"]).view(
                k * b, t, 3, self.shape.heads, -1
            )
            a = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
            x = x + torch.bmm(a.transpose(1, 2).reshape(k, b * t, width), w[f"blocks.{i}.proj"])
            up = F.gelu(torch.bmm(normed(x, f"blocks.{i}.norm2"), w[f"blocks.{i}.up"]), approximate="tanh")
            x = x + torch.bmm(up, w[f"blocks.{i}.down"])
        return torch.bmm(normed(x, "norm"), w["head"])


def register(model: nn.Module, name: str, p: nn.Parameter) -> None:
    """Give a parameter its name, and make the modules that this tells of."""
    *path, last = name.split(".")
    for word in path:
        if word not in model._modules:
            model.add_module(word, nn.Module())
        model = model.get_submodule(word)
    model.register_parameter(last, p)


class Inner:
    """The optimizers of all workers: AdamW, and Muon for the matrices of the blocks where that is wanted.

    Attributes:
        parts: By worker. Muon's steps are not its own, see `muon_`, but their momentum is in its state.
    """

    def __init__(self, replicas: Replicas, run: dict[str, Any]) -> None:
        self.replicas = replicas
        self.parts: list[list[torch.optim.Optimizer]] = []
        hidden = [name for name in replicas.leaves if name.startswith("blocks.") and "norm" not in name]
        self.momenta = {name: torch.zeros_like(replicas.leaves[name]) for name in hidden if run["inner"] == "muon"}
        for row, model in enumerate(replicas.models):
            named = dict(model.named_parameters())
            rest = [p for name, p in named.items() if name not in self.momenta]
            flags: dict[str, Any] = {"betas": (BETA, run["beta2"]), "weight_decay": DECAY, "fused": rest[0].is_cuda}
            self.parts.append([torch.optim.AdamW(rest, run["lr"], **flags)])
            if self.momenta:
                muon = torch.optim.Muon([named[name] for name in self.momenta], run["lr"], DECAY)
                for name, rows in self.momenta.items():
                    muon.state[named[name]]["momentum_buffer"] = rows[row]
                self.parts[-1].append(muon)

    def step(self, lr: float) -> None:
        for adamw, *_ in self.parts:
            for group in adamw.param_groups:
                group["lr"] = lr
            adamw.step()
        for name, momenta in self.momenta.items():
            leaf = self.replicas.leaves[name]
            assert leaf.grad is not None  # it is made with the leaf
            muon_(leaf.detach(), leaf.grad, momenta, lr)


def muon_(rows: Tensor, grads: Tensor, momenta: Tensor, lr: float) -> None:
    """A step of torch.optim.Muon for the matrices of all workers at once: one at a time, they are too small for a GPU.

    Steps are as long as AdamW's (adjust_lr_fn="match_rms_adamw"), so that one learning rate suits both.
    """
    momenta.lerp_(grads, 0.05)
    x = grads.lerp(momenta, 0.95).bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    size = 0.2 * lr * math.sqrt(max(rows.shape[1:]))
    rows.mul_(1 - lr * DECAY).add_(x.mT if tall else x, alpha=-size)


def rate_at(step: int, steps: int, lr: float, warm_up: int | None = None, final: float = 0.1) -> float:
    """The learning rate rises to lr, and then falls along a cosine to the share `final` of it."""
    warm = WARM_UP * steps if warm_up is None else warm_up
    if step < warm:
        return lr * step / warm
    return lr * (final + (1 - final) / 2 * (1 + math.cos(math.pi * (step - warm) / (steps - warm))))


def evaluate(replicas: Replicas, data: Tensor, limit: int) -> float:
    """Each worker takes a share of the text: they must be equal."""
    span, workers = replicas.shape.context, len(replicas.models)
    rows = data[: (len(data) - 1) // span * span].view(-1, span)
    tokens = torch.cat((rows, data[span : span * len(rows) + 1 : span][:, None]), 1)[:limit]
    tokens = tokens[: len(tokens) // workers * workers].view(workers, -1, span + 1).long()
    with torch.no_grad():
        losses = [replicas.losses(part).mean().double() * part.shape[1] for part in tokens.split(32, 1)]
    return float(sum(losses)) / tokens.shape[1]


def batches(
    data: Tensor, run: dict[str, Any], context: int, same_until: int, same: Callable[[], bool] = lambda: False
) -> Iterator[Tensor]:
    """[workers, batch, context + 1] by step; the same for all workers at first, and where the coming step needs it."""
    draw, span = torch.Generator().manual_seed(1000 + run["seed"]), torch.arange(context + 1, device=data.device)
    step = 0
    while True:
        at = torch.randint(len(data) - context - 1, (run["workers"], run["batch"]), generator=draw)
        if step < same_until or same():
            at = at[:1].expand_as(at)
        yield data[at.to(data.device)[..., None] + span].long()
        step += 1


class Averaged:
    """Rounds that average over all workers."""

    def __init__(self, replicas: Replicas, chosen: Any, optimizers: list[Any], parts: dict[str, Any]) -> None:
        self.rounds = gradwire.local_lockstep(replicas.models, optimizers, chosen, **parts)
        self.starts, self.method = self.rounds.average_gradients, str(self.rounds.ranks[0].method)

    def same_batches(self) -> bool:
        return self.rounds.same_batches

    @contextmanager
    def mean_model(self) -> Iterator[None]:
        with ExitStack() as shown:
            for rank in self.rounds.ranks:
                shown.enter_context(rank.averaged())
            yield

    def account(self, steps: int) -> dict[str, Any]:
        """Ratios against float32 in every step, and bytes that a worker has encoded."""
        report = self.rounds.ranks[0].report()
        ratios = {name: ratio(getattr(report, name)) for name in RATIOS}
        return {**ratios, "payload": report.payload, "dropped_rounds": report.skipped}


class Gossip:
    """Rounds between neighbors. There is no start."""

    def __init__(self, replicas: Replicas, chosen: Any, codec: str | None) -> None:
        self.rounds, self.method = gradwire.gossip_lockstep(replicas.models, chosen, codec), f"{chosen}; {codec}"
        self.replicas = replicas

    def starts(self) -> None:
        """Gradients are never averaged."""

    def same_batches(self) -> bool:
        return False

    @contextmanager
    def mean_model(self) -> Iterator[None]:
        """All models are their mean from now on."""
        for leaf in self.replicas.leaves.values():
            leaf.data.copy_(leaf.data.mean(0, keepdim=True).expand_as(leaf).clone())
        yield

    def account(self, steps: int) -> dict[str, Any]:
        report, dense = self.rounds.report(), 4.0 * self.replicas.size * steps
        payload = report.sent / report.degree
        ring = 2 * (report.world - 1) / report.world
        both = {"payload_ratio": ratio(dense / payload), "wire_ratio": ratio(ring * dense / report.sent)}
        return {**both, **{f"{name}_all_in": x for name, x in both.items()}, "payload": payload, "dropped_rounds": 0}


def method(run: dict[str, Any], steps: int) -> tuple[Any, int, int]:
    """The rounds of a run, the steps of its start, and how many steps it takes."""
    dense = "post_local_sgd(H=1, start={steps})"
    spec = dense if run["spec"] == "dense" else run["spec"]
    for name, number in (("H", run["H"]), ("start", run["start"]), ("steps", steps)):
        spec = spec.replace(f"{{{name}}}", str(number))
    chosen = gradwire.parse(spec)
    start = getattr(chosen, "start", 0)
    return chosen, start, start + (steps - start) // chosen.H * chosen.H


def train(
    run: dict[str, Any], text: Path, shape: Shape, steps: int, device: torch.device, limit: int
) -> dict[str, Any]:
    data, held_out = (_bytes(text / f"{part}.txt").to(device) for part in ("train", "test"))
    chosen, start, steps = method(run, steps)
    torch.manual_seed(run["seed"])
    replicas = Replicas(shape, run["workers"], run["seed"], device)
    inner = Inner(replicas, run)
    outer: Averaged | Gossip
    if isinstance(chosen, GossipMethod):
        outer = Gossip(replicas, chosen, run["codec"])
    else:
        parts = {name: run[name] for name in ("codec", "feedback", "exchange")}
        outer = Averaged(replicas, chosen, inner.parts, parts)
    began, curve = time.perf_counter(), []
    feed = batches(data, run, shape.context, 0, outer.same_batches)
    for step in range(steps):
        loss_now = replicas.backward(next(feed))
        outer.starts()
        lr = run["lr"] * (run["lr_after"] if step >= start else 1.0)
        inner.step(rate_at(step, steps, lr, run["warm_up"], run["final"]))
        outer.rounds()
        if (step + 1) % 100 == 0:
            curve.append(round(loss_now.item(), 4))
    with outer.mean_model():
        loss = evaluate(replicas, held_out, limit)
    account, tokens = outer.account(steps), run["workers"] * run["batch"] * shape.context
    return {
        **run,
        "method": outer.method,
        "steps": steps,
        "parameters": replicas.size,
        "test_loss": round(loss, 4),
        **account,
        "bits_per_token": 8 * account["payload"] * run["workers"] / (tokens * steps),
        "train_loss": curve,
        "seconds": round(time.perf_counter() - began, 1),
        "compiled": shape.compile,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }


def ratio(number: float) -> float | None:
    """None where nothing was sent."""
    return round(number, 2) if math.isfinite(number) else None


def _bytes(path: Path) -> Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


def runs(texts: list[str], defaults: dict[str, Any]) -> list[dict[str, Any]]:
    """Of JSON objects, and of files of them that are named with an @."""
    lines = [line for text in texts for line in (Path(text[1:]).read_text().splitlines() if text[0] == "@" else [text])]
    chosen = [{**defaults, **json.loads(line)} for line in lines if line.strip()]
    unknown = {key for run in chosen for key in run} - {*defaults, "name"}
    if unknown:
        raise SystemExit(f"a run has no {unknown.pop()!r}; its keys are name, {', '.join(defaults)}")
    return chosen


def main(train: Train, defaults: dict[str, Any], about: str | None, out: str) -> None:
    """Do the runs of the command line."""
    options = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("runs", nargs="+")
    options.add_argument("--text", type=Path, required=True)
    options.add_argument("--out", type=Path, default=Path(out))
    options.add_argument("--steps", type=int, default=1500)
    options.add_argument("--width", type=int, default=384)
    options.add_argument("--layers", type=int, default=6)
    options.add_argument("--heads", type=int, default=6)
    options.add_argument("--context", type=int, default=256)
    options.add_argument("--compile", action="store_true", help="compile the model")
    options.add_argument("--test-rows", type=int, default=1 << 30, help="sequences of the test text, at most")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    chosen = options.parse_args(namespace=Shape())
    torch.backends.cuda.matmul.allow_tf32 = True
    for run in runs(chosen.runs, defaults):
        rows = [json.loads(line) for line in chosen.out.read_text().splitlines()] if chosen.out.exists() else []
        asked = {**run, "asked_steps": chosen.steps}
        if any(all(row.get(key, defaults.get(key)) == value for key, value in asked.items()) for row in rows):
            continue
        device = torch.device(chosen.device)
        row = train(run, chosen.text, chosen, chosen.steps, device, chosen.test_rows) | {"asked_steps": chosen.steps}
        print(json.dumps(row), flush=True)
        with chosen.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(train, RUN, __doc__, "local.jsonl")
