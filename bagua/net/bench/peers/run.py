"""A whole run of bagua-net-bench --peers: from options to a report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bagua.net.bench.driver_group import DriverGroup
from bagua.net.bench.endpoint import Endpoint
from bagua.net.bench.errors import BenchError
from bagua.net.bench.launch_environment import LOOPBACK
from bagua.net.bench.machine import describe_machine
from bagua.net.bench.network_path import NetworkPath, choose_path
from bagua.net.bench.peers.options import PeersOptions
from bagua.net.bench.peers.report import PeersReport, describe_backends, peers_rows
from bagua.net.bench.peers.results import PeersResults
from bagua.net.bench.peers.session import RANKS, IdleCost, PeersSession
from bagua.net.bench.progress import Progress
from bagua.net.bench.settings import DriverRequest, DriverSettings, check_driver, check_library
from bagua.net.bench.sizes import format_size
from bagua.net.bench.turns import rotated
from bagua.net.library import MissingFileError, driver_path, library_path

# A command may take this many times its estimate before it counts as hung.
_PATIENCE = 10
# Every comm carries this many messages before a figure is taken, and when data is verified.
_ROUNDS = 2
_MIN_CALIBRATION_MESSAGES = 64
_WARMUP_SHARE = 6
_MAX_MESSAGES = 1_000_000


def start_sessions(
    options: PeersOptions, path: NetworkPath, environment: Mapping[str, str], drivers: DriverGroup
) -> list[PeersSession]:
    """All drivers of all backends, connected."""
    settings = _settings(options, path, environment)
    sessions = []
    for comms in options.comms:
        for backend in options.backends:
            endpoints: list[Endpoint] = [
                drivers.start(
                    f"{backend} x{comms} rank {rank}",
                    _command(backend, comms, rank, options, settings),
                    settings.driver_environment(DriverRequest(backend, rank, RANKS)),
                )
                for rank in range(RANKS)
            ]
            sessions.append(PeersSession(backend, comms, endpoints))
    for session in sessions:
        session.connect(options.timeout_s)
    return sessions


def _settings(options: PeersOptions, path: NetworkPath, environment: Mapping[str, str]) -> DriverSettings:
    try:
        driver = options.driver or driver_path()
        library = options.library or (library_path() if "plugin" in options.backends else Path())
    except MissingFileError as error:
        raise BenchError(str(error)) from error
    check_driver(driver)
    if "plugin" in options.backends:
        check_library(library)
    return DriverSettings(
        driver=driver.absolute(),
        # dlopen searches its own path for a name without a slash.
        library=library.absolute(),
        channels=1,
        address=path.address,
        interface=path.interface,
        local_ranks=RANKS,
        timeout_s=options.timeout_s,
        environment=dict(environment),
    )


def _command(backend: str, comms: int, rank: int, options: PeersOptions, settings: DriverSettings) -> list[str]:
    command = [str(settings.driver), "peers", "--transport", backend, "--rank", str(rank), "--comms", str(comms)]
    command += ["--in-flight", str(options.in_flight), "--max-message-bytes", str(max(options.message_sizes))]
    command += ["--timeout-ms", str(int(options.timeout_s * 1000))]
    if backend == "bare":
        return [*command, "--address", settings.address]
    return [*command, "--library", str(settings.library)]


def measure_traffic(sessions: Sequence[PeersSession], options: PeersOptions) -> PeersResults:
    """Every repetition visits every size, and every session there, in an order that rotates."""
    results = PeersResults({(session.name, size): [] for session in sessions for size in options.message_sizes})
    with Progress(len(sessions) * len(options.message_sizes)) as display:
        estimates = _calibrate(sessions, options, results, display)
    visits = len(sessions) * len(options.message_sizes) * options.repeats
    with Progress(visits) as display:
        for repetition in range(options.repeats):
            for index, size in enumerate(options.message_sizes):
                costs = [estimates[session.name, size] for session in sessions]
                messages, warmup = _messages(options, costs)
                for session in rotated(sessions, repetition + index):
                    what = f"repetition {repetition + 1}/{options.repeats}, {format_size(size)}, {session.name}"
                    display.advance(what, 0)
                    patience = _PATIENCE * (messages + warmup) * estimates[session.name, size]
                    sample = session.run(size, messages, warmup, options.timeout_s + patience)
                    results.samples[session.name, size].append(sample)
                    display.advance(what)
    return results


def _calibrate(
    sessions: Sequence[PeersSession], options: PeersOptions, results: PeersResults, display: Progress
) -> dict[tuple[str, int], float]:
    """Seconds of a message, roughly. Verifies every size over every comm first."""
    estimates = {}
    count = max(_MIN_CALIBRATION_MESSAGES, _ROUNDS * max(options.comms))
    for size in options.message_sizes:
        for session in sessions:
            display.advance(f"verifying {format_size(size)}, {session.name}", 0)
            _verify(session, size, options, results)
            sample = session.run(size, count, count, options.timeout_s)
            estimates[session.name, size] = sample.seconds / count
            display.advance(f"verifying {format_size(size)}, {session.name}")
    return estimates


def _verify(session: PeersSession, size: int, options: PeersOptions, results: PeersResults) -> None:
    wrong = session.verify(size, max(options.in_flight, _ROUNDS * session.comms), options.timeout_s)
    if wrong:
        results.wrong.setdefault((session.name, size), wrong)


def _messages(options: PeersOptions, costs: Sequence[float]) -> tuple[int, int]:
    """Of a visit, and to warm up: the same for all sessions at a size, so that what is compared moves equally much."""
    least = _ROUNDS * max(options.comms)
    if options.messages is not None:
        return options.messages, least
    affordable = int(options.time_budget_s / (options.repeats * len(options.message_sizes)) / sum(costs))
    messages = min(_MAX_MESSAGES, max(least, affordable * (_WARMUP_SHARE - 1) // _WARMUP_SHARE))
    return messages, max(least, messages // (_WARMUP_SHARE - 1))


def measure_silence(sessions: Sequence[PeersSession], options: PeersOptions, results: PeersResults) -> None:
    """All sessions at once: nobody has anything to do."""
    with Progress(1) as display:
        display.message(f"silence: {options.silence_s:g} s, then {options.idle_s:g} s of watching")
        time.sleep(options.silence_s)
        for session in sessions:
            results.footprints[session.name] = session.footprints(options.timeout_s)
        time.sleep(options.idle_s)
        for session in sessions:
            after = session.footprints(options.timeout_s)
            results.idle[session.name] = IdleCost.between(results.footprints[session.name], after)
        # The comms still work.
        for session in sessions:
            for size in options.message_sizes:
                _verify(session, size, options, results)


def run_peers(options: PeersOptions, environment: Mapping[str, str]) -> PeersReport:
    machine = describe_machine()
    path = choose_path(
        address=options.address, interface=options.interface, default_address=LOOPBACK, environment=environment
    )
    with DriverGroup() as drivers:
        with Progress(1) as display:
            count = len(options.comms) * len(options.backends) * RANKS
            display.message(f"starting {count} processes with up to {max(options.comms)} comms each way")
            sessions = start_sessions(options, path, environment, drivers)
        results = measure_traffic(sessions, options)
        measure_silence(sessions, options, results)
    over = f"{path.interface} ({path.address})" if path.interface else path.address
    return PeersReport(
        title=f"many comms, 2 processes on one host over {over}, {options.in_flight} messages under way each way",
        machine=machine,
        backends=describe_backends(sessions),
        rows=peers_rows(sessions, options.message_sizes, results),
        results=results,
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
