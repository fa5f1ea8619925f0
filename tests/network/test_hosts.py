"""Hosts are made, hold their rate and delay, and are gone afterwards, whatever happened in between."""

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import gradwire
from gradwire.comm.rates import parse_rate, parse_seconds, parse_share
from gradwire_lab.cli.main import hosts as app
from gradwire_lab.launch import RankError
from gradwire_lab.network import Hosts, HostsUnavailableError, LinkSpec, namespaces, shaping, sweep
from gradwire_lab.network import launch as network_launch
from gradwire_lab.network.launch import RankProcesses
from gradwire_lab.network.userspace_switch import Port, Switch

real = pytest.mark.skipif(bool(namespaces.lacking()), reason=namespaces.lacking() or "hosts can be made")


# Links as text


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("100mbit", LinkSpec(100e6)),
        ("1gbit", LinkSpec(1e9)),
        ("20ms", LinkSpec(None, 0.02)),
        ("500us", LinkSpec(None, 0.0005)),
        ("100mbit,20ms", LinkSpec(100e6, 0.02)),
        (" 1.5 Gbit , 20ms, 2ms, 0.1%", LinkSpec(1.5e9, 0.02, 0.002, 0.001)),
        ("unshaped", LinkSpec()),
    ],
)
def test_a_link_is_read(text: str, link: LinkSpec) -> None:
    assert LinkSpec.parse(text) == link


def test_a_link_is_written_as_it_is_said() -> None:
    for text in ("unshaped", "100mbit", "2.5gbit", "500us", "100mbit,20ms", "1gbit,20ms,2ms,0.1%", "10kbit,5%"):
        assert str(LinkSpec.parse(text)) == text


@given(
    st.none() | st.floats(1e3, 1e13),
    st.floats(1e-6, 60),
    st.floats(0, 1),
    st.floats(0, 1, exclude_max=True),
)
def test_every_link_reads_back_as_itself(rate: float | None, delay: float, share: float, loss: float) -> None:
    link = LinkSpec(rate, delay, delay * share, loss)
    assert LinkSpec.parse(str(link)) == link


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0mbit", "a rate of 0 bits a second is impossible"),
        ("-5mbit", "a rate of -5e.06 bits a second is impossible"),
        ("1e300gbit", "impossible"),
        ("100mbps", "'mbps' in '100mbps' is no unit of rate; use tbit, gbit, mbit, kbit, bit"),
        ("100", "'100' has no unit; append tbit, gbit, mbit, kbit, bit"),
        ("100mbit,5", "'5' has no unit; append tbit, gbit, mbit, kbit, bit, or for a delay s, ms, us"),
        ("fast", "cannot read 'fast'"),
        ("", "cannot read ''"),
        ("-20ms", "a time of -0.02 s is impossible"),
        ("1h", "'h' in '1h' is no unit"),
        ("5ms,10ms", "arrive before they were sent"),
        ("1mbit,2mbit", "twice"),
        ("100%", "a loss of 1 is impossible"),
    ],
)
def test_an_impossible_link_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        LinkSpec.parse(text)


def test_parts_are_read_alone() -> None:
    assert (parse_rate("1kbit"), parse_seconds("1s"), parse_share("0.1"), parse_share("10%")) == (1e3, 1.0, 0.1, 0.1)
    with pytest.raises(ValueError, match="no unit of time"):
        parse_seconds("1mbit")


# What the kernel is told


def test_the_bucket_follows_the_rate() -> None:
    assert shaping.tbf(100e6, 1500) == ["tbf", "rate", "100000000bit", "burst", "12500", "latency", "50000us"]
    assert shaping.tbf(1e6, 1500) == ["tbf", "rate", "1000000bit", "burst", "3028", "latency", "800000us"]


def test_netem_holds_what_is_under_way() -> None:
    words = shaping.netem(LinkSpec.parse("100mbit,20ms,2ms,0.1%"), 1500)
    assert words == ["netem", "limit", "1367", "delay", "20000us", "2000us", "loss", "0.100000%"]


# The switch, without devices


def sent(switch: Switch, until: float) -> list[tuple[float, int]]:
    """Run its clock to a time: when each frame left, and through which port."""
    left = []
    while switch.waiting and switch.waiting[0][0] <= until:
        now = switch.waiting[0][0]
        before = len(switch.waiting)
        out = switch.waiting[0][2]
        switch.give(now)
        left += [(now, out)] * (before - len(switch.waiting))
    return left


def a_switch(ports: int = 3, rate: float | None = None, delay: float = 0.0, **more: float) -> Iterator[Switch]:
    way = {"rate_bits": rate, "queue_seconds": 1.0, "delay_seconds": delay, "jitter_seconds": 0.0, "loss": 0.0} | more
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        yield Switch([Port("", "", f"02:00:00:00:00:{n:02x}", **way) for n in range(ports)], [sink] * ports)
    finally:
        os.close(sink)


def frame(target: int, length: int = 1000) -> bytes:
    return bytes([2, 0, 0, 0, 0, target]).ljust(length, b"\0")


def test_the_switch_delays_then_spaces_frames() -> None:
    for switch in a_switch(rate=8e6, delay=0.5):  # 1000 bytes take a millisecond
        for source in (0, 1, 0):
            switch.take(source, frame(2), 10.0)
        assert sent(switch, 20.0) == [(10.5, 2), (pytest.approx(10.501), 2), (pytest.approx(10.502), 2)]


def test_the_switch_floods_what_it_does_not_know() -> None:
    for switch in a_switch():
        switch.take(0, b"\xff" * 60, 1.0)
        assert sorted(out for *_, out, _, _ in switch.waiting) == [1, 2]


def test_the_switch_drops_what_waits_too_long() -> None:
    for switch in a_switch(rate=8e6, queue_seconds=0.0015):
        for _ in range(10):
            switch.take(0, frame(1), 1.0)
        sent(switch, 9.0)
        assert switch.idle_at[1] == pytest.approx(1.002)  # two went out, eight did not


def test_jitter_never_reorders_and_loss_is_a_share() -> None:
    for switch in a_switch(delay=0.5, jitter_seconds=0.4, loss=0.25):
        for number in range(2000):
            switch.take(0, frame(1), 1.0 + number / 1000)
        dues = [due for due, *_ in sorted(switch.waiting, key=lambda waiting: waiting[1])]
        assert dues == sorted(dues)
        assert 1400 < len(dues) < 1600


# Real hosts

TRANSFER = """
import os, socket, sys, time
place, rounds, length = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 3, int(sys.argv[1])
if os.environ["RANK"] == "0":
    with socket.create_server(place) as server:
        print("listening")
        peer, _ = server.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(20):
        peer.sendall(peer.recv(1))
    for _ in range(rounds if length else 0):
        # From before the first byte: of a rank that other work delays, bytes that came meanwhile would count as fast.
        start, got = time.perf_counter(), 0
        peer.sendall(b"x")
        while got < length:
            got += len(peer.recv(1 << 16))
        print("rate", 8 * length / (time.perf_counter() - start))
else:
    while True:  # until rank 0 listens
        try:
            peer = socket.create_connection(place)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(20):
        start = time.perf_counter()
        peer.sendall(b"x")
        peer.recv(1)
        print("trip", time.perf_counter() - start)
    for _ in range(rounds if length else 0):
        peer.recv(1)
        peer.sendall(bytes(length))
"""


def measured(hosts: Hosts, length: int) -> tuple[list[float], list[float]]:
    lines: list[str] = []
    argv = [sys.executable, "-I", "-S", "-c", TRANSFER, str(length)]
    ended = hosts.run(argv, timeout_seconds=60, sink=lambda _, line: lines.append(line))
    assert ended.codes == (0, 0), (ended, lines)
    found: dict[str, list[float]] = {"rate": [], "trip": []}
    for word, number in (line.split() for line in lines if " " in line):
        found[word].append(float(number))
    return found["rate"], found["trip"]


def best_rate(hosts: Hosts, length: int, enough: float) -> float:
    """The best of some tries, for others may use this machine."""
    best = 0.0
    for _ in range(4):
        best = max(best, *measured(hosts, length)[0])
        if best > enough:
            break
    return best


def left(hosts: Hosts) -> list[str]:
    return [name for name in (*hosts.names, hosts.hub) if namespaces.exists(name)]


@real
def test_a_shaped_link_holds_its_rate_and_counts_its_bytes() -> None:
    with Hosts(2, LinkSpec.parse("100mbit")) as hosts:
        assert left(hosts) == [*hosts.names, hosts.hub]
        measured(hosts, 1_000_000)
        sent_1, got_1 = hosts.counters(1)
        sent_2, got_2 = hosts.counters(2)
        assert sent_2 == pytest.approx(got_1, rel=0.01)
        assert 3.1e6 < sent_2 < 3.2e6  # three million, in frames of 1448 with 66 bytes of headers
        assert max(sent_1, got_2) < 0.3e6
        assert 90e6 < best_rate(hosts, 1_000_000, enough=90e6) < 101e6
    assert left(hosts) == []


@real
@pytest.mark.skipif(not os.path.exists("/dev/net/tun"), reason="no TAP devices")
def test_a_delayed_link_holds_its_delay_and_its_rate() -> None:
    with Hosts(2, LinkSpec.parse("100mbit,5ms")) as hosts:
        _, trips = measured(hosts, 1_500_000)
        while min(trips) >= 0.0120 and len(trips) < 100:  # others may use this machine
            trips += measured(hosts, 0)[1]
        assert 0.0100 <= min(trips) < 0.0120
        assert 75e6 < best_rate(hosts, 1_500_000, enough=75e6) < 101e6  # round trips of 10 ms are lost to TCP's start
        assert hosts.counters(2)[0] > 4.5e6
        assert hosts._switch is not None
        hosts._switch.kill()
        ended = hosts.run(["sleep", "60"], timeout_seconds=30)
        assert (ended.why, ended.code) == (
            "The switch between the hosts has ended. The ranks still running were stopped.",
            1,
        )
    assert left(hosts) == []


@real
def test_ranks_find_each_other_and_output_is_forwarded(capfd: pytest.CaptureFixture[str]) -> None:
    show = "import os; print(*(os.environ[n] for n in 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE EXTRA'.split()))"
    with Hosts(2, subnet="10.78.9.0/29") as hosts:
        assert hosts.addresses == ("10.78.9.1", "10.78.9.2")
        ended = hosts.run([sys.executable, "-S", "-c", show], {"EXTRA": "yes"}, per_host=2, timeout_seconds=30)
    assert ended == ((0, 0, 0, 0), "", 0)
    lines = sorted(capfd.readouterr().out.splitlines())
    ranks = [(1, 0, 0), (1, 1, 1), (2, 2, 0), (2, 3, 1)]
    assert lines == [f"[host {host} rank {rank}] {rank} 4 {local} 2 yes" for host, rank, local in ranks]


@real
def test_one_dead_rank_ends_the_run_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_launch, "_KILL_SECONDS", 20.0)  # a polite request is enough, however long it takes
    script = "import os, time; os.environ['RANK'] == '1' and os._exit(7); time.sleep(60)"
    with Hosts(2) as hosts:
        start = time.monotonic()
        ended = hosts.run([sys.executable, "-S", "-c", script], grace_seconds=0.1, timeout_seconds=30)
        assert time.monotonic() - start < 30, "which is the time limit"
        assert ended.codes == (-signal.SIGTERM, 7)
        assert ended.code == 7
        assert f"host 2 ({hosts.addresses[1]}) exited with code 7" in ended.why
        ended = hosts.run(["sleep", "60"], timeout_seconds=0.2)
        assert ended.code == 124
        assert "stopped after 0.2 s; still running: host 1" in ended.why


@real
def test_a_command_in_many_ranks_shares_a_random_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADWIRE_SECRET", raising=False)
    with Hosts(2) as hosts:
        lines: list[str] = []
        code = "import os; print(os.environ['GRADWIRE_SECRET'])"
        ended = hosts.run([sys.executable, "-S", "-c", code], sink=lambda rank, line: lines.append(line))
    assert ended.code == 0 and len(lines) == 2 and len(set(lines)) == 1 and len(lines[0]) == 64


def summed(rank: int, world: int, length: int) -> tuple[str, float]:
    """The address of this rank's host, and a sum over all ranks."""
    numbers = torch.full((length,), float(rank + 1))
    dist.all_reduce(numbers)
    device = namespaces.listed("-4", "addr", "show", "dev", "eth0")[0]
    return device["addr_info"][0]["local"], float(numbers[0])


def dies(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


@real
def test_a_function_is_called_in_every_host() -> None:
    with Hosts(2, LinkSpec.parse("1gbit")) as hosts:
        results = hosts.call(summed, 1_000_000, limit_seconds=60)
        assert results == [(address, 3.0) for address in hosts.addresses]
        assert hosts.counters(1)[0] > 4e6  # the sum went over the link
        with pytest.raises(RankError, match="rank 1 of 2 died without a result: exit code 7"):
            hosts.call(dies, limit_seconds=60)
    assert left(hosts) == []


@real
def test_an_exception_leaves_nothing() -> None:
    hosts = Hosts(1, LinkSpec.parse("1gbit"))
    with pytest.raises(ZeroDivisionError), hosts:
        raise ZeroDivisionError
    assert left(hosts) == []


@real
def test_a_name_in_use_is_refused_and_left_alone() -> None:
    hosts = Hosts(2)
    taken = hosts.names[1]
    namespaces.create(taken)
    try:
        with pytest.raises(HostsUnavailableError, match=f"{taken} is in use"), hosts:
            pass
        assert left(hosts) == [taken]
    finally:
        namespaces.remove([taken])


OWNER = """
import sys, types
package = sys.modules["gradwire"] = types.ModuleType("gradwire")  # the room alone: it does without torch
package.__path__ = [sys.argv[1]]
from gradwire_lab.network import Hosts, LinkSpec
with Hosts(2, LinkSpec.parse("10mbit,1ms")) as hosts:
    print(*hosts.names, hosts.hub, flush=True)
    hosts.run(["sh", "-c", "sleep 60 & wait"])
"""


@real
@pytest.mark.skipif(not os.path.exists("/dev/net/tun"), reason="no TAP devices")
def test_nothing_survives_its_owner() -> None:
    signals = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    script = [sys.executable, "-c", OWNER, *gradwire.__path__]
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    owners = [subprocess.Popen(script, **quiet) for _ in signals]
    try:
        names = [owner.stdout.readline().split() for owner in owners]
        for mine in names:
            assert len(mine) == 3
            wait_until(lambda mine=mine: len(namespaces.residents(mine)) >= 5)  # sleepers, shells, a switch
        inside = namespaces.residents(names[0])
        for owner, number in zip(owners, signals, strict=True):
            owner.send_signal(number)
        assert [owner.wait(timeout=60) for owner in owners[:2]] == [-signal.SIGKILL, 128 + signal.SIGTERM]
        assert owners[2].wait(timeout=60) != 0
        assert not any(namespaces.exists(name) for mine in names[1:] for name in mine)
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in inside))  # and this before any sweep
        wait_until(lambda: not any(namespaces.exists(name) for name in names[0]))
    finally:
        for owner in owners:
            owner.kill()
            owner.communicate()
        sweep()


def test_a_signal_waits_until_the_rank_that_starts_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Received(Exception):
        pass

    def receive(number: int, frame: object) -> None:
        raise Received

    def interrupted(*args: Any, **options: Any) -> "subprocess.Popen[bytes]":
        signal.raise_signal(signal.SIGTERM)
        started = start(*args, **options)
        signal.raise_signal(signal.SIGTERM)
        return started

    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    before = signal.signal(signal.SIGTERM, receive)
    processes = RankProcesses(lambda rank, line: None)
    try:
        with pytest.raises(Received):
            processes.start("rank 0", ["sleep", "60"], os.environ, None)
    finally:
        signal.signal(signal.SIGTERM, before)
        processes.close()
    assert [rank.process.returncode for rank in processes.ranks] == [-signal.SIGKILL]


def wait_until(true: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@real
def test_the_sweep_spares_the_living_and_strangers() -> None:
    with Hosts(1) as hosts:
        stranger = f"gw{os.getpid()}h1"  # like ours, but of another maker
        namespaces.create(stranger)
        try:
            sweep()
            assert len(left(hosts)) == 2
            assert namespaces.exists(stranger)
        finally:
            namespaces.remove([stranger])


REDUCE = """
import datetime, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
group = dist.new_group(timeout=datetime.timedelta(seconds=3))
x = torch.ones(1000)
dist.all_reduce(x, group=group)
print("ready", flush=True)
while True:
    dist.all_reduce(x, group=group)
"""


@real
def test_a_cut_host_is_named_within_the_timeout() -> None:
    cut_at: list[float] = []
    lines: list[str] = []

    with Hosts(2, LinkSpec.parse("100mbit")) as hosts:

        def listen(rank: int, line: str) -> None:
            lines.append(line)
            if line == "ready" and not cut_at:
                hosts.cut(2)
                cut_at.append(time.monotonic())

        ended = hosts.run([sys.executable, "-c", REDUCE], timeout_seconds=100, grace_seconds=2, sink=listen)
        assert cut_at, lines
        assert (
            time.monotonic() - cut_at[0] < 3 + 2 + 20
        )  # the group's timeout, not the world's; the grace; a busy machine
        assert hosts.down() == [2]
        assert ended.why.startswith(f"Cut off, its link is down: host 2 ({hosts.addresses[1]}).")
        assert ended.code not in (0, 124)
        assert any("Timed out waiting 3000ms" in line for line in lines), lines
        hosts.heal(2)
        assert hosts.down() == []
        assert measured(hosts, 0)[1]  # they talk again
    assert left(hosts) == []


# Refusals


def test_impossible_hosts_are_refused() -> None:
    for count in (0, -1, 1000):
        with pytest.raises(ValueError, match=f"cannot make {count} hosts"):
            Hosts(count)
    for subnet, sentence in {
        "8.8.8.0/24": "others",
        "240.0.0.0/24": "others",
        "127.0.0.0/24": "others",
        "10.77.0.0/31": "no room",
        "ten": "cannot read the subnet",
    }.items():
        with pytest.raises(ValueError, match=sentence):
            Hosts(4, subnet=subnet)
    with pytest.raises(ValueError, match="no host 3"):
        Hosts(2).cut(3)
    with pytest.raises(ValueError, match="cannot find the command 'no-such-command'"):
        Hosts(2).run(["no-such-command"])
    with pytest.raises(HostsUnavailableError, match="enter their context"):
        Hosts(2).run(["true"])
    for seconds in (-1.0, 0.0, math.nan):
        with pytest.raises(ValueError, match="cannot stop a run after"):
            Hosts(2).run(["true"], timeout_seconds=seconds)


def test_no_root_and_no_iproute2_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool, path=None: f"/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces, "_capabilities", lambda: 1 << 12)  # root of a container
    with pytest.raises(HostsUnavailableError, match="hosts need CAP_SYS_ADMIN, which root lacks here"), Hosts(2):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(HostsUnavailableError, match="hosts need root"), Hosts(2):
        pass
    monkeypatch.setattr(shutil, "which", lambda tool, path=None: None)
    with pytest.raises(HostsUnavailableError, match="hosts need iproute2, but ip and tc"), Hosts(2):
        pass


# The command line


@real
def test_the_command_runs_in_every_host() -> None:
    argv = [
        "run",
        "--hosts",
        "2",
        "--rate",
        "1gbit",
        "--timeout",
        "30",
        "--",
        "sh",
        "-c",
        "echo rank $RANK; exit $RANK",
    ]
    done = CliRunner().invoke(app, argv)
    assert done.exit_code == 1
    assert "[host 1] rank 0\n" in done.output
    assert "[host 2] rank 1\n" in done.output
    assert re.search(r"2 hosts, 10\.77\.\d+\.1 to 10\.77\.\d+\.2, each on a link of 1gbit", done.output)
    assert re.search(r"host 2 \(10\.77\.\d+\.2\) exited with code 1", done.output)


def test_the_command_refuses_in_a_sentence() -> None:
    done = CliRunner().invoke(app, ["run", "--rate", "100mbps", "--", "true"])
    assert done.exit_code == 2
    assert "gradwire hosts: 'mbps' in '100mbps' is no unit of rate" in done.output


@real
def test_the_sweep_reports() -> None:
    done = CliRunner().invoke(app, ["sweep"])
    assert done.exit_code == 0
    assert "nothing was left behind" in done.output or "removed gw" in done.output
