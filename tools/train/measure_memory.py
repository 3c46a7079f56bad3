"""Measure what each algorithm needs beyond plain training: bytes per parameter, and what the documentation states.

    python tools/train/measure_memory.py --nproc-per-node 2
    python tools/train/measure_memory.py --nproc-per-node 2 --device cuda --json memory.json

Plain training is the same model and optimizer without Bagua: parameters, gradients, the optimizer's state. `kept` is
there between the steps, `at the peak` the most at any time in a step, with gradients that stay where they are. With
`fresh gradients`, those that zero_grad(set_to_none=True) lets autograd make in each step, the ones that wait for their
bucket come on top. Exit status 1 if something needs more than is stated. Of a model that is so small that noise would
hide a whole copy of its parameters, the verdict is that nothing can be told.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

# Python itself adds the script's folder, but not with PYTHONSAFEPATH. At the end: nothing there may hide a package.
sys.path.append(str(Path(__file__).resolve().parent))

import figures
from device_option import add_sharing_option, chosen_device, device_text
from memory_measurement.catalogue import ADAM, CASES, QADAM, SGD
from memory_measurement.probe import ALLOCATOR_SETTINGS
from memory_measurement.report import GLOO_BYTES, Measured, render, row_of
from rank_team.placement import HostPlacement
from rank_team.team import RankTeam, rank_environment

from bagua.net.bench.argument_types import within
from bagua.net.bench.errors import BenchError
from bagua.net.bench.export import check_writable
from bagua.net.bench.machine import describe_machine
from bagua.net.bench.progress import Progress
from bagua.net.bench.table import shows_colour

_TIMEOUT_S = 120.0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="measure_memory.py",
        description="What each algorithm needs beyond plain training, measured and as stated.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--algorithms",
        nargs="+",
        choices=list(CASES),
        default=list(CASES),
        metavar="NAME",
        help=f"of {', '.join(CASES)} (default all)",
    )
    parser.add_argument("--nproc-per-node", type=within(int, 1, 16), default=2, metavar="N", help="ranks (default 2)")
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: CUDA if every rank has a GPU"
    )
    add_sharing_option(parser)
    parser.add_argument("--layers", type=within(int, 1, 10_000), default=24, help="linear layers (default 24)")
    parser.add_argument("--width", type=within(int, 1, 65_536), default=1024, help="of each (default 1024)")
    parser.add_argument("--steps", type=within(int, 1, 1000), default=6, help="that are measured (default 6)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="result file")
    return parser


def _parse(words: Sequence[str] | None, gpus: Callable[[], int] | None) -> argparse.Namespace:
    parser = make_parser()
    given = parser.parse_args(words)
    device = chosen_device(parser, given, gpus)
    try:
        if given.json is not None:
            check_writable("--json", given.json)
    except ValueError as error:
        parser.error(str(error))
    given.device = device.type
    given.sharing = device.sharing
    return given


def main(words: Sequence[str] | None = None, gpus: Callable[[], int] | None = None) -> int:
    given = _parse(words, gpus)
    ranks = given.nproc_per_node
    cases = [name for name in CASES if name in given.algorithms]
    kinds = [kind for kind in (SGD, ADAM) if any(_plain_kind(case) == kind for case in cases)]
    transport = GLOO_BYTES if given.device == "cpu" else 0
    rows = []
    try:
        with Progress(len(cases) + len(kinds) + 1) as progress:
            team = RankTeam(
                "memory_measurement.worker",
                ranks,
                given.device,
                timeout_s=_TIMEOUT_S,
                environment=lambda _: rank_environment(settings=ALLOCATOR_SETTINGS),
                placement=HostPlacement(given.sharing),
            )

            def measure(case: str | None, optimizer: str) -> Measured:
                progress.advance(case or f"plain training, {optimizer}", 0)
                size = {"layers": given.layers, "width": given.width, "steps": given.steps}
                in_place, fresh = (
                    team.ask("measure", _TIMEOUT_S, case=case, optimizer=optimizer, set_to_none=set_to_none, **size)
                    for set_to_none in (False, True)
                )
                progress.advance(case or f"plain training, {optimizer}")
                return Measured(in_place, fresh)

            try:
                measure(None, SGD)  # what these processes do once is in no figure
                plain = {kind: measure(None, kind) for kind in kinds}
                for case in cases:
                    found = measure(case, CASES[case].optimizer)
                    rows.append(row_of(case, found, plain[_plain_kind(case)], ranks, given.device, transport))
            except BaseException:
                team.close(failed=True)
                raise
            team.close(failed=False)
    except BenchError as error:
        print(f"measure_memory.py: {error}", file=sys.stderr)
        return 1
    device = device_text(team.facts["device"], given.sharing)
    head = f"{ranks} ranks on {device}, torch {team.facts['torch']}, {rows[0].parameters} parameters"
    print(f"{head} of float32 in {given.layers} layers\n")
    print(render(rows, colour=shows_colour(sys.stdout)) + "\n")
    if given.json is not None:
        figures.write(
            given.json,
            f"Memory of training beyond plain training, {ranks} ranks",
            figures.memory_figures(rows, figures.case_of(ranks, given.device, given.sharing)),
            machine=describe_machine(),
            ranks=team.facts,
            parameters={"layers": given.layers, "width": given.width, "steps": given.steps, "dtype": "float32"},
        )
        print(f"written: {given.json}")
    return 1 if any(row.exceeds for row in rows) else 0


def _plain_kind(case: str) -> str:
    return ADAM if CASES[case].optimizer == QADAM else CASES[case].optimizer


if __name__ == "__main__":
    sys.exit(main())
