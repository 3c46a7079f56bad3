"""`bagua-net-bench --nccl`: the real NCCL on GPUs, with its own transport and with the plugin, in one run.

This process (rank 0's, if a launcher started several) owns the sessions and hands out the turns; it never touches a
GPU itself.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from bagua.net.bench.command_line import EXIT_FAILED, run_in_order
from bagua.net.bench.errors import BenchError
from bagua.net.bench.gpu_sharing import GpuSharing
from bagua.net.bench.launch_environment import launch_of_run
from bagua.net.bench.machine import describe_machine
from bagua.net.bench.nccl_ab.backend import ignored_variables
from bagua.net.bench.nccl_ab.options import PROGRAM, NcclOptions, check_files, parse_options
from bagua.net.bench.nccl_ab.processes import START_S, RankRequest, maker, own_ranks
from bagua.net.bench.nccl_ab.report import figures_of, render_closing, render_tables, results_of
from bagua.net.bench.nccl_ab.session import ELEMENT_BYTES, MAX_SINGLE, NcclSession, check_memory, make_cases
from bagua.net.bench.paced_run import Pace, PacedRun
from bagua.net.bench.ranks import Ranks, follow, lead_ranks
from bagua.net.bench.result_file import result_of, write_files
from bagua.net.bench.table import shows_colour
from bagua.progress import Progress


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
        sharing = None
        if launch is None:
            ranks, sharing = own_ranks(options, environment, logs)
        elif launch.rank > 0:
            return follow(launch, options.timeout_s, maker(options, environment, logs), RankRequest)
        else:
            say = functools.partial(print, file=sys.stderr, flush=True)
            ranks = lead_ranks(launch, options.timeout_s, say, maker(options, environment, logs))
        try:
            return _compare(ranks, sharing, options, environment)
        finally:
            ranks.close(failed=True)


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


def _compare(ranks: Ranks, sharing: GpuSharing | None, options: NcclOptions, environment: Mapping[str, str]) -> int:
    cases = make_cases(options.collectives, options.sizes, ELEMENT_BYTES[options.dtype], ranks.count)
    tcp_only = ranks.hosts == 1 if options.tcp_only is None else options.tcp_only
    sessions = [NcclSession(backend) for backend in options.backends]
    errors = form(sessions, ranks, options.device, options.dtype, options.timeout_s, tcp_only=tcp_only)
    check_memory(sessions, cases, options.timeout_s, 1 if sharing is None else -(-ranks.count // sharing.gpus))
    # The first proof is before anything is measured: no figure is shown under a wrong name.
    proven = sessions if options.backend == "nccl" else ()
    errors += prove(proven, options.timeout_s)
    by_name = {session.name: session for session in sessions}
    run = PacedRun(
        {case: [session for session in sessions if session.is_alive] for case in cases},
        pace_of(options),
        Progress,
        give_up=lambda session, error: by_name[session.name].fail(error),
    )
    if any(session.is_alive for session in sessions):
        run.run()
        if options.verify:
            run.verify()
    # Once more: by now every kind of connection has been opened and named in the logs.
    errors += [*run.turns.errors, *run.faults(), *prove(proven, options.timeout_s)]
    for session in sessions:
        if session.is_alive:
            try:
                session.leave(options.timeout_s)
            except BenchError as error:
                errors.append(f"{session.name} did not end in order: {error}")
    ranks.close(failed=bool(errors))
    _deliver(ranks, sharing, options, environment, sessions, run, errors, tcp_only)
    return EXIT_FAILED if errors or not run.turns.samples else 0


def pace_of(options: NcclOptions) -> Pace:
    return Pace(
        rounds=options.repeats,
        timeout_s=options.timeout_s,
        time_limit_s=options.time_limit_s,
        turn_s=options.turn_seconds,
        iterations=options.iterations,
        warmup=options.warmup,
        single=MAX_SINGLE,
        verifies=options.verify,
        verifies_twice=options.verify,
        limit=f"--time-limit {options.time_limit_s:g}",
    )


def prove(sessions: Sequence[NcclSession], timeout_s: float) -> list[str]:
    """Ends the sessions that used another network than they should have, and says so."""
    errors = []
    for session in sessions:
        if session.is_alive:
            try:
                error = session.read_proofs(timeout_s)
            except BenchError as failure:
                error = str(failure)
            if error:
                session.fail(error)
                errors.append(error)
    return errors


def form(
    sessions: Sequence[NcclSession], ranks: Ranks, device: str, dtype: str, timeout_s: float, *, tcp_only: bool = False
) -> list[str]:
    """Start all processes first, so that they import torch at the same time, then form session after session."""
    errors = []
    bind = ranks.path.address
    for index, session in enumerate(sessions):
        session.endpoints = [
            place.start(
                RankRequest(
                    *(index, rank, ranks.local_ranks[rank], ranks.count, device, tcp_only, bind),
                    title=f"{session.name}, rank {rank}",
                )
            )
            for rank, place in enumerate(ranks.places)
        ]
    with Progress(len(sessions)) as display:
        for session in sessions:
            display.advance(f"starting {session.name}", 0)
            try:
                session.form(bind, dtype, max(timeout_s, START_S))
            except BenchError as error:
                session.fail(error)
                errors.append(str(error))
            display.advance(f"starting {session.name}")
    return errors


def _deliver(
    ranks: Ranks,
    sharing: GpuSharing | None,
    options: NcclOptions,
    environment: Mapping[str, str],
    sessions: Sequence[NcclSession],
    run: PacedRun,
    errors: Sequence[str],
    tcp_only: bool,
) -> None:
    results = results_of(run, sessions, ranks.count)
    facts: Mapping[str, object] = next((session.facts for session in sessions if session.facts), {})
    machine = describe_machine(["bagua-net-bench", "--nccl", *sys.argv[1:]] if "--nccl" not in sys.argv else sys.argv)
    device = str(facts.get("device", options.device))
    where = f"{ranks.count} x {device}" if sharing is None else f"{ranks.count} ranks on {device}, {sharing},"
    setting = (
        f"{where} on {ranks.hosts} host{'s' if ranks.hosts > 1 else ''},"
        f" {'loopback or NCCL_SOCKET_IFNAME TCP only' if tcp_only else 'every transport that NCCL has'},"
        f" {options.dtype}, torch {facts.get('torch')}, NCCL {facts.get('nccl')}"
    )
    notes = list(run.turns.notes)
    if ignored := ignored_variables(environment):
        notes.append(f"not passed on to any backend: {', '.join(ignored)} (set them with --variant)")
    if sharing is not None:
        notes.append(sharing.note)
    if options.backend == "gloo":
        notes.append("gloo on CPUs stands in for NCCL: these figures say nothing about any network")
    colour = shows_colour(sys.stdout)
    backends = [session.backend for session in sessions]
    gpus = (ranks.count if sharing is None else sharing.gpus * ranks.hosts) if options.backend == "nccl" else 0
    result = result_of(
        f"NCCL with and without the plugin: {setting}",
        figures_of(results, ranks=ranks.count, gpus=gpus),
        machine=machine,
        parameters={
            "ranks": ranks.count,
            "hosts": ranks.hosts,
            "gpus_shared": None if sharing is None else asdict(sharing),
            "tcp_only": tcp_only,
            "datatype": options.dtype,
            "repeats": options.repeats,
            "backends": {backend.name: backend.settings for backend in backends},
            **facts,
            "networks": {session.name: [asdict(proof) for proof in session.proofs] for session in sessions},
        },
        versions={name: facts.get(name) for name in ("torch", "nccl")},
        gpu=device if gpus else None,
        notes=[*notes, *(f"ERROR: {error}" for error in errors)],
    )
    try:  # the files are complete, also if the reader of stdout has gone
        written = write_files(result, options.json_path, options.csv_path)
    finally:
        print(setting)
        print(machine.caption())
        print(machine.links(), end="\n\n")
        print(render_tables(results, backends, all_columns=options.all_columns, colour=colour))
        print(render_closing(sessions, results, notes, errors, all_columns=options.all_columns), end="", flush=True)
    if written:
        print(f"written: {', '.join(map(str, written))}")


if __name__ == "__main__":
    sys.exit(main())
