"""`PYTHONPATH=tools python -m sweep`, or `make sweep`: probes the machine, measures every network, prints who wins."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from measure.core.run import size_of
from measure.report import device_text
from netlab import NetlabError, missing_requirement

from bagua.net.bench.machine import describe_machine
from bagua.net.bench.progress import Progress

from .capacity import PROBE_DELAY_MS, measure_capacity_gbit
from .grid import PlannedNetwork, expected_seconds, in_measuring_order, plan_networks
from .options import parse_options
from .plot import write_plot
from .report import Grid, report_of
from .sweep_run import LabMeasurement, SweepOutcome, run_sweep

# For what is said of the time beforehand: elements of the parameters, with the lengths that models have on GPUs.
_ELEMENTS = {"resnet50": 25.6e6, "vgg16": 138.4e6, "gpt2": 124.4e6, "tiny-2000": 0.5e6, "mlp": 0.6e6, "convnet": 0.1e6}
_WIDE_LAYERS = 5
_START_SECONDS = {"cpu": 8.0, "cuda": 25.0}
_COMPUTE_SECONDS = {"cpu": 0.06, "cuda": 0.05}


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
    report = report_of(planned, options, outcome, capacity)
    if options.plot is not None:
        grid = Grid(planned, outcome.results)
        device = device_text(outcome.facts.get("device", "?"), options.sharing)
        title = f"The fastest algorithm by network: {options.ranks} ranks, {device}"
        write_plot(options.plot, grid, options.model, title=title, caption=_caption(grid, machine.caption()))
        report.written.append(options.plot)
    return report.publish(options, machine)


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
    steps = options.warmup + options.steps
    head = (
        f"{len(order)} networks, {len(options.algorithms)} algorithms, {', '.join(options.model)}; up to"
        f" {options.rounds} rounds of {steps} steps, {options.time_limit:g} s for all"
    )
    lines = [head]
    total = 0.0
    for planned in order:
        network = planned.network
        seconds = _START_SECONDS[options.device]
        for model in options.model:
            seconds += expected_seconds(
                network,
                gradient_bytes=round(4 * _elements(model, size_of(options, model))),
                algorithms=len(options.algorithms),
                steps=steps,
                compute_seconds=_COMPUTE_SECONDS[options.device],
                capacity_gbit=capacity[network.delay_ms > 0],
                start_seconds=0.0,
            )
        total += seconds
        limit = "" if planned.is_limited else f" (this machine moves {capacity[network.delay_ms > 0]:.3g} Gb/s)"
        lines.append(f"  {network}{limit}: some {seconds:.0f} s to start and for one round")
    lines.append(f"one round of all: some {total:.0f} s")
    return "\n".join(lines)


def _elements(model: str, size: dict[str, object]) -> float:
    if model == "wide":
        width = size["length"]
        assert isinstance(width, int)
        return _WIDE_LAYERS * (width + 1.0) * width
    return _ELEMENTS[model]


def _caption(grid: Grid, machine: str) -> str:
    text = "Cells: the algorithm with the shortest step, and how many times faster than gradient all-reduce it is."
    if any(not grid.is_limited(delay, rate) for delay in grid.delays for rate in grid.rates):
        text += " Dashed: a rate beyond what the machine moves, measured without a limit."
    return f"{text} {machine}"
