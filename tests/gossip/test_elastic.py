"""Elastic gossip: ranks that die, stall, leave and come back, in processes and in threads."""

import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradwire
from gossip_fixtures import spread
from gradwire.kernels.dispatch import reference_only

WORLD, STEPS, DIES, BACK = 8, 200, 50, 100
TIMEOUT = 4.0
KILLED = 3
Pairs = tuple[Tensor, Tensor]  # images, and what they show
Data = tuple[Pairs, Pairs]
SPEC, CODEC = "choco(ring)", "sign"


def build() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def data() -> Data:
    from gradwire_lab.train.data.digits import digits  # heavy, and for the parent only

    task = digits()
    train, test = ((part.pixels.float().flatten(1) / 16, part.labels) for part in (task.train, task.test))
    return train, test


def step_(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int, train: Pairs) -> None:
    """One local step on a shard of the digits, at a rate that falls to zero."""
    images, labels = train
    chosen = torch.randint(0, 150, (16,), generator=torch.Generator().manual_seed(1000 * step + rank))
    mine = WORLD * chosen + rank
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * (1 - step / STEPS)
    optimizer.zero_grad()
    F.cross_entropy(model(images[mine]), labels[mine]).backward()
    optimizer.step()


def accuracy(model: nn.Module, test: Pairs) -> float:
    with torch.no_grad():
        return float((model(test[0]).argmax(1) == test[1]).float().mean())


def await_(folder: str, name: str) -> None:
    while not Path(folder, name).exists():
        time.sleep(0.01)


@reference_only()  # nine processes need not wait for a compiler
def work(rank: int, folder: str, pipe: Connection, waits: bool) -> None:
    torch.set_num_threads(1)
    (train, test), model = torch.load(Path(folder, "data")), build()
    if waits:
        Path(folder, "spare").touch()
    await_(folder, "back" if waits else "spare")  # as if restarted, but for the seconds that imports take
    net: Any = gradwire.gossip(
        model, SPEC, CODEC, elastic=True, meeting=folder, rank=rank, world=WORLD, timeout=TIMEOUT
    )
    if waits:
        Path(folder, "joined").touch()
    began, optimizer, longest = net.step, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 0.0
    while net.step < STEPS:
        if rank == KILLED and net.step == DIES and not waits:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and net.step == BACK:
            Path(folder, "back").touch()
        if net.step > BACK and not waits and not Path(folder, "joined").exists():
            time.sleep(0.01)  # a loaded machine may give the new process no time at all
        step_(model, optimizer, rank, net.step, train)
        asked = time.monotonic()
        net()
        longest = max(longest, time.monotonic() - asked)
    report = net.report()
    pipe.send((rank, began, accuracy(model, test), longest, report.dropped, report.rejoined, report.drift))
    net.close()


@reference_only()
def stall(rank: int, folder: str, pipe: Connection) -> None:
    """Train without data; rank 1 is stopped at step 50, and its parent lets it go on at step 100."""
    torch.set_num_threads(1)
    model, longest = build(), 0.0
    place: dict[str, Any] = {"meeting": folder, "rank": rank, "world": 4, "timeout": TIMEOUT}
    net: Any = gradwire.gossip(model, SPEC, CODEC, elastic=True, **place)
    while net.step < 150:
        if rank == 1 and net.step == 50 and not Path(folder, "stopped").exists():
            Path(folder, "stopped").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 0 and net.step == 100:
            Path(folder, "go").touch()
        time.sleep(0.02)
        asked = time.monotonic()
        net()
        longest = max(longest, time.monotonic() - asked)
    report = net.report()
    pipe.send((longest, report.dropped, report.rejoined))
    net.close()


@pytest.mark.study
def test_a_stopped_rank_is_dropped_and_rejoins(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    pipes, processes = [], []
    for rank in range(4):
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=stall, args=(rank, str(tmp_path), theirs), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    try:
        await_(str(tmp_path), "go")
        os.kill(processes[1].pid or 0, signal.SIGCONT)
        assert all(pipe.poll(60) for pipe in pipes)
        results = [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join(5)
    assert all(longest < 2 * TIMEOUT + 1.0 for longest, *_ in results)
    assert [dropped for _, dropped, _ in results][::2] == [1, 1] and results[3][1] == 0
    assert results[0][2] >= 1 and results[2][2] >= 1


@reference_only()
def undisturbed(train: Pairs, test: Pairs) -> list[float]:
    models = [build() for _ in range(WORLD)]
    net = gradwire.gossip_lockstep(models, SPEC, CODEC)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(STEPS):
        for rank in range(WORLD):
            step_(models[rank], optimizers[rank], rank, step, train)
        net()
    return [accuracy(model, test) for model in models]


def test_a_killed_rank_rejoins_and_training_ends_as_undisturbed(tmp_path: Path) -> None:
    context, whole = multiprocessing.get_context("forkserver"), data()
    torch.save(whole, tmp_path / "data")
    pipes, processes = [], []
    for rank, waits in [*((rank, False) for rank in range(WORLD)), (KILLED, True)]:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(rank, str(tmp_path), theirs, waits), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    alone = undisturbed(*whole)  # meanwhile
    results, deadline = {}, time.monotonic() + 60
    try:
        while len(results) < WORLD and time.monotonic() < deadline:
            for pipe in wait(pipes, timeout=1.0):
                try:
                    answer = pipe.recv()
                    results[answer[0]] = answer
                except EOFError:
                    pass
                pipes.remove(pipe)
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join(5)
    assert processes[KILLED].exitcode == -signal.SIGKILL
    assert sorted(results) == list(range(WORLD))
    assert all(longest < TIMEOUT + 1.0 for _, _, _, longest, *_ in results.values())
    assert BACK <= results[KILLED][1] < STEPS  # it took a neighbor's step
    for neighbor in (KILLED - 1, KILLED + 1):
        _, _, _, _, dropped, rejoined, drift = results[neighbor]
        assert dropped >= 1 and rejoined >= 1 and 0.0 < drift < 1.0
    assert results[0][4] == 0  # rank 0 is no neighbor of the killed rank
    mean = sum(result[2] for result in results.values()) / WORLD
    assert abs(mean - sum(alone) / WORLD) <= 0.01
    assert min(result[2] for result in results.values()) > min(alone) - 0.02  # a worker that did not come back shows


def test_a_rank_that_was_left_behind_catches_up(tmp_path: Path) -> None:
    """Two in one process: the second stalls, is dropped, and then takes the first one's parameters and step."""
    models, nets = [build(), build()], {}
    with torch.no_grad():
        models[1][0].weight.add_(1.0)

    def start(rank: int) -> None:
        nets[rank] = gradwire.gossip(
            models[rank], "dpsgd(ring)", elastic=True, meeting=tmp_path, rank=rank, world=2, timeout=20.0
        )

    threads = [threading.Thread(target=start, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = nets[0], nets[1]
    both = [threading.Thread(target=net) for net in (first, second)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert torch.allclose(models[0][0].weight, models[1][0].weight, atol=1e-6)  # one round, half and half
    for net in (first, second):
        net.mesh.timeout = net.mesh.edges.timeout = 0.5
    for _ in range(30):
        first()
    assert first.report().dropped == 1 and first.step == 31
    with torch.no_grad():
        models[0][0].weight.mul_(2.0)
    first()
    deadline = time.monotonic() + 10
    while second.step < 30 and time.monotonic() < deadline:
        time.sleep(0.02)  # a step of training; faster, it would be alone for long
        second()
    assert second.step >= 32
    assert torch.equal(models[0][0].weight, models[1][0].weight)
    for net in (first, second):
        net.close()


def test_a_rank_catches_up_with_one_that_steps_while_it_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first makes a dozen steps while the second joins; both mix then, instead of one after another catching up."""
    models = [build(), build()]
    first, second = start(tmp_path, models, "dpsgd(ring)")
    ended = threading.Event()
    join = second.mesh.join

    def join_late(*args: Any) -> None:
        time.sleep(0.2)
        join(*args)

    def steps() -> None:
        while not ended.is_set():
            time.sleep(0.01)
            first()

    second.mesh.drop(0, "must connect again")
    for _ in range(20):
        first()
    monkeypatch.setattr(second.mesh, "join", join_late)
    thread = threading.Thread(target=steps)
    thread.start()
    try:
        deadline = time.monotonic() + 10
        while not second.mesh.partners(second.step) and time.monotonic() < deadline:
            second()
        taken = second.resyncs
        for _ in range(50):
            second()
        assert second.mesh.partners(second.step) == [0] and second.resyncs == taken <= 4
    finally:
        ended.set()
        second.close()
        thread.join()
        first.close()


def test_a_rank_does_not_go_back_to_a_step_that_it_has_passed(tmp_path: Path) -> None:
    """Its neighbor had announced a later step, and is at an earlier one."""
    nets = start(tmp_path, [build(), build()], "dpsgd(ring)")
    together(*nets)
    for net in nets:
        net.mesh.timeout = net.mesh.edges.timeout = 0.5
    nets[1].mesh.drop(0, "must connect again")
    for _ in range(8):
        nets[0]()
    assert nets[0].mesh.await_peer(1)
    taken, edge = nets[0].resyncs, nets[0].mesh.edges.by_peer[1]
    edge.peer_step, edge.start = 50, None
    nets[0]()
    assert nets[0].step == 10 and nets[0].resyncs == taken
    for net in nets:
        net.close()


def test_a_rank_that_comes_back_finds_the_step_of_a_neighbor_that_computes(tmp_path: Path) -> None:
    """Such a neighbor agrees to nothing, and rank 0, which needs no other's parameters, would begin at step 0."""
    nets = start(tmp_path, [build(), build()], "dpsgd(ring)")
    nets[0].close()
    for _ in range(5):
        nets[1]()
    nets[1].mesh._agreement._active = -20.0  # it computes for long
    options: dict[str, Any] = {"meeting": tmp_path, "rank": 0, "world": 2, "timeout": 1.0}
    back = gradwire.gossip(build(), "dpsgd(ring)", elastic=True, **options)
    assert back.step == 5
    for net in (nets[1], back):
        net.close()


def test_a_rank_that_is_back_is_not_awaited_where_the_others_evaluate(tmp_path: Path) -> None:
    """It leaves during a round, so its neighbor had counted on it, and its successor awaits the next round."""
    models = [build(), build()]
    nets = start(tmp_path, models, "dpsgd(ring)")
    together(*nets)
    with ThreadPoolExecutor(2) as pool:
        alone = pool.submit(nets[0])
        while nets[0].mesh._agreement.next_step < 2:
            time.sleep(0.01)
        nets[1].close()
        alone.result(30)
        options: dict[str, Any] = {"meeting": tmp_path, "rank": 1, "world": 2, "timeout": 5.0}
        back = gradwire.gossip(build(), "dpsgd(ring)", elastic=True, **options)
        assert back.step == nets[0].step == 2
        assert list(nets[0].gather_models()) == [0]  # the one that is back has not made this step
        together(nets[0], back)
        assert together(*(partial(net.max_over_processes, float(net.rank)) for net in (nets[0], back))) == [1.0, 1.0]
    assert nets[0].report().dropped == back.report().dropped == 0
    nets[0].close()
    back.close()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls that wait for each other."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(30) for future in [pool.submit(call) for call in calls]]


def start(folder: Path, models: list[nn.Module], spec: str, codec: str | None = None, **options: Any) -> list[Any]:
    def one(rank: int) -> Any:
        place = {"rank": rank, "world": len(models), "meeting": folder, "timeout": 5.0, **options}
        return gradwire.gossip(models[rank], spec, codec, elastic=True, **place)

    return together(*(partial(one, rank) for rank in range(len(models))))


def test_the_mean_model_of_the_ranks_that_can_be_reached(tmp_path: Path) -> None:
    """Four ranks on a ring with a small gamma; then three, on the rest of it. None of its bytes are counted."""
    models = [nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)) for _ in range(4)]
    nets = start(tmp_path, models, "choco(ring, gamma=0.01)", "sign")
    for rank, model in enumerate(models):
        nn.init.constant_(model[0].weight, float(rank))
        model[1].running_mean.fill_(float(rank))
    together(*nets)
    own = [model[0].weight.detach().clone() for model in models]
    sent = [net.report().sent for net in nets]

    def shown(model: nn.Module) -> tuple[Tensor, Tensor]:
        return model[0].weight.detach().clone(), model[1].running_mean.clone()

    means = together(*(partial(net.evaluate_mean, partial(shown, m)) for net, m in zip(nets, models, strict=True)))
    for weight, statistics in means:
        assert torch.equal(weight, means[0][0]) and torch.allclose(weight, torch.stack(own).mean(0), atol=1e-6)
        assert torch.allclose(statistics, torch.full((3,), 1.5))
    assert [net.report().sent for net in nets] == sent
    assert all(torch.equal(model[0].weight, weight) for model, weight in zip(models, own, strict=True))
    assert together(*(partial(net.max_over_processes, float(net.rank)) for net in nets)) == [3.0] * 4
    apart = together(*(net.distance for net in nets))
    flat = torch.stack([torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models]).double()
    assert apart == pytest.approx([float((flat - flat.mean(0)).square().sum(1).mean().sqrt())] * 4)

    nets[3].close()
    together(*nets[:3])
    left = torch.stack([model[0].weight.detach().clone() for model in models[:3]]).mean(0)
    rest = zip(nets[:3], models[:3], strict=True)
    for weight, _ in together(*(partial(net.evaluate_mean, partial(shown, m)) for net, m in rest)):
        assert torch.allclose(weight, left, atol=1e-6)
    for net in nets[:3]:
        net.close()


def test_elastic_overlap_equals_lockstep(tmp_path: Path) -> None:
    """With overlap=True elastic ranks equal those in lockstep, to rounding, and go on when one of them leaves."""
    models, twins = [build() for _ in range(4)], [build() for _ in range(4)]
    nets = start(tmp_path, models, "choco(ring, gamma=0.4)", "fp32", overlap=True)
    lockstep = gradwire.gossip_lockstep(twins, "choco(ring, gamma=0.4)", "fp32", overlap=True)

    def train(replicas: list[nn.Module], step: int) -> None:
        with torch.no_grad():
            for rank, model in enumerate(replicas):
                draw = torch.Generator().manual_seed(10 * step + rank)
                for p in model.parameters():
                    p += 0.05 * torch.randn(p.shape, generator=draw)

    for step in range(6):
        train(models, step)
        train(twins, step)
        together(*nets)
        lockstep()
    for model, twin in zip(models, twins, strict=True):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(p, q, atol=1e-4)
    nets[2].close()
    rest = [nets[0], nets[1], nets[3]]
    for _ in range(40):
        together(*rest)
    assert [net.step for net in rest] == [46] * 3
    assert max(together(*(net.distance for net in rest))) < 0.02  # three on what is left of the ring agree
    for net in rest:
        net.close()


def own(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def die(net: Any) -> None:
    """End all connections without a LEAVE, as a killed process does."""
    edges = net.mesh.edges
    edges.closed = True
    net.mesh._connector.close()
    for edge in edges.snapshot():
        edge.channel.line.shutdown(socket.SHUT_RDWR)


def test_all_start_from_rank_0(tmp_path: Path) -> None:
    """On a path, where most ranks are no neighbors of rank 0."""
    models = [own(seed) for seed in range(4)]
    first = flat(models[0]).clone()
    nets = start(tmp_path, models, "choco(path, gamma=0.5)", "sign")
    assert all(torch.equal(flat(model), first) for model in models)
    for net in nets:
        net.close()


def test_a_rank_without_a_path_to_rank_0_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"parameters of rank 0 in 0.3 s: none of \[1\]"):
        gradwire.gossip(own(0), "dpsgd(path)", elastic=True, meeting=tmp_path, rank=2, world=3, timeout=0.3)


def test_copies_of_a_new_edge_are_equal_at_both_ends(tmp_path: Path) -> None:
    """A rank that comes back begins with whole parameters on both edges; then differences keep the copies equal."""
    models = [own(0) for _ in range(3)]
    nets = start(tmp_path, models, "choco(path, gamma=0.5)", "sign")
    for rank, model in enumerate(models):
        nn.init.constant_(model[0].weight, float(rank))
    for _ in range(3):
        together(*nets)
    die(nets[1])
    together(nets[0], nets[2])
    assert [net.mesh.edges.lost for net in (nets[0], nets[2])] == [[1], [1]]
    place = {"rank": 1, "world": 3, "meeting": tmp_path, "timeout": 5.0}
    again = gradwire.gossip(own(7), "choco(path, gamma=0.5)", "sign", elastic=True, **place)
    nets[1], whole = again, 4 * flat(models[0]).numel()
    assert again.step >= 4
    began, deadline = again.report().sent, time.monotonic() + 10
    # The two edges may begin at different steps.
    while len(again.mesh.partners(again.step)) < 2 and time.monotonic() < deadline:
        together(*nets)
        time.sleep(0.02)
    before = again.report().sent
    together(*nets)
    assert before - began > 2 * whole and again.report().sent - before < whole
    for net, other in ((nets[0], again), (nets[2], again), (again, nets[0]), (again, nets[2])):
        assert torch.equal(net.node.memory[f"to_{other.rank}"], other.node.memory[f"from_{net.rank}"])
    assert nets[0].report().rejoined == 1 and again.report().rejoined == 0
    for net in nets:
        net.close()


@pytest.mark.parametrize("gamma", ["0.3", "1.0", "auto"])
def test_new_edges_do_not_drive_replicas_apart(tmp_path: Path, gamma: str) -> None:
    """A few entries differ by much, and sign takes many steps to send that they no longer do."""
    models = [nn.Linear(500, 8, bias=False) for _ in range(5)]
    nets = start(tmp_path, models, f"choco(ring, gamma={gamma})", "sign")
    together(*nets)
    for rank, model in enumerate(models):
        with torch.no_grad():
            model.weight.copy_(torch.randn(8, 500, generator=torch.Generator().manual_seed(rank)) ** 5)
    states = [net.state_dict() for net in nets]
    others = [{name: x + 1.0 if name.startswith("to_") else x for name, x in state.items()} for state in states]
    together(
        *(partial(net.load_state_dict, other) for net, other in zip(nets, others, strict=True))
    )  # edges begin anew
    apart = [spread(torch.stack([flat(model) for model in models]))]
    for _ in range(20):
        together(*nets)
        apart.append(spread(torch.stack([flat(model) for model in models])))
    assert apart[1] < 0.4 * apart[0] and max(apart[2:]) < 1.01 * apart[1]
    for net in nets:
        net.close()


def test_drift_is_what_flowed_one_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 1 lies between its neighbors and does not move, but has mixed what a neighbor then did not receive."""
    models = [own(0) for _ in range(3)]
    nets = start(tmp_path, models, "dpsgd(path)")
    for model, at in zip(models, (-1.0, 0.0, 1.0), strict=True):
        for p in model.parameters():
            nn.init.constant_(p, at)
    together(*nets)
    assert float(nets[1].node.moved) < 1e-6
    die(nets[2])
    with caplog.at_level(logging.WARNING, "gradwire.gossip"):
        together(nets[0], nets[1])
    weight, size = nets[1].node.topology.peers(1)[2], flat(models[1]).numel()
    assert nets[1].report().drift == pytest.approx(weight * size**0.5 / 3, rel=1e-5)
    assert nets[0].report().drift == 0.0
    assert "rank 1 lost neighbor 2" in caplog.text
    for net in nets[:2]:
        net.close()


def test_a_loss_before_the_first_round_of_an_edge_is_no_drift(tmp_path: Path) -> None:
    """What flowed in an earlier life of the edge, which ended well, has reached both ends."""
    models = [build() for _ in range(2)]
    nets = start(tmp_path, models, "dpsgd(ring)")
    nn.init.constant_(models[1][0].weight, 1.0)
    together(*nets)
    nets[1].close()
    nets[0]()
    back = gradwire.gossip(build(), "dpsgd(ring)", elastic=True, meeting=tmp_path, rank=1, world=2, timeout=5.0)
    assert nets[0].mesh.await_edges([1], 5.0)
    nets[0].mesh.drop(1, "is lost")
    back.close()
    nets[0]()
    assert nets[0].report().dropped == 1 and nets[0].report().drift == 0.0
    nets[0].close()


def move_(model: nn.Module, rank: int, step: int) -> None:
    """As if trained: the same at the same step."""
    draw = torch.Generator().manual_seed(10 * step + rank)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05 * torch.randn(p.shape, generator=draw)


@pytest.mark.parametrize("overlap", [False, True])
def test_elastic_handles_resume_bit_for_bit(tmp_path: Path, overlap: bool) -> None:
    """Each rank loads its own state, one of them later than the others, and all go on as if undisturbed."""
    spec, models = "choco(path, gamma=auto)", [own(0) for _ in range(3)]
    nets = start(tmp_path / "first", models, spec, "sign", overlap=overlap)

    def go(rank: int) -> None:
        move_(models[rank], rank, nets[rank].step)
        nets[rank]()

    for _ in range(4):
        together(*(partial(go, rank) for rank in range(3)))
    for net in nets:
        gradwire.save(net, tmp_path / "saved")
    saved = [{name: value.clone() for name, value in model.state_dict().items()} for model in models]
    for _ in range(3):
        together(*(partial(go, rank) for rank in range(3)))
    undisturbed = [flat(model) for model in models]
    for net in nets:
        net.close()
    models = [own(rank) for rank in range(3)]
    nets = start(tmp_path / "second", models, spec, "sign", overlap=overlap)

    def resume(rank: int) -> None:
        time.sleep(0.5 * (rank == 1))
        models[rank].load_state_dict(saved[rank])
        gradwire.load(nets[rank], tmp_path / "saved")
        for _ in range(3):
            go(rank)

    together(*(partial(resume, rank) for rank in range(3)))
    assert [net.step for net in nets] == [7] * 3
    for model, before in zip(models, undisturbed, strict=True):
        assert torch.equal(flat(model), before)
    assert [(net.report().dropped, net.report().rejoined) for net in nets] == [(0, 0)] * 3
    for net in nets:
        net.close()


def test_edges_with_different_copies_begin_anew(tmp_path: Path) -> None:
    """One end comes back with copies of its own: whole parameters pass, and the mean is kept."""
    models = [own(0) for _ in range(2)]
    nets = start(tmp_path / "first", models, "choco(ring, gamma=0.5)", "sign")
    for _ in range(3):
        together(*nets)
    for rank, model in enumerate(models):
        nn.init.constant_(model[0].weight, float(rank))
    taken = [net.resyncs for net in nets]
    states = [net.state_dict() for net in nets]
    states[1]["to_0/0.weight"] = states[1]["to_0/0.weight"] + 1.0
    before = torch.stack([flat(model) for model in models]).mean(0)
    together(*(partial(net.load_state_dict, state) for net, state in zip(nets, states, strict=True)))
    sent = [net.report().sent for net in nets]
    together(*nets)
    assert all(net.report().sent - was > 4 * flat(models[0]).numel() for net, was in zip(nets, sent, strict=True))
    assert torch.allclose(torch.stack([flat(model) for model in models]).mean(0), before, atol=1e-6)
    assert torch.equal(nets[0].node.memory["from_1"], nets[1].node.memory["to_0"])
    assert [net.resyncs for net in nets] == taken  # neither became a copy of the other
    assert [(net.report().dropped, net.report().drift) for net in nets] == [(0, 0.0)] * 2
    with pytest.raises(ValueError, match="holds no wire-0"):
        gradwire.load(nets[0], tmp_path / "nowhere")
    for net in nets:
        net.close()


def test_a_state_of_another_seed_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"elastic": True, "meeting": tmp_path, "rank": 0, "world": 1, "timeout": TIMEOUT}
    net = gradwire.gossip(build(), SPEC, CODEC, seed=7, **options)
    saved = net.state_dict()
    net.close()
    other = gradwire.gossip(build(), SPEC, CODEC, **options)
    with pytest.raises(ValueError, match="has seed 0; attach all ranks with seed=7"):
        other.load_state_dict(saved)
    other.close()


def test_a_rank_that_begins_without_neighbors_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gradwire.gossip"):
        net = gradwire.gossip(build(), SPEC, CODEC, elastic=True, meeting=tmp_path, rank=0, world=4, timeout=0.5)
        net()
        net.close()
    assert ["begins at step 0 without neighbors [1, 3]" in text for text in caplog.messages] == [True]


def test_all_threads_have_ended_when_a_rank_is_closed(tmp_path: Path) -> None:
    """One that frees a tensor while the interpreter ends aborts the process. Another handshake is under way."""
    others = {*threading.enumerate()}
    nets = start(tmp_path, [build(), build()], "dpsgd(ring)")
    together(*nets)
    host, port = (tmp_path / "peer-0").read_text().split()
    with socket.create_connection((host, int(port))) as stranger:
        stranger.recv(1)
        for net in nets:
            net.close()
        left = [thread.name for thread in {*threading.enumerate()} - others if thread.name.startswith("gradwire")]
        assert left == []
        assert all(net.mesh._agreement.snapshot is None for net in nets)  # nor do they hold tensors for long
