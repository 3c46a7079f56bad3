"""`PYTHONPATH=tools python -m sweep`, or `make sweep`: probes the machine, measures every network, prints who wins."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from netlab import NetlabError, missing_requirement

from bagua.net.bench.machine import describe_machine
from bagua.net.bench.progress import Progress

from .capacity import PROBE_DELAY_MS, measure_capacity_gbit
from .grid import PlannedNetwork, in_measuring_order, plan_networks
from .options import parse_options
from .report import report_of
from .sweep_run import LabMeasurement, SweepOutcome, run_sweep


def main(words: Sequence[str] | None = None) -> int:
    options = parse_options(words)
    if lacking := missing_requirement():
        print(f"sweep: {lacking}", file=sys.stderr)
        return 1
    try:
        capacity, notes = probe(options)
    except NetlabError as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 1
    # Without delays there is still a sweep.
    delays = options.delays if True in capacity else tuple(delay for delay in options.delays if not delay)
    if not delays:
        print(f"sweep: {notes[0]}; add 0 to --delays", file=sys.stderr)
        return 1
    planned = plan_networks(options.rates, delays, capacity)
    order = in_measuring_order(planned)
    print(plan_text(order, options, capacity), flush=True)
    if options.plan:
        return 0
    machine = describe_machine()
    # As Ctrl-C: a program that limits our time shall find what was measured on stdout.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    turns = len(order) * len(options.model) * len(options.algorithms) * options.rounds
    with tempfile.TemporaryDirectory(prefix="sweep-") as temporary, Progress(turns) as progress:
        measurement = LabMeasurement(options.output_dir or Path(temporary), progress)

        def write_so_far(outcome: SweepOutcome) -> None:
            outcome.facts = measurement.facts
            report_of(planned, options, outcome, capacity).write(options, machine)

        outcome = run_sweep(options, order, measurement, write_so_far)
    outcome.notes += notes
    return report_of(planned, options, outcome, capacity).publish(options, machine)


def probe(options: argparse.Namespace) -> tuple[dict[bool, float], list[str]]:
    """What the machine moves, by whether there is a delay, and what is to be said of it.

    Raises:
        NetlabError: no network at all can be made here.
    """
    flows = max(1, min(4, (os.cpu_count() or 2) // 2))
    capacity = {False: measure_capacity_gbit(0.0, flows)}
    if any(options.delays):
        try:
            capacity[True] = measure_capacity_gbit(PROBE_DELAY_MS, flows)
        except NetlabError as error:
            return capacity, [f"networks with a delay were left out: {str(error).removeprefix('netlab: ')}"]
    return capacity, []


def plan_text(order: Sequence[PlannedNetwork], options: argparse.Namespace, capacity: dict[bool, float]) -> str:
    head = f"{len(order)} networks, {len(options.algorithms)} algorithms, {', '.join(options.model)}; up to"
    rounds = f"{options.rounds} rounds of {options.warmup + options.steps} steps, {options.time_limit:g} s for all"
    lines = [f"{head} {rounds}"]
    for planned in order:
        moved = f" (this machine moves {capacity[planned.network.delay_ms > 0]:.3g} Gb/s)"
        lines.append(f"  {planned.network}{'' if planned.is_limited else moved}")
    return "\n".join(lines)
