"""`bagua-net-bench --nccl`: the real NCCL on GPUs, with its own transport and with the plugin, in one run.

This process (rank 0's, if a launcher started several) owns the worker groups and hands out the turns; it never touches
a GPU itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bagua.net.bench.command import EXIT_FAILED, run_in_order
from bagua.net.bench.errors import BenchError
from bagua.net.bench.launch_environment import LOOPBACK, LaunchEnvironment, launch_of_run
from bagua.net.bench.machine import describe_machine
from bagua.net.bench.nccl_ab.contender import ignored_variables
from bagua.net.bench.nccl_ab.group import Group
from bagua.net.bench.nccl_ab.memory import check_memory
from bagua.net.bench.nccl_ab.options import PROGRAM, NcclOptions, check_outputs, parse_options
from bagua.net.bench.nccl_ab.outputs import write_outputs
from bagua.net.bench.nccl_ab.places import LocalWorkers, RemoteWorkers, WorkerRequest, WorkerSettings, serve_workers
from bagua.net.bench.nccl_ab.plan import ELEMENT_BYTES, Case, make_cases
from bagua.net.bench.nccl_ab.report import render_closing, render_tables
from bagua.net.bench.nccl_ab.results import results_of
from bagua.net.bench.nccl_ab.run import ComparisonRun, RunOutcome, RunSettings
from bagua.net.bench.progress import Progress
from bagua.net.bench.rendezvous import Member, join, meet
from bagua.net.bench.table import shows_colour

# Importing torch, creating CUDA contexts and NCCL communicators of all groups at the same time.
_START_S = 180.0


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_in_order(PROGRAM, "workers", lambda: run_nccl_ab(parse_options(words)))


def run_nccl_ab(options: NcclOptions) -> int:
    environment = dict(os.environ)
    if importlib.util.find_spec("torch") is None:
        raise BenchError("--nccl needs PyTorch, which brings NCCL, and it is not installed; run: pip install torch")
    launch = launch_of_run(environment, local=options.local, port=options.port, ranks=options.ranks)
    if launch is None or launch.rank == 0:
        check_outputs(options)
    with _log_folder(options) as logs:
        if launch is not None and launch.rank > 0:
            return _follow(launch, options, environment, logs)
        crew = _local_crew(options, environment, logs) if launch is None else _lead(launch, options, environment, logs)
        with contextlib.ExitStack() as closing:
            for place in crew.places:
                closing.callback(place.close, failed=True)
            return _compare(crew, options, environment)


@contextlib.contextmanager
def _log_folder(options: NcclOptions) -> Iterator[Path]:
    """NCCL's logs: kept with --output-dir, else gone with the run."""
    if options.output_dir is not None:
        folder = options.output_dir / "nccl_logs"
        # A log of an earlier run could prove what this one did not do.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        yield folder.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="bagua-net-bench-") as temporary:
        yield Path(temporary)


@dataclass(frozen=True)
class Crew:
    """The ranks of a run: which place starts each, on which of its host's GPUs."""

    local: LocalWorkers
    remote: Mapping[int, RemoteWorkers]  # by rank; every other rank is started here
    local_ranks: Sequence[int]  # by rank
    hosts: int
    bind: str

    @property
    def ranks(self) -> int:
        return len(self.local_ranks)

    @property
    def places(self) -> list[LocalWorkers | RemoteWorkers]:
        return [self.local, *self.remote.values()]


def _settings(options: NcclOptions, environment: Mapping[str, str], logs: Path) -> WorkerSettings:
    return WorkerSettings(
        contenders=options.contenders,
        backend=options.backend,
        device=options.device,
        dtype=options.dtype,
        timeout_s=max(options.timeout_s, _START_S),
        log_folder=logs,
        interface=options.interface,
        environment=environment,
    )


def _local_crew(options: NcclOptions, environment: Mapping[str, str], logs: Path) -> Crew:
    ranks = options.ranks or 2
    if options.device == "cuda":
        gpus = _gpu_count()
        ranks = options.ranks or gpus
        if gpus < 2:
            raise BenchError(
                f"--nccl needs 2 GPUs or more, and torch sees {gpus}; look at CUDA_VISIBLE_DEVICES and nvidia-smi, or"
                " leave --nccl out to measure the plugin without GPUs"
            )
        if ranks > gpus:
            raise BenchError(f"--ranks {ranks} needs as many GPUs, and torch sees {gpus}; give {gpus} or fewer")
    # As launchers say it: the plugin shares the CPUs out by it. Of GPUs there may be more than ranks.
    settings = _settings(options, {**environment, "LOCAL_WORLD_SIZE": str(ranks)}, logs)
    return Crew(LocalWorkers(settings), {}, list(range(ranks)), 1, LOOPBACK)


def _gpu_count() -> int:
    import torch

    # Counts through the driver library, without a CUDA context in this process.
    return torch.cuda.device_count()


def _lead(launch: LaunchEnvironment, options: NcclOptions, environment: Mapping[str, str], logs: Path) -> Crew:
    members = meet(launch, options.timeout_s, lambda text: print(text, file=sys.stderr, flush=True))
    seen: list[str] = []
    local_ranks = []
    for member in members:
        local_ranks.append(seen.count(member.identity))
        seen.append(member.identity)
    remote = {
        member.rank: RemoteWorkers(member.connection, member.host, member.rank)
        for member in members
        if member.connection is not None
    }
    local = LocalWorkers(_settings(options, environment, logs))
    return Crew(local, remote, local_ranks, len(set(seen)), _address_towards_others(members))


def _address_towards_others(members: Sequence[Member]) -> str:
    """The address by which a rank of another host (or else of this one) reached this process."""
    connections = [(member.identity == members[0].identity, member.connection) for member in members]
    reached = sorted((same, index) for index, (same, connection) in enumerate(connections) if connection is not None)
    connection = members[reached[0][1]].connection
    assert connection is not None
    return connection.local_address


def _follow(launch: LaunchEnvironment, options: NcclOptions, environment: Mapping[str, str], logs: Path) -> int:
    """Every rank but 0: start and feed what rank 0 asks for. Rank 0 reports."""
    connection, _ = join(launch, options.timeout_s)
    try:
        place = LocalWorkers(_settings(options, environment, logs))
        failed = True
        try:
            failed = serve_workers(connection, place)
        finally:
            place.close(failed=failed)
        return EXIT_FAILED if failed else 0
    finally:
        connection.close()


def _compare(crew: Crew, options: NcclOptions, environment: Mapping[str, str]) -> int:
    cases = make_cases(options.collectives, options.sizes, ELEMENT_BYTES[options.dtype], crew.ranks)
    tcp_only = crew.hosts == 1 if options.tcp_only is None else options.tcp_only
    settings = RunSettings(
        repetitions=options.repeats,
        turn_seconds=options.turn_seconds,
        timeout_s=options.timeout_s,
        time_limit_s=options.time_limit_s,
        verify=options.verify,
        prove_network=options.backend == "nccl",
        iterations=options.iterations,
        warmup=options.warmup,
    )
    groups = [Group(contender) for contender in options.contenders]
    start_errors = _form(groups, crew, tcp_only, max(options.timeout_s, _START_S))
    check_memory(groups, cases, options.timeout_s)
    run = ComparisonRun(groups, cases, settings, Progress)
    run.outcome.errors += start_errors
    outcome = run.run()
    for group in groups:
        if group.is_alive:
            try:
                group.leave(options.timeout_s)
            except BenchError as error:
                outcome.errors.append(f"{group.contender.name} did not end in order: {error}")
    for place in crew.remote.values():
        place.close(failed=bool(outcome.errors))
    crew.local.close(failed=bool(outcome.errors))
    _deliver(crew, options, environment, groups, cases, outcome, tcp_only)
    return EXIT_FAILED if outcome.errors or not outcome.timings else 0


def _form(groups: Sequence[Group], crew: Crew, tcp_only: bool, timeout_s: float) -> list[str]:
    """Start all processes first, so that they import torch at the same time, then form group after group."""
    errors = []
    for index, group in enumerate(groups):
        endpoints = []
        for rank in range(crew.ranks):
            request = WorkerRequest(index, rank, crew.local_ranks[rank], crew.ranks, tcp_only, crew.bind)
            if rank in crew.remote:
                endpoints.append(crew.remote[rank].start_worker(request, group.contender.name))
            else:
                endpoints.append(crew.local.start(request))
        group.endpoints = endpoints
    with Progress(len(groups)) as display:
        for group in groups:
            display.advance(f"starting {group.contender.name}", 0)
            try:
                group.form(crew.bind, timeout_s)
            except BenchError as error:
                group.fail(error)
                errors.append(str(error))
            display.advance(f"starting {group.contender.name}")
    return errors


def _deliver(
    crew: Crew,
    options: NcclOptions,
    environment: Mapping[str, str],
    groups: Sequence[Group],
    cases: Sequence[Case],
    outcome: RunOutcome,
    tcp_only: bool,
) -> None:
    results = results_of(cases, groups, outcome, crew.ranks)
    facts: Mapping[str, object] = next((group.facts for group in groups if group.facts), {})
    machine = describe_machine(["bagua-net-bench", "--nccl", *sys.argv[1:]] if "--nccl" not in sys.argv else sys.argv)
    setting = (
        f"{crew.ranks} x {facts.get('device', options.device)} on {crew.hosts} host{'s' if crew.hosts > 1 else ''},"
        f" {'loopback or NCCL_SOCKET_IFNAME TCP only' if tcp_only else 'every transport that NCCL has'},"
        f" {options.dtype}, torch {facts.get('torch')}, NCCL {facts.get('nccl')}"
    )
    notes = []
    if ignored := ignored_variables(environment):
        notes.append(f"not passed on to any contender: {', '.join(ignored)} (set them with --variant)")
    if options.backend == "gloo":
        notes.append("gloo on CPUs stands in for NCCL: these figures say nothing about any network")
    colour = shows_colour(sys.stdout)
    print(setting)
    print(machine.caption(), end="\n\n")
    contenders = [group.contender for group in groups]
    print(render_tables(results, contenders, all_columns=options.all_columns, colour=colour))
    print(render_closing(groups, results, outcome, notes, all_columns=options.all_columns), end="", flush=True)
    parameters = {
        "ranks": crew.ranks,
        "hosts": crew.hosts,
        "tcp_only": tcp_only,
        "datatype": options.dtype,
        "repeats": options.repeats,
        "contenders": {contender.name: contender.settings for contender in contenders},
        **facts,
    }
    written = write_outputs(
        options,
        results,
        groups,
        outcome,
        machine,
        parameters=parameters,
        notes=notes,
        device=str(facts.get("device", options.device)),
        ranks=crew.ranks,
        setting=setting,
    )
    if written:
        print(f"written: {', '.join(map(str, written))}")


if __name__ == "__main__":
    sys.exit(main())
