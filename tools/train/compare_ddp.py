"""Train the DDP example with NCCL's own network and through Bagua-Net, and compare losses and step times.

    python tools/train/compare_ddp.py --nproc-per-node 2 --model vgg16 --dtype bf16 --output-dir out
    python tools/train/compare_ddp.py --nproc-per-node 4 --model vgg16 --dtype bf16 --tuned best --output-dir out

Every run is a fresh `torchrun examples/ddp_train.py` with the same seed; the backends take turns, each round
beginning with another one. Ours is switched on as a user does it: by ENABLE_BAGUA_NET=1 alone. Written to
--output-dir: ddp.json (a result file), ddp-runs.json, ddp.png and logs. Exit status 1 if losses differ, ranks
disagree, a run fails, or NCCL's log shows another network than the backend's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

# Python itself adds the script's folder, but not with PYTHONSAFEPATH. At the end: nothing there may hide a package.
sys.path.append(str(Path(__file__).resolve().parent))

from ddp_comparison.figure import write_figure
from ddp_comparison.losses import judge_losses
from ddp_comparison.options import parse_arguments
from ddp_comparison.report import closing_lines, render, write_document, write_result_file
from ddp_comparison.rounds import run_rounds
from ddp_comparison.step_times import report_steps

from bagua.net.bench.machine import describe_machine


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(words)
    baseline = arguments.backends[0].name
    rounds = run_rounds(arguments)
    verdict = None
    if any(training.backend == baseline for training in rounds.trainings):
        verdict = judge_losses(rounds.trainings, baseline, arguments.tolerance)
        rounds.errors += verdict.failures
    steps = report_steps(rounds.trainings, arguments.backends)
    print(render(steps, verdict))
    print("\n".join(closing_lines(steps, verdict, rounds)))
    machine = describe_machine()
    written = [arguments.output_dir / "ddp.json", arguments.output_dir / "ddp-runs.json"]
    write_result_file(written[0], arguments, steps, rounds, machine)
    write_document(written[1], steps, verdict, rounds, machine)
    if rounds.trainings:
        written.append(arguments.output_dir / "ddp.png")
        title = f"{arguments.model} with DDP on {arguments.nproc_per_node} ranks, {arguments.dtype}"
        write_figure(written[-1], rounds.trainings, arguments.backends, steps.best_tuned, title, machine.caption())
    print("written: " + ", ".join(map(str, written)))
    return 1 if rounds.errors or not rounds.trainings else 0


if __name__ == "__main__":
    sys.exit(main())
