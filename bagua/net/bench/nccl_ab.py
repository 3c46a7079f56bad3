"""`bagua-net-bench --nccl`: the real NCCL on GPUs, with its own transport and with the plugin, in one run.

This process (rank 0's, if a launcher started several) owns the worker groups and hands out the turns; it never touches
a GPU itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from bagua.net.bench.errors import BenchError, UsageError
from bagua.net.bench.export import write_csv, write_json
from bagua.net.bench.launch_environment import LOOPBACK, LaunchEnvironment, detect_launch
from bagua.net.bench.machine import describe_machine
from bagua.net.bench.nccl_ab_contender import ignored_variables
from bagua.net.bench.nccl_ab_group import Group
from bagua.net.bench.nccl_ab_options import NcclOptions, check_outputs, parse_options
from bagua.net.bench.nccl_ab_places import LocalWorkers, RemoteWorkers, WorkerRequest, WorkerSettings, serve_workers
from bagua.net.bench.nccl_ab_plan import ELEMENT_BYTES, Case, make_cases
from bagua.net.bench.nccl_ab_report import measurements, ratios, render_closing, render_tables
from bagua.net.bench.nccl_ab_run import ComparisonRun, RunOutcome, RunSettings
from bagua.net.bench.plot import write_plot
from bagua.net.bench.progress import Progress
from bagua.net.bench.rendezvous import Member, join, meet
from bagua.net.bench.table import shows_colour

_EXIT_FAILED = 1
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130
# Importing torch, creating CUDA contexts and NCCL communicators of all groups at the same time.
_START_S = 180.0


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Slurm and torchrun end a job with SIGTERM; the workers are then ended in order, as with Ctrl-C.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return run_nccl_ab(parse_options(words))
    except UsageError as error:
        return _complain(str(error), _EXIT_USAGE)
    except BenchError as error:
        return _complain(str(error), _EXIT_FAILED)
    except KeyboardInterrupt:
        return _complain("interrupted; all workers are ended", _EXIT_INTERRUPTED)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _complain(message: str, code: int) -> int:
    sys.stdout.flush()
    print(f"bagua-net-bench --nccl: error: {message}", file=sys.stderr, flush=True)
    return code


def run_nccl_ab(options: NcclOptions) -> int:
    environment = dict(os.environ)
    if importlib.util.find_spec("torch") is None:
        raise BenchError("--nccl needs PyTorch, which brings NCCL, and it is not installed; run: pip install torch")
    launch = None if options.local else detect_launch(environment, port=options.port)
    if launch is not None and launch.world_size == 1:
        launch = None  # One launched process is a local run.
    if launch is not None and options.ranks not in (None, launch.world_size):
        raise UsageError(
            f"--ranks {options.ranks}, but {launch.launcher} started {launch.world_size} ranks; leave --ranks out, or"
            " give --local to run on this machine alone"
        )
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


def _settings(options: NcclOptions, environment: Mapping[str, str], logs: Path, ranks: int) -> WorkerSettings:
    cases = _cases(options, ranks)
    return WorkerSettings(
        contenders=options.contenders,
        backend=options.backend,
        device=options.device,
        dtype=options.dtype,
        max_bytes=max(case.bytes for case in cases),
        timeout_s=max(options.timeout_s, _START_S),
        log_folder=logs,
        interface=options.interface,
        environment=environment,
    )


def _cases(options: NcclOptions, ranks: int) -> list[Case]:
    return make_cases(options.collectives, options.sizes, ELEMENT_BYTES[options.dtype], ranks)


def _local_crew(options: NcclOptions, environment: Mapping[str, str], logs: Path) -> Crew:
    ranks = options.ranks or 2
    if options.device == "cuda":
        gpus = _gpu_count()
        ranks = options.ranks or gpus
        if gpus < 2 or ranks > gpus:
            raise BenchError(
                f"{ranks} ranks need as many GPUs, at least 2, and torch sees {gpus}; lower --ranks, look at"
                " CUDA_VISIBLE_DEVICES and nvidia-smi, or leave --nccl out to measure the plugin without GPUs"
            )
    local = LocalWorkers(_settings(options, environment, logs, ranks))
    return Crew(local, {}, list(range(ranks)), 1, LOOPBACK)


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
    local = LocalWorkers(_settings(options, environment, logs, launch.world_size))
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
        place = LocalWorkers(_settings(options, environment, logs, launch.world_size))
        failed = True
        try:
            failed = serve_workers(connection, place)
        finally:
            place.close(failed=failed)
        return _EXIT_FAILED if failed else 0
    finally:
        connection.close()


def _compare(crew: Crew, options: NcclOptions, environment: Mapping[str, str]) -> int:
    cases = _cases(options, crew.ranks)
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
    return _EXIT_FAILED if outcome.errors or not outcome.timings else 0


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
    rows = measurements(cases, groups, outcome, crew.ranks)
    found_ratios = ratios(cases, groups, outcome)
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
    names = [group.contender.name for group in groups]
    print(render_tables(rows, found_ratios, names, colour=colour))
    print(render_closing(groups, found_ratios, outcome, notes), end="", flush=True)
    if options.json_path is not None:
        parameters = {
            "ranks": crew.ranks,
            "hosts": crew.hosts,
            "tcp_only": tcp_only,
            "datatype": options.dtype,
            "repeats": options.repeats,
            "contenders": {group.contender.name: group.contender.settings for group in groups},
            **facts,
        }
        summary = {
            "speedups": [ratio.as_dict() for ratio in found_ratios],
            "networks": {group.contender.name: [proof.as_dict() for proof in group.proofs] for group in groups},
            "notes": notes,
            "stopped_early": outcome.stopped_early,
            "errors": outcome.errors,
        }
        write_json(options.json_path, rows, machine, parameters=parameters, summary=summary)
    if options.csv_path is not None:
        write_csv(options.csv_path, rows, machine)
    if options.plot_path is not None and rows:
        first = rows[0].collective
        title = f"NCCL {first}, {crew.ranks} x {facts.get('device', options.device)}"
        write_plot(
            options.plot_path,
            [row for row in rows if row.collective == first],
            title=title,
            caption=f"{setting}\n{machine.caption()}",
        )
    written = [str(path) for path in (options.json_path, options.csv_path, options.plot_path) if path is not None]
    if written:
        print(f"written: {', '.join(written)}")


if __name__ == "__main__":
    sys.exit(main())
