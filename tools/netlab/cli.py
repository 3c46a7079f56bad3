"""The command line: run, check."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .delayed_wires import describe_delays, parse_delay_ms
from .errors import NetlabError
from .flow_usage import describe_flows
from .lab import Lab
from .link_plan import SPEEDS, TOLD, parse_loss, parse_rate_mbit, parse_slow_flows
from .rank_runner import RankRunner

EXIT_CANNOT_RUN = 125
# Options that Lab takes as they are.
_OF_LAB = ("hosts", "nics", "rate_mbit", "per_flow_mbit", "slow_flows", "mtu", "segmentation_offload")
_OF_LAB += ("congestion_control", "delay_ms", "loss", "speed", "own_cpus")

_Value = TypeVar("_Value")

# As it was called, from the root of the repository: with that on the path, or tools/.
PROGRAM = "python -m tools.netlab" if __package__ == "tools.netlab" else "PYTHONPATH=tools python -m netlab"

_EXAMPLES = f"""examples:
  {PROGRAM} run --rate 10G --mtu 9000 -- bagua-net-bench
  {PROGRAM} run --hosts 4 --nics 2 --rate 25G -- python examples/ddp_train.py
  {PROGRAM} run --rate 1600M --per-flow 400M -- bagua-net-bench
  {PROGRAM} run --hosts 3 --rate 10G --uneven 2:0=1G -- ./my_job.sh
  {PROGRAM} run --rate 1G --delay 5ms -- python examples/ddp_train.py
                                                              (a round trip takes 10 ms)
"""


def _converting(parse: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """For argparse, which shows the text of an ArgumentTypeError alone."""

    def convert(text: str) -> _Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _per_nic(parse: Callable[[str], _Value]) -> Callable[[str], _Value | list[_Value]]:
    """One for all, or with commas one for each."""

    def convert(text: str) -> _Value | list[_Value]:
        values = [parse(part) for part in text.split(",")]
        return values if len(values) > 1 else values[0]

    return _converting(convert)


@_converting
def _uneven(text: str) -> tuple[tuple[int, int], float]:
    place, _, rate = text.partition("=")
    host, _, nic = place.partition(":")
    if not (host.isdecimal() and nic.isdecimal() and rate):
        raise ValueError(f"{text!r} is not HOST:NIC=RATE; write 1:0=2.5G for host 1's first NIC")
    return (int(host), int(nic)), parse_rate_mbit(rate)


@_converting
def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"{text!r} is not NAME=VALUE")
    return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Real, limited networks on one machine, made of network namespaces."
    )
    commands = parser.add_subparsers(dest="action", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a command on every host of a new network",
        description="Runs CMD on every host, as rank 0, 1, ... of one job (RANK, WORLD_SIZE, MASTER_ADDR, "
        "NCCL_HOSTID, NCCL_SOCKET_IFNAME and so on are set), marks its output by host, removes the network, and exits "
        "with the worst exit code.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def option(name: str, kind: Callable[[str], Any], metavar: str | None, about: str, **more: Any) -> None:
        run.add_argument(name, type=kind, metavar=metavar, help=about, **more)

    def switch(name: str, about: str) -> None:
        run.add_argument(name, action="store_true", help=about)

    rate = _converting(parse_rate_mbit)
    option("--hosts", int, None, "number of hosts (default 2)", default=2)
    about = "how often CMD is started on each host, whose ranks reach each other over its loopback (default 1)"
    option("--ranks-per-host", int, "N", about, default=1)
    option("--nics", int, None, "NICs of each host, eth0 to eth<N-1> (default 1)", default=1)
    option(
        "--rate",
        _per_nic(parse_rate_mbit),
        "RATE[,RATE..]",
        "link rate, as 10G; one for each NIC if several",
        dest="rate_mbit",
    )
    about = (
        "what /sys says of the links' speed: told: the rate, as a driver does (100 Gb/s without one); veth: 10 Gb/s,"
    )
    about += " as in a pod of Kubernetes; unknown: -1, as on many clouds (default told)"
    option("--speed", str, None, about, choices=SPEEDS, default=TOLD)
    option("--per-flow", rate, "RATE", "cap of each TCP connection, as 400M", dest="per_flow_mbit")
    about = "lower cap of one connection in N, as 1/4=40M"
    option("--slow-flows", _converting(parse_slow_flows), "1/N=RATE", about)
    switch("--show-flows", "afterwards, say how many flows were used and what they can carry")
    option("--uneven", _uneven, "HOST:NIC=RATE", "one link's rate", action="append", default=[])
    option("--mtu", _per_nic(int), "BYTES[,BYTES..]", "default 1500; one for each NIC if several", default=1500)
    option("--ip", str, None, "IP versions (default both)", choices=("4", "6", "both"), default="both")
    run.add_argument(
        "--no-offload",
        action="store_false",
        dest="segmentation_offload",
        help="no segmentation offload: every packet has the MTU's size",
    )
    about = "of every packet, one way, as 5ms or 250us, in both directions: a round trip takes twice that (default 0)"
    option("--delay", _converting(parse_delay_ms), "TIME", about, default=0.0, dest="delay_ms")
    about = "of the packets, at random, as 1%% or 0.1%%; --no-offload makes them as small as on a wire (default 0)"
    option("--loss", _converting(parse_loss), "PERCENT", about, default=0.0)
    about = (
        "the most that TCP keeps for a connection; a connection moves at most this much in a round trip (default the"
    )
    option("--tcp-buffer", int, "MIB", f"{about} machine's)")
    switch("--own-cpus", "no two hosts run on the same CPU: each has an equal part of them")
    about = "TCP congestion control, as cubic (default the machine's)"
    option("--congestion", str, "NAME", about, dest="congestion_control")
    switch("--gpu-each", "host k sees GPU k only (CUDA_VISIBLE_DEVICES)")
    option("--env", _assignment, "NAME=VALUE", "set for every rank", action="append", default=[])
    option("--timeout", float, "SECONDS", "end the job after; 0: never (default 3600)", default=3600.0)
    option("--grace", float, "SECONDS", "of the others after a failure (default 10)", default=10.0)
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD", help="the command and its arguments")
    commands.add_parser("check", help="say whether this process can build networks, and what it lacks")
    return parser


def _run(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        parser.error(f"no command; write it after --, as in: {PROGRAM} run --rate 10G -- bagua-net-bench")
    if given.ranks_per_host < 1:
        parser.error(f"--ranks-per-host is {given.ranks_per_host}; it must be 1 or more")
    if given.show_flows and given.per_flow_mbit is None:
        parser.error("--show-flows needs --per-flow: flows that have no cap are not told apart")
    try:
        lab = Lab(
            uneven_mbit=dict(given.uneven),
            ip_versions=(4, 6) if given.ip == "both" else (int(given.ip),),
            tcp_buffer_bytes=None if given.tcp_buffer is None else given.tcp_buffer << 20,
            **{name: getattr(given, name) for name in _OF_LAB},
        )
    except ValueError as error:
        parser.error(str(error))
    with lab:
        runner = RankRunner(
            lab,
            timeout_seconds=given.timeout or None,
            grace_seconds=given.grace,
            gpus=[str(host.index) for host in lab.hosts] if given.gpu_each else (),
            ranks_per_host=given.ranks_per_host,
        )
        code = runner.run(command, dict(given.env))
        if given.show_flows:
            for host in lab.hosts:
                for nic, name in enumerate(host.interfaces):
                    print(
                        f"netlab: host {host.index} {name} sent over {describe_flows(lab.flow_usage(host.index, nic))}"
                    )
        if usages := lab.delay_usage():
            # With a switch each packet passes two wires, half of the delay on each.
            kept = given.delay_ms / (2 if lab.switches else 1)
            print(f"netlab: {describe_delays(kept, usages)}", file=sys.stderr)
        return code


def _check() -> int:
    """Builds and removes the smallest lab that uses every kernel feature."""
    lab = Lab(hosts=2, uneven_mbit={(0, 0): 1000.0, (1, 0): 500.0}, per_flow_mbit=100.0, segmentation_offload=False)
    with lab:
        pass
    print("netlab can build networks here: namespaces, veth, bridge, HTB, flow classes")
    try:
        with Lab(hosts=2, delay_ms=1.0):
            pass
    except NetlabError as error:
        # Everything else works without.
        print(f"netlab cannot delay packets here: {str(error).removeprefix('netlab: ')}")
    else:
        print("netlab can delay packets here: TAP devices, the forwarder")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    parsed = parser.parse_args(arguments)
    try:
        return _run(parser, parsed) if parsed.action == "run" else _check()
    except NetlabError as error:
        text = str(error)
        print(text if text.startswith("netlab") else f"netlab: {text}", file=sys.stderr)
        return EXIT_CANNOT_RUN
    except KeyboardInterrupt:
        return 130
