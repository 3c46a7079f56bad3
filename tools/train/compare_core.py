"""Train with torch's DDP and with Bagua's algorithms in turns, and compare step time, memory and final models.

    python tools/train/compare_core.py --nproc-per-node 2
    python tools/train/compare_core.py --nproc-per-node 4 --model vgg16,gpt2 --trace traces --json core.json
    python tools/train/compare_core.py --nproc-per-node 2 --algorithms algorithms --baseline with-bagua --model wide

It starts its ranks itself, all in one process group, and nothing is downloaded. Exit status 1 if an algorithm failed or
broke what it promises, or NCCL's log shows another network than --network tcp asks for.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# Python itself adds the script's folder, but not with PYTHONSAFEPATH. At the end: nothing there may hide a package.
sys.path.append(str(Path(__file__).resolve().parent))

from core_comparison.comparison_run import ComparisonRun
from core_comparison.options import parse_options
from core_comparison.ranks import start_ranks
from core_comparison.report import (
    closing_lines,
    heading,
    render,
    write_document,
    write_result_file,
)
from core_comparison.step_statistics import faults_of, rows_of

from bagua.net.bench.errors import BenchError
from bagua.net.bench.machine import describe_machine
from bagua.net.bench.nccl_ab.backend import ignored_variables
from bagua.net.bench.progress import Progress
from bagua.net.bench.table import shows_colour


def main(words: Sequence[str] | None = None) -> int:
    options = parse_options(words)
    with tempfile.TemporaryDirectory(prefix="compare-core-") as temporary:
        logs = options.output_folder or Path(temporary)
        with Progress(options.rounds * len(options.models) * len(options.algorithms)) as progress:
            try:
                outcome = ComparisonRun(options, lambda: start_ranks(options, logs), progress).run()
            except BenchError as error:
                print(f"compare_core.py: {error}", file=sys.stderr)
                return 1
    if ignored := ignored_variables(os.environ):
        outcome.notes.append(f"left out of the ranks' environment: {', '.join(ignored)}")
    outcome.errors += faults_of(outcome.turns, options.tolerance)
    rows = rows_of(outcome.turns, options.baseline)
    if rows:
        print(heading(options, outcome) + "\n")
        print(render(rows, options, colour=shows_colour(sys.stdout)) + "\n")
    print("\n".join(closing_lines(rows, options, outcome)))
    written = [*outcome.traces]
    machine = describe_machine()
    if options.details_path is not None:
        written.append(options.details_path)
        write_document(options.details_path, options, rows, outcome, machine)
    if options.json_path is not None:
        written.append(options.json_path)
        write_result_file(options.json_path, options, rows, outcome, machine)
    if written:
        print("written: " + ", ".join(map(str, written)))
    return 1 if outcome.errors or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
