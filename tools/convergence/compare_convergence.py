"""Train with every algorithm to the end and compare final losses and accuracies with gradient all-reduce's.

    python tools/convergence/compare_convergence.py --nproc-per-node 4 --json convergence.json --plot convergence.png
    python tools/convergence/compare_convergence.py --tasks digits --algorithms bytegrad --seeds 3

It starts its ranks itself, all in one process group, and nothing is downloaded: the data comes with scikit-learn and
Python. Exit status 1 if a training failed, figures are missing or an algorithm falls short.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

# Python itself adds the script's folder, but not with PYTHONSAFEPATH. At the end: nothing there may hide a package.
sys.path.append(str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))

from convergence_comparison.comparison_run import ComparisonRun, trainings_of
from convergence_comparison.figure import write_figure
from convergence_comparison.options import parse_options
from convergence_comparison.report import closing_lines, heading, render, write_document, write_result_file
from convergence_comparison.statistics import faults_of, rows_of
from rank_team.placement import HostPlacement
from rank_team.team import RankTeam, rank_environment

from bagua.net.bench.errors import BenchError
from bagua.net.bench.machine import describe_machine
from bagua.net.bench.progress import Progress
from bagua.net.bench.table import shows_colour

_FOLDER = Path(__file__).resolve().parent


def main(words: Sequence[str] | None = None) -> int:
    options = parse_options(words)

    def start() -> RankTeam:
        return RankTeam(
            "convergence_comparison.worker",
            options.ranks,
            options.device,
            timeout_s=options.timeout_s,
            environment=lambda _: rank_environment(import_path=[_FOLDER]),
            placement=HostPlacement(options.sharing),
        )

    with Progress(trainings_of(options)) as progress:
        try:
            outcome = ComparisonRun(options, start, progress).run()
        except BenchError as error:
            print(f"compare_convergence.py: {error}", file=sys.stderr)
            return 1
    outcome.errors += faults_of(outcome.trainings)
    rows = rows_of(outcome.trainings)
    machine = describe_machine()
    if rows:
        print(heading(options, outcome) + "\n")
        print(render(rows, colour=shows_colour(sys.stdout)) + "\n")
    print("\n".join(closing_lines(rows, outcome)))
    written = []
    if options.json_path is not None:
        written.append(options.json_path)
        write_result_file(options.json_path, options, rows, outcome, machine)
    if options.details_path is not None:
        written.append(options.details_path)
        write_document(options.details_path, options, rows, outcome, machine)
    if options.plot_path is not None and rows:
        written.append(options.plot_path)
        title = f"Convergence, {options.ranks} ranks, {options.seeds} seeds each"
        write_figure(options.plot_path, outcome.trainings, title, machine.caption())
    if written:
        print("written: " + ", ".join(map(str, written)))
    return 1 if outcome.errors or not rows or any(row.falls_short for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
