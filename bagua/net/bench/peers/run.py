"""A whole run of bagua-net-bench --peers: from options to a report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bagua.net.bench.driver_group import DriverGroup
from bagua.net.bench.endpoint import Endpoint
from bagua.net.bench.launch_environment import LOOPBACK
from bagua.net.bench.machine import describe_machine
from bagua.net.bench.network_path import NetworkPath, choose_path
from bagua.net.bench.paced_run import Pace, PacedRun
from bagua.net.bench.peers.options import PeersOptions
from bagua.net.bench.peers.report import PeersReport, describe_backends, peers_rows
from bagua.net.bench.peers.session import RANKS, ROUNDS, Footprint, IdleCost, PeersSession
from bagua.net.bench.progress import Progress
from bagua.net.bench.sample import Case
from bagua.net.bench.settings import DriverRequest, DriverSettings, driver_settings

_MAX_MESSAGES = 1_000_000


def start_sessions(options: PeersOptions, settings: DriverSettings, drivers: DriverGroup) -> list[PeersSession]:
    """All drivers of all backends, connected."""
    sessions = []
    for comms in options.comms:
        for backend in options.backends:
            endpoints: list[Endpoint] = [
                drivers.start(
                    f"{backend} x{comms} rank {rank}",
                    _command(backend, comms, rank, options, settings),
                    settings.process_environment(DriverRequest(backend, rank, RANKS)),
                )
                for rank in range(RANKS)
            ]
            sessions.append(PeersSession(backend, comms, endpoints, options.in_flight))
    for session in sessions:
        session.connect(options.timeout_s)
    return sessions


def _command(backend: str, comms: int, rank: int, options: PeersOptions, settings: DriverSettings) -> list[str]:
    command = [str(settings.driver), "peers", "--transport", backend, "--rank", str(rank), "--comms", str(comms)]
    command += ["--in-flight", str(options.in_flight), "--max-message-bytes", str(max(options.message_sizes))]
    command += ["--timeout-ms", str(int(options.timeout_s * 1000))]
    if backend == "bare":
        return [*command, "--address", settings.address]
    return [*command, "--library", str(settings.library)]


def measure_silence(
    sessions: Sequence[PeersSession], options: PeersOptions
) -> tuple[dict[str, list[Footprint]], dict[str, IdleCost]]:
    """Of all sessions at once, by name: nobody has anything to do."""
    with Progress(1) as display:
        display.message(f"silence: {options.silence_s:g} s, then {options.idle_s:g} s of watching")
        time.sleep(options.silence_s)
        before = {session.name: session.footprints(options.timeout_s) for session in sessions}
        time.sleep(options.idle_s)
        after = {session.name: session.footprints(options.timeout_s) for session in sessions}
    return before, {name: IdleCost.between(before[name], after[name]) for name in before}


def run_peers(options: PeersOptions, environment: Mapping[str, str]) -> PeersReport:
    machine = describe_machine()
    path: NetworkPath = choose_path(
        address=options.address, interface=options.interface, default_address=LOOPBACK, environment=environment
    )
    library = options.library if "plugin" in options.backends else Path()
    settings = driver_settings(options.driver, library, path, environment, RANKS, options.timeout_s)
    least = ROUNDS * max(options.comms)
    with DriverGroup() as drivers:
        with Progress(1) as display:
            count = len(options.comms) * len(options.backends) * RANKS
            display.message(f"starting {count} processes with up to {max(options.comms)} comms each way")
            sessions = start_sessions(options, settings, drivers)
        run = PacedRun(
            {Case("send_recv", size): sessions for size in options.message_sizes},
            Pace(
                rounds=options.repeats,
                timeout_s=options.timeout_s,
                time_limit_s=options.time_budget_s,
                turn_s=options.time_budget_s,
                iterations=options.messages,
                warmup=least,  # messages, some over every comm
                least=(least,),
                most=_MAX_MESSAGES,
                limit=f"--time-budget {options.time_budget_s:g}",
            ),
            Progress,
        )
        run.run()
        footprints, idle = measure_silence(sessions, options)
        # The comms still work.
        run.verify()
    over = f"{path.interface} ({path.address})" if path.interface else path.address
    return PeersReport(
        title=f"many comms, 2 processes on one host over {over}, {options.in_flight} messages under way each way",
        machine=machine,
        backends=describe_backends(sessions),
        rows=peers_rows(sessions, run, footprints, idle),
        run=run,
        idle=idle,
        idle_s=options.idle_s,
        parameters={
            "comms": list(options.comms),
            "message_sizes": list(options.message_sizes),
            "in_flight": options.in_flight,
            "repeats": options.repeats,
            "silence_s": options.silence_s,
            "idle_s": options.idle_s,
            "address": path.address,
            "interface": path.interface or environment.get("NCCL_SOCKET_IFNAME", ""),
        },
    )
