"""The command line: run, sweep, check."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from .delayed_wires import describe_delays, parse_delay_ms
from .errors import NetlabError
from .flow_usage import describe_flows
from .lab import MAX_DELAYED_MTU, MAX_HOSTS, MAX_NICS, TCP_BUFFER_BYTES, Lab
from .link_plan import MAX_MTU, MIN_MTU, SPEEDS, TOLD, parse_loss, parse_rate_mbit, parse_slow_flows
from .namespace import sweep
from .rank_runner import RankRunner
from .requirements import missing_requirement

EXIT_CANNOT_RUN = 125

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


_one_rate = _converting(parse_rate_mbit)
_rates = _converting(lambda text: [parse_rate_mbit(part) for part in text.split(",")])


def _within(low: int, high: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer; give one in {low}..{high}") from error
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{text} is outside {low}..{high}; give an integer in that range")
        return number

    return convert


def _mtus(text: str) -> list[int]:
    return [_within(MIN_MTU, MAX_MTU)(part) for part in text.split(",")]


def _uneven(text: str) -> tuple[tuple[int, int], float]:
    place, _, rate = text.partition("=")
    host, _, nic = place.partition(":")
    if not (host.isdecimal() and nic.isdecimal() and rate):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:NIC=RATE; write 1:0=2.5G for host 1's first NIC")
    return (int(host), int(nic)), _one_rate(rate)


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from error
    if not 0 <= seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is out of range; give 0 or more seconds")
    return seconds


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
    run.add_argument("--hosts", type=_within(2, MAX_HOSTS), default=2, help="number of hosts (default 2)")
    run.add_argument(
        "--ranks-per-host",
        type=_within(1, 64),
        default=1,
        metavar="N",
        help="how often CMD is started on each host, whose ranks reach each other over its loopback (default 1)",
    )
    run.add_argument(
        "--nics", type=_within(1, MAX_NICS), default=1, help="NICs of each host, eth0 to eth<N-1> (default 1)"
    )
    run.add_argument(
        "--rate", type=_rates, metavar="RATE[,RATE..]", help="link rate, as 10G; one for each NIC if several"
    )
    run.add_argument(
        "--speed",
        choices=SPEEDS,
        default=TOLD,
        help="what /sys says of the links' speed: told: the rate, as a driver does (100 Gb/s without one); veth: 10"
        " Gb/s, as in a pod of Kubernetes; unknown: -1, as on many clouds (default told)",
    )
    run.add_argument("--per-flow", type=_one_rate, metavar="RATE", help="cap of each TCP connection, as 400M")
    run.add_argument(
        "--slow-flows",
        type=_converting(parse_slow_flows),
        metavar="1/N=RATE",
        help="lower cap of one connection in N, as 1/4=40M",
    )
    run.add_argument(
        "--show-flows", action="store_true", help="afterwards, say how many flows were used and what they can carry"
    )
    run.add_argument(
        "--uneven", type=_uneven, metavar="HOST:NIC=RATE", action="append", default=[], help="one link's rate"
    )
    run.add_argument(
        "--mtu", type=_mtus, default=[1500], metavar="BYTES[,BYTES..]", help="default 1500; one for each NIC if several"
    )
    run.add_argument("--ip", choices=("4", "6", "both"), default="both", help="IP versions (default both)")
    run.add_argument(
        "--no-offload", action="store_true", help="no segmentation offload: every packet has the MTU's size"
    )
    run.add_argument(
        "--delay",
        type=_converting(parse_delay_ms),
        default=0.0,
        metavar="TIME",
        help="of every packet, one way, as 5ms or 250us, in both directions: a round trip takes twice that (default 0)",
    )
    run.add_argument(
        "--loss",
        type=_converting(parse_loss),
        default=0.0,
        metavar="PERCENT",
        help="of the packets, at random, as 1%% or 0.1%%; --no-offload makes them as small as on a wire (default 0)",
    )
    run.add_argument(
        "--tcp-buffer",
        type=_within(1, TCP_BUFFER_BYTES[-1] >> 20),
        metavar="MIB",
        help="the most that TCP keeps for a connection; a connection moves at most this much in a round trip (default"
        " the machine's)",
    )
    run.add_argument(
        "--own-cpus", action="store_true", help="no two hosts run on the same CPU: each has an equal part of them"
    )
    run.add_argument("--congestion", metavar="NAME", help="TCP congestion control, as cubic (default the machine's)")
    run.add_argument("--gpu-each", action="store_true", help="host k sees GPU k only (CUDA_VISIBLE_DEVICES)")
    run.add_argument(
        "--env", type=_assignment, metavar="NAME=VALUE", action="append", default=[], help="set for every rank"
    )
    run.add_argument(
        "--timeout", type=_seconds, default=3600.0, metavar="SECONDS", help="end the job after; 0: never (default 3600)"
    )
    run.add_argument(
        "--grace", type=_seconds, default=10.0, metavar="SECONDS", help="of the others after a failure (default 10)"
    )
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD", help="the command and its arguments")
    commands.add_parser("sweep", help="remove what killed netlab processes left")
    commands.add_parser("check", help="say whether this process can build networks, and what it lacks")
    return parser


def _check_run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """What no option can tell by itself, in the words of options: Lab has those of Python."""
    if arguments.command[:1] == ["--"]:
        del arguments.command[0]
    if not arguments.command or not arguments.command[0]:
        parser.error(f"no command; write it after --, as in: {PROGRAM} run --rate 10G -- bagua-net-bench")
    if arguments.per_flow is None:
        if arguments.show_flows:
            parser.error("--show-flows needs --per-flow: flows that have no cap are not told apart")
        if arguments.slow_flows is not None:
            parser.error("--slow-flows needs --per-flow, the cap of the other flows")
    elif arguments.slow_flows is not None and arguments.slow_flows.rate_mbit > arguments.per_flow:
        parser.error(
            f"--slow-flows at {arguments.slow_flows.rate_mbit:g} Mbit/s are faster than the others, which --per-flow"
            f" caps at {arguments.per_flow:g} Mbit/s; lower it"
        )
    for option, values in (("--rate", arguments.rate or [None]), ("--mtu", arguments.mtu)):
        if len(values) not in (1, arguments.nics):
            parser.error(
                f"{option} has {len(values)} values for --nics {arguments.nics}; give one value, or one for each NIC"
            )
    for (host, nic), _ in arguments.uneven:
        if host >= arguments.hosts or nic >= arguments.nics:
            parser.error(
                f"--uneven names {host}:{nic}; with --hosts {arguments.hosts} --nics {arguments.nics} the last is"
                f" {arguments.hosts - 1}:{arguments.nics - 1}"
            )
    if arguments.own_cpus and (cpus := len(os.sched_getaffinity(0))) < arguments.hosts:
        parser.error(f"--own-cpus with --hosts {arguments.hosts}: this process may use {cpus} CPUs; leave it out")
    if arguments.delay and max(arguments.mtu) > MAX_DELAYED_MTU:
        parser.error(f"--mtu {max(arguments.mtu)}: with --delay it must be at most {MAX_DELAYED_MTU} bytes")


def _run(arguments: argparse.Namespace) -> int:
    rate, mtu = arguments.rate, arguments.mtu
    with Lab(
        arguments.hosts,
        arguments.nics,
        rate_mbit=rate[0] if rate and len(rate) == 1 else rate,
        per_flow_mbit=arguments.per_flow,
        slow_flows=arguments.slow_flows,
        mtu=mtu[0] if len(mtu) == 1 else mtu,
        uneven_mbit=dict(arguments.uneven),
        ip_versions=(4, 6) if arguments.ip == "both" else (int(arguments.ip),),
        segmentation_offload=not arguments.no_offload,
        congestion_control=arguments.congestion,
        delay_ms=arguments.delay,
        loss=arguments.loss,
        speed=arguments.speed,
        tcp_buffer_bytes=None if arguments.tcp_buffer is None else arguments.tcp_buffer << 20,
        own_cpus=arguments.own_cpus,
    ) as lab:
        runner = RankRunner(
            lab,
            timeout_seconds=arguments.timeout or None,
            grace_seconds=arguments.grace,
            one_gpu_each=arguments.gpu_each,
            ranks_per_host=arguments.ranks_per_host,
        )
        code = runner.run(arguments.command, dict(arguments.env))
        if arguments.show_flows:
            for host in range(arguments.hosts):
                for nic in range(arguments.nics):
                    print(f"netlab: host {host} eth{nic} sent over {describe_flows(lab.flow_usage(host, nic))}")
        if usages := lab.delay_usage():
            # With a switch each packet passes two wires, half of the delay on each.
            kept = arguments.delay / (2 if len(usages) > 2 * arguments.nics else 1)
            print(f"netlab: {describe_delays(kept, usages)}", file=sys.stderr)
        return code


def _sweep() -> int:
    lacking = missing_requirement()
    if lacking is not None:
        raise NetlabError(lacking)
    removed = sweep()
    print(f"removed {len(removed)} network namespaces" + "".join(f"\n  {name}" for name in removed))
    return 0


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
    if parsed.action == "run":
        _check_run(parser, parsed)
    try:
        if parsed.action == "run":
            return _run(parsed)
        return _sweep() if parsed.action == "sweep" else _check()
    except NetlabError as error:
        text = str(error)
        print(text if text.startswith("netlab") else f"netlab: {text}", file=sys.stderr)
        return EXIT_CANNOT_RUN
    except KeyboardInterrupt:
        return 130
