"""`bagua-net-bench`: see docs/how-to/measure-network.md."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence
from functools import partial
from pathlib import Path

from bagua.net import notice, secret_file, unknown_settings
from bagua.net.bench.command_line import EXIT_FAILED, check_outputs, run_in_order
from bagua.net.bench.driver import DriverRequest
from bagua.net.bench.errors import UsageError
from bagua.net.bench.launch_environment import LaunchEnvironment, launch_of_run
from bagua.net.bench.ranks import follow, lead_ranks
from bagua.net.bench.result_file import write_files
from bagua.net.bench.ring.builds import compare_builds
from bagua.net.bench.ring.options import EXIT_SLOWER, PROGRAM, Options, parse_options
from bagua.net.bench.ring.report import Report
from bagua.net.bench.ring.run import run_bench
from bagua.net.bench.ring.sessions import busy_cpus, maker, own_ranks
from bagua.net.bench.table import shows_colour


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    unknown_settings.report(os.environ)
    _check_trace(os.environ)
    _check_secret(os.environ)
    if "--nccl" in words:
        from bagua.net.bench.nccl_ab.command import main as compare_nccl

        return compare_nccl([word for word in words if word != "--nccl"])
    options = parse_options(words)
    return run_in_order(PROGRAM, "drivers", lambda: _run(options))


def _check_trace(environment: MutableMapping[str, str]) -> None:
    """The library would warn in its own log, which is off in a bench."""
    path = environment.get("BAGUA_NET_TRACE", "")
    folder = Path(path).parent
    if path and "%" not in str(folder) and not folder.is_dir():
        notice.report(
            [f"BAGUA_NET_TRACE={path}: no trace is written, because the folder {folder} does not exist\nCreate it."],
            environment,
        )


def _check_secret(environment: MutableMapping[str, str]) -> None:
    """The same."""
    file = environment.get(secret_file.SECRET_FILE, "").strip()
    notice.report(["\n".join(warning) for warning in secret_file.warnings(file)], environment)


def _run(options: Options) -> int:
    environment = dict(os.environ)
    launch = launch_of_run(environment, local=options.local, port=options.port, ranks=options.ranks)
    follows = launch is not None and launch.rank > 0
    if not follows:
        check_outputs(options.json_path, options.csv_path)
    # Before the ranks meet, so that every host is busy before the first measurement.
    with busy_cpus(_busy_per_cpu_here(options, launch), options.timeout_s, environment):
        if launch is not None and follows:
            return follow(launch, options.timeout_s, maker(options, environment), DriverRequest)
        if launch is None:
            ranks = own_ranks(options, environment)
        else:
            say = partial(print, file=sys.stderr, flush=True)
            ranks = lead_ranks(launch, options.timeout_s, say, maker(options, environment))
        with ranks:
            report = (compare_builds if options.fresh_processes else run_bench)(ranks, options, environment)
    return _deliver(report, options)


def _busy_per_cpu_here(options: Options, launch: LaunchEnvironment | None) -> int:
    """The first rank of a host keeps it busy."""
    if options.busy_per_cpu and launch is not None and launch.local_rank is None:
        raise UsageError(
            f"--busy-per-cpu {options.busy_per_cpu} is for each host, and {launch.launcher} does not say which rank is"
            " the first of its host; start the ranks with torchrun, srun or Open MPI's mpirun"
        )
    return options.busy_per_cpu if launch is None or launch.local_rank == 0 else 0


def _deliver(report: Report, options: Options) -> int:
    colour = shows_colour(sys.stdout)
    try:  # the files are complete, also if the reader of stdout has gone
        written = write_files(report.result(), options.json_path, options.csv_path)
    finally:
        print(report.head())
        print(report.table(colour=colour))
        print(report.closing(colour=colour), end="", flush=True)
    if written:
        print(f"written: {', '.join(map(str, written))}")
    return EXIT_FAILED if report.wrong else EXIT_SLOWER if options.fail_on_slower and report.is_worse else 0


if __name__ == "__main__":
    sys.exit(main())
