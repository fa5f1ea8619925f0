"""``gradwire hosts``: several hosts on one machine, joined by links as thin as asked."""

from typing import Annotated

import typer

from gradwire.comm.rates import LinkSpec, parse_rate, parse_seconds, parse_share
from gradwire_lab.cli.output import refusing
from gradwire_lab.network.hosts import Hosts
from gradwire_lab.network.namespaces import HostsUnavailableError, sweep


def run(
    command: Annotated[list[str], typer.Argument(help="The command that every rank runs, after --.")],
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 2,
    rate: Annotated[str, typer.Option(help="Rate of each link, in each direction: 100mbit; by default unshaped.")] = "",
    delay: Annotated[str, typer.Option(help="Delay from one host to another, one way: 20ms.")] = "0s",
    jitter: Annotated[str, typer.Option(help="Variation of the delay: 2ms.")] = "0s",
    loss: Annotated[str, typer.Option(help="Share of frames lost: 0.1% or 0.001.")] = "0",
    per_host: Annotated[int, typer.Option(help="Ranks in each host.")] = 1,
    subnet: Annotated[str | None, typer.Option(help="A private IPv4 network; by default a free one.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds for the whole run.")] = None,
) -> None:
    """Run a command in every host, as ranks that find each other the way torchrun's do.

    Needs root and iproute2. All that it makes is removed at the end, also after an error.
    """
    with refusing("hosts", ValueError, HostsUnavailableError):
        bits = parse_rate(rate) if rate and rate != "unshaped" else None
        link = LinkSpec(bits, parse_seconds(delay), parse_seconds(jitter), parse_share(loss))
        with Hosts(hosts, link, subnet) as made:
            typer.echo(
                f"{hosts} hosts, {made.addresses[0]} to {made.addresses[-1]}, each on a link of {link}", err=True
            )
            ended = made.run(command, per_host=per_host, timeout_seconds=timeout)
    if ended.why:
        typer.echo(f"gradwire hosts: {ended.why}", err=True)
    raise typer.Exit(ended.code)


def sweep_leftovers() -> None:
    """Remove hosts that an interrupted command left behind."""
    with refusing("hosts", HostsUnavailableError):
        names = sweep()
    typer.echo(f"removed {', '.join(names)}" if names else "nothing was left behind")
