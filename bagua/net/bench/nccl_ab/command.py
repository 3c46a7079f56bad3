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
from dataclasses import asdict
from pathlib import Path

from bagua.net.bench.command import EXIT_FAILED, run_in_order
from bagua.net.bench.errors import BenchError
from bagua.net.bench.launch_environment import LaunchEnvironment, launch_of_run
from bagua.net.bench.machine import describe_machine
from bagua.net.bench.nccl_ab.backend import ignored_variables
from bagua.net.bench.nccl_ab.crew import START_S, Crew, leading_crew, local_crew, worker_settings
from bagua.net.bench.nccl_ab.group import Group
from bagua.net.bench.nccl_ab.memory import check_memory
from bagua.net.bench.nccl_ab.options import PROGRAM, NcclOptions, check_files, parse_options
from bagua.net.bench.nccl_ab.outputs import write_outputs
from bagua.net.bench.nccl_ab.places import LocalWorkers, WorkerRequest, serve_workers
from bagua.net.bench.nccl_ab.plan import ELEMENT_BYTES, Case, make_cases
from bagua.net.bench.nccl_ab.report import render_closing, render_tables
from bagua.net.bench.nccl_ab.results import results_of
from bagua.net.bench.nccl_ab.run import ComparisonRun, RunOutcome, RunSettings
from bagua.net.bench.progress import Progress
from bagua.net.bench.rendezvous import join
from bagua.net.bench.table import shows_colour


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_in_order(PROGRAM, "workers", lambda: run_nccl_ab(parse_options(words)))


def run_nccl_ab(options: NcclOptions) -> int:
    environment = dict(os.environ)
    if importlib.util.find_spec("torch") is None:
        raise BenchError("--nccl needs PyTorch, which brings NCCL, and it is not installed; run: pip install torch")
    launch = launch_of_run(environment, local=options.local, port=options.port, ranks=options.ranks)
    if launch is None or launch.rank == 0:
        check_files(options)
    with _log_folder(options) as logs:
        if launch is not None and launch.rank > 0:
            return _follow(launch, options, environment, logs)
        crew = (
            local_crew(options, environment, logs)
            if launch is None
            else leading_crew(launch, options, environment, logs)
        )
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


def _follow(launch: LaunchEnvironment, options: NcclOptions, environment: Mapping[str, str], logs: Path) -> int:
    """Every rank but 0: start and feed what rank 0 asks for. Rank 0 reports."""
    connection, _ = join(launch, options.timeout_s)
    try:
        place = LocalWorkers(worker_settings(options, environment, logs))
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
    groups = [Group(backend) for backend in options.backends]
    start_errors = _form(groups, crew, tcp_only, max(options.timeout_s, START_S))
    check_memory(groups, cases, options.timeout_s, crew.ranks_per_gpu)
    run = ComparisonRun(groups, cases, settings, Progress)
    run.outcome.errors += start_errors
    outcome = run.run()
    for group in groups:
        if group.is_alive:
            try:
                group.leave(options.timeout_s)
            except BenchError as error:
                outcome.errors.append(f"{group.backend.name} did not end in order: {error}")
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
                endpoints.append(crew.remote[rank].start_worker(request, group.backend.name))
            else:
                endpoints.append(crew.local.start(request))
        group.endpoints = endpoints
    with Progress(len(groups)) as display:
        for group in groups:
            display.advance(f"starting {group.backend.name}", 0)
            try:
                group.form(crew.bind, timeout_s)
            except BenchError as error:
                group.fail(error)
                errors.append(str(error))
            display.advance(f"starting {group.backend.name}")
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
    device = str(facts.get("device", options.device))
    where = f"{crew.ranks} x {device}" if crew.sharing is None else f"{crew.ranks} ranks on {device}, {crew.sharing},"
    setting = (
        f"{where} on {crew.hosts} host{'s' if crew.hosts > 1 else ''},"
        f" {'loopback or NCCL_SOCKET_IFNAME TCP only' if tcp_only else 'every transport that NCCL has'},"
        f" {options.dtype}, torch {facts.get('torch')}, NCCL {facts.get('nccl')}"
    )
    notes = []
    if ignored := ignored_variables(environment):
        notes.append(f"not passed on to any backend: {', '.join(ignored)} (set them with --variant)")
    if crew.sharing is not None:
        notes.append(crew.sharing.note)
    if options.backend == "gloo":
        notes.append("gloo on CPUs stands in for NCCL: these figures say nothing about any network")
    colour = shows_colour(sys.stdout)
    print(setting)
    print(machine.caption(), end="\n\n")
    backends = [group.backend for group in groups]
    print(render_tables(results, backends, all_columns=options.all_columns, colour=colour))
    print(render_closing(groups, results, outcome, notes, all_columns=options.all_columns), end="", flush=True)
    parameters = {
        "ranks": crew.ranks,
        "hosts": crew.hosts,
        "gpus_shared": None if crew.sharing is None else asdict(crew.sharing),
        "tcp_only": tcp_only,
        "datatype": options.dtype,
        "repeats": options.repeats,
        "backends": {backend.name: backend.settings for backend in backends},
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
        device=device,
        ranks=crew.ranks,
        gpus=_gpus(crew) if options.backend == "nccl" else 0,
        setting=setting,
    )
    if written:
        print(f"written: {', '.join(map(str, written))}")


def _gpus(crew: Crew) -> int:
    return crew.ranks if crew.sharing is None else crew.sharing.gpus * crew.hosts


if __name__ == "__main__":
    sys.exit(main())
