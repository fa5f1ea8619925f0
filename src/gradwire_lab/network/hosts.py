"""Several hosts on one machine: network namespaces around a switch, with links as thin as asked.

Each host has an interface ``eth0`` with an address of its own and no way out of the machine. What it sends is shaped
on that interface, what it receives on the port of the switch that leads to it. The switch is a kernel bridge; where
frames must be late and the kernel has no netem, it is the one in ``userspace_switch.py``.

    with Hosts(4, LinkSpec.parse("100mbit")) as hosts:
        ended = hosts.run(["python", "train.py"])
        results = hosts.call(function)
"""

import atexit
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, Self

from gradwire.comm.job_secret import secret_variable
from gradwire.comm.rates import LinkSpec
from gradwire_lab.launch import launch
from gradwire_lab.network import namespaces, shaping, userspace_switch
from gradwire_lab.network.addresses import mac, private, unused
from gradwire_lab.network.launch import DEFAULTS, FIRST_PORT, Ended, RankProcesses, Sink, place
from gradwire_lab.network.namespaces import HostsUnavailableError, ip, listed
from gradwire_lab.signals import signals_deferred, signals_raise

DEVICE = "eth0"
MOST_HOSTS = 250

_JUMBO_BITS = 250e6  # above this the switch in user space needs larger frames to keep up


Shaper = Literal["bridge", "netem", "switch"]


class Hosts:
    """Hosts numbered from 1, made on entry and gone on exit, whatever happens in between.

    Attributes:
        addresses: By host, in order.
        names: Of the namespaces, by host.
        hub: The namespace of the switch.
        shaper: What joins and delays: a plain bridge, a bridge with netem, or the switch; known once entered.
        mtu: Bytes of the largest packet.
    """

    def __init__(self, count: int, link: LinkSpec | None = None, subnet: str | None = None) -> None:
        """Describe the hosts; nothing is made before the context is entered.

        Args:
            count: How many.
            link: What each host's link can do, in either direction; unshaped if not given.
            subnet: A private IPv4 network for them; by default one that this machine does not use.

        Raises:
            ValueError: The count or the subnet does not serve; the sentence says why.
        """
        if not 1 <= count <= MOST_HOSTS:
            raise ValueError(f"cannot make {count} hosts; give 1 to {MOST_HOSTS}")
        self.count, self._numbers = count, range(1, count + 1)
        self.link = link if link is not None else LinkSpec()
        self.network = None if subnet is None else private(subnet, count)
        self.addresses: tuple[str, ...] = ()
        stem = namespaces.family()
        self.names = [f"{stem}h{host}" for host in self._numbers]
        self.hub = f"{stem}hub"
        self.shaper: Shaper = "bridge"
        self.mtu = 1500
        self._made: list[str] = []
        self._switch: subprocess.Popen[str] | None = None
        self._watchdog: namespaces.Watchdog | None = None
        self._ports = itertools.count(FIRST_PORT)
        self._owner = os.getpid()
        self._signals = ExitStack()

    def __enter__(self) -> Self:
        namespaces.need()
        namespaces.sweep()
        self._signals.enter_context(signals_raise(lambda n: SystemExit(128 + n), signal.SIGTERM, signal.SIGHUP))
        atexit.register(self.close)
        try:
            self._watchdog = namespaces.start_watchdog([*self.names, self.hub])
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything inside and remove every trace; a second call does nothing."""
        if os.getpid() != self._owner:  # a fork must not take its parent's network away
            return
        try:
            with signals_deferred():
                atexit.unregister(self.close)
                if self._switch is not None:
                    userspace_switch.stop(self._switch)
                    self._switch = None
                made, self._made = self._made, []
                namespaces.remove(made)
        finally:
            if self._watchdog is not None:
                namespaces.stop_watchdog(self._watchdog)
                self._watchdog = None
            self._signals.close()

    def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        per_host: int = 1,
        cwd: str | None = None,
        timeout_seconds: float | None = None,
        grace_seconds: float = 3.0,
        sink: Sink | None = None,
    ) -> Ended:
        """Run a command in every host, as ranks of one group, and wait for all of them.

        The ranks find each other by the variables that ``torchrun`` would set; a ``torchrun`` started here finds its
        place among the hosts by those it reads. When one rank fails, or time is up, the others are stopped.

        Args:
            argv: The command and its arguments.
            env: Variables beyond those of this process.
            per_host: Ranks in each host.
            cwd: Where to run; here by default.
            timeout_seconds: For the whole run.
            grace_seconds: What the others get to end by themselves after one failed.
            sink: Called with the rank and each line of its output; prints it after the name of the host by default.

        Returns:
            Exit codes by rank, and a sentence naming the host where something went wrong.
        """
        variables = {**DEFAULTS, **os.environ, **secret_variable(), **(env or {})}
        if per_host < 1:
            raise ValueError(f"cannot start {per_host} ranks in each host; give 1 or more")
        if timeout_seconds is not None and not timeout_seconds > 0:
            raise ValueError(f"cannot stop a run after {timeout_seconds:g} s; give more than 0")
        if not argv or (cwd is None and shutil.which(argv[0], path=variables.get("PATH")) is None):
            raise ValueError(f"cannot find the command {argv[0]!r}" if argv else "there is no command to run")
        if not self._made:
            raise HostsUnavailableError("the hosts are not there; enter their context before running something in them")
        port = next(self._ports)
        processes = RankProcesses(sink or self._print(per_host))
        try:
            for rank in range(self.count * per_host):
                words = namespaces.inside(self.names[rank // per_host], argv)
                own = variables | place(rank, per_host, self.count, (self.addresses[0], port), DEVICE)
                processes.start(self._title(rank, per_host), words, own, cwd)
            return processes.wait(timeout_seconds, grace_seconds, self._network_fault, self._switch_ended)
        finally:
            processes.close()

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Call ``function(rank, world, *args)`` in every host, as ranks of one group; options as of `launch`.

        Returns:
            What each rank returned, in rank order.

        Raises:
            RankError: A rank raised or died; the others were stopped.
        """
        rendezvous = self.addresses[0], next(self._ports)
        places = [place(rank, 1, self.count, rendezvous, DEVICE) for rank in range(self.count)]
        return launch(function, self.count, *args, prepare=partial(_enter, self.names, places), **options)

    def counters(self, host: int) -> tuple[int, int]:
        """Bytes of the frames that a host has sent and received over its interface since it was made."""
        name = self._name(host)
        if self.shaper != "switch":
            return shaping.sent_bytes(name, DEVICE), shaping.sent_bytes(self.hub, f"p{host}")
        (device,) = listed("-s", "-n", name, "link", "show", "dev", DEVICE)
        return device["stats64"]["tx"]["bytes"], device["stats64"]["rx"]["bytes"]

    def cut(self, host: int) -> None:
        """Take a host's link down: it neither sends nor receives."""
        ip("-n", self._name(host), "link", "set", DEVICE, "down")

    def heal(self, host: int) -> None:
        """Take a host's link up again."""
        ip("-n", self._name(host), "link", "set", DEVICE, "up")

    def down(self) -> list[int]:
        """The hosts whose link is down."""
        shown = {host: listed("-n", self._name(host), "link", "show", "dev", DEVICE) for host in self._numbers}
        return [host for host, (device,) in shown.items() if "UP" not in device["flags"]]

    def _build(self) -> None:
        network = self.network or unused(self.count)
        self.addresses = tuple(str(address) for address in itertools.islice(network.hosts(), self.count))
        for name in (self.hub, *self.names):
            namespaces.refuse_taken(name)
            self._made.append(name)  # first, so that an interruption cannot hide it
            namespaces.create(name)
        ip("-n", self.hub, "link", "add", "br0", "type", "bridge")
        ip("-n", self.hub, "link", "set", "br0", "addrgenmode", "none", "up")
        if self.link.delayed:
            self.shaper = "netem" if shaping.has_netem(self.hub, "br0") else "switch"
        if self.shaper == "switch":
            self._plug_switch()
        for host in self._numbers:
            if self.shaper != "switch":
                self._plug_bridge(host)
            self._address(host, network.prefixlen)

    def _plug_bridge(self, host: int) -> None:
        port = f"p{host}"
        ip("link", "add", DEVICE, "netns", self._name(host), "type", "veth", "peer", "name", port, "netns", self.hub)
        ip("-n", self.hub, "link", "set", port, "addrgenmode", "none", "master", "br0", "up")
        shaping.hold_rate(self.hub, port, self.link, self.mtu)

    def _plug_switch(self) -> None:
        rate = self.link.rate_bits
        self.mtu = 1500 if rate is not None and rate <= _JUMBO_BITS else 9000
        queue = 0.0 if rate is None else shaping.queue_seconds(rate)
        way = (rate, queue, self.link.delay_seconds, self.link.jitter_seconds, self.link.loss)
        ports = [userspace_switch.Port(self._name(host), DEVICE, mac(host), *way) for host in self._numbers]
        try:
            self._switch = userspace_switch.start(ports, self.hub)
        except OSError as wrong:
            raise HostsUnavailableError(f"the kernel has no netem, and {wrong}") from None

    def _address(self, host: int, prefix: int) -> None:
        name = self._name(host)
        # No IPv6 address, so that the counters count nothing but what the ranks say.
        ip("-n", name, "link", "set", DEVICE, "addrgenmode", "none", "address", mac(host), "mtu", str(self.mtu))
        ip("-n", name, "addr", "add", f"{self.addresses[host - 1]}/{prefix}", "dev", DEVICE)
        hold = shaping.hold_rate_and_delay if self.shaper == "netem" else shaping.hold_rate
        hold(name, DEVICE, self.link, self.mtu)
        ip("-n", name, "link", "set", DEVICE, "up")

    def _switch_ended(self) -> bool:
        return self._switch is not None and self._switch.poll() is not None

    def _network_fault(self) -> str:
        if self._switch_ended():
            return "The switch between the hosts has ended."
        cut = ", ".join(self._title(host - 1, 1) for host in self.down())
        return f"Cut off, its link is down: {cut}." if cut else ""

    def _title(self, rank: int, per_host: int) -> str:
        host = rank // per_host
        title = f"host {host + 1} ({self.addresses[host]})"
        return title if per_host == 1 else f"rank {rank} on {title}"

    def _print(self, per_host: int) -> Sink:
        def show(rank: int, line: str) -> None:
            name = f"host {rank // per_host + 1}" + (f" rank {rank}" if per_host > 1 else "")
            print(f"[{name}] {line}", flush=True)

        return show

    def _name(self, host: int) -> str:
        if host not in self._numbers:
            raise ValueError(f"there is no host {host}; they are numbered 1 to {self.count}")
        return self.names[host - 1]


def _enter(names: Sequence[str], places: Sequence[Mapping[str, str]], rank: int) -> None:
    """Let a rank live in the namespace of its host."""
    userspace_switch.enter(names[rank])
    os.environ |= places[rank]
