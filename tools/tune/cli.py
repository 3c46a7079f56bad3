"""The command line of `python -m tune`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sweep.grid import Network

from .methods import METHODS

NAMES = ("mlp", "convnet", "vgg16", "resnet", "gpt2")


def main(words: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(words)
    if options.command == "record":
        return _record(options)
    return _simulate(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tune", description="Compares the search of autotune=True with all settings."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="all settings, and the search, in emulated networks; needs root")
    record.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="one file per case is written there")
    record.add_argument(
        "--networks", default="1,10,100,10/5", metavar="LIST", help="Gb/s, with /ms one way (default: 1,10,100,10/5)"
    )
    record.add_argument("--models", default=",".join(NAMES), metavar="LIST", help=f"default: {','.join(NAMES)}")
    record.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    record.add_argument("--allow", default="bytegrad", metavar="LIST", help="algorithms, or '' for none")
    record.add_argument("--repetitions", type=int, default=5, help="turns of each setting (default: 5)")
    record.add_argument("--pairs", type=int, default=9, help="turns of the choice, at the end (default: 9)")
    record.add_argument("--ranks", type=int, default=2, help="hosts, with one rank each (default: 2)")
    simulate = commands.add_parser("simulate", help="the search on turns drawn from what `record` has written")
    simulate.add_argument("files", type=Path, nargs="+", metavar="FILE")
    simulate.add_argument("--seeds", type=int, default=13, help="trials of each case (default: 13)")
    simulate.add_argument("--pauses", type=float, default=0.02, help="part of turns with a pause (default: 0.02)")
    simulate.add_argument("--noise", type=float, default=1, help="share of the recorded noise, 0 to 1 (default: 1)")
    simulate.add_argument("--methods", default=",".join(METHODS), metavar="LIST", help=f"default: {', '.join(METHODS)}")
    simulate.add_argument("--json", type=Path, metavar="FILE", help="write a result file, with the real cases")
    return parser


def _simulate(options: argparse.Namespace) -> int:
    from .recorded_case import RecordedCase
    from .report import real_table, write
    from .simulate import simulate, table

    cases = [RecordedCase.read(path) for path in options.files]
    trials = simulate(cases, options.seeds, options.pauses, options.noise, options.methods.split(","))
    print(f"Simulated, {options.seeds} trials of each case:\n{table(trials)}\n\nReal:\n{real_table(cases)}")
    if options.json is not None:
        write(options.json, cases, trials, {"seeds": options.seeds, "pauses": options.pauses, "noise": options.noise})
    return 0


def _record(options: argparse.Namespace) -> int:
    from netlab import missing_requirement

    from .record import record

    if lacking := missing_requirement():
        print(f"tune: {lacking}", file=sys.stderr)
        return 1
    failures = record(
        [_network(word) for word in options.networks.split(",")],
        options.models.split(","),
        [word for word in options.allow.split(",") if word],
        options.out,
        options.repetitions,
        options.pairs,
        options.ranks,
        options.device,
    )
    return 1 if failures else 0


def _network(word: str) -> Network:
    rate, _, delay = word.partition("/")
    return Network(float(rate), float(delay or 0))
