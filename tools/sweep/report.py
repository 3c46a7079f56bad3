"""What is printed and what is written of a sweep."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from measure.core.catalogue import ALL_REDUCE, REFERENCE
from measure.core.compression_code import compression_notes
from measure.core.run import size_of
from measure.core.step_statistics import Row
from measure.report import Report, format_ms, ranks_text, sharing_notes
from measure.results import case_of, step_figures
from netlab import DelayUsage

from bagua.net.bench.result_file import Figure
from bagua.net.bench.table import MISSING, Column, render_rows

from .grid import PlannedNetwork
from .results import BUSY, NetworkResult, Winner, winner_of
from .sweep_run import SweepOutcome

# What a table of winners is of, and winner_of's arguments.
_TABLES: dict[str, dict[str, bool]] = {
    "of those that keep all ranks' parameters the same": {"replicas_equal": True},
    "of those that wait for other ranks in each step": {"replicas_equal": False, "waiting": True},
    "of all": {"replicas_equal": False},
}
# Marks a network that the machine cannot be.
_BEYOND = "*"


class Grid:
    """Results by place: rows are delays, columns rates. A rate that was not measured by itself has those of the network
    that it was measured as."""

    def __init__(self, planned: Sequence[PlannedNetwork], results: Sequence[NetworkResult]) -> None:
        self.rates = sorted({one.network.rate_gbit for one in planned})
        self.delays = sorted({one.network.delay_ms for one in planned})
        by_network = {result.network: result for result in results}
        self._planned = {(one.network.delay_ms, one.network.rate_gbit): one for one in planned}
        self._results = {place: by_network.get(one.measured_as or one.network) for place, one in self._planned.items()}

    def result(self, delay_ms: float, rate_gbit: float) -> NetworkResult | None:
        return self._results[delay_ms, rate_gbit]

    def is_limited(self, delay_ms: float, rate_gbit: float) -> bool:
        return self._planned[delay_ms, rate_gbit].is_limited

    def measured_rates(self, delay_ms: float) -> list[float]:
        return [rate for rate in self.rates if self._planned[delay_ms, rate].measured_as is None]


def rate_name(grid: Grid, delay_ms: float, rate_gbit: float) -> str:
    return f"{rate_gbit:g} Gb/s{'' if grid.is_limited(delay_ms, rate_gbit) else _BEYOND}"


def columns_of(lines: Sequence[Sequence[str]]) -> str:
    """The first line is the head, the first column to the left, the others to the right."""
    columns = [
        Column[Sequence[str]](title, "", lambda line, place=place: line[place], left=place == 0)  # type: ignore[misc]
        for place, title in enumerate(lines[0])
    ]
    return render_rows(lines[1:], columns).rstrip()


def step_tables(grid: Grid, model: str, algorithms: Sequence[str]) -> str:
    """For each delay a line an algorithm: milliseconds of a step, and its speed-up over gradient all-reduce."""
    blocks = []
    for delay in grid.delays:
        rates = grid.measured_rates(delay)
        lines = [[f"delay {delay:g} ms", *(rate_name(grid, delay, rate) for rate in rates)]]
        lines += [[name, *(_cell(grid.result(delay, rate), model, name) for rate in rates)] for name in algorithms]
        lines.append(["CPUs busy", *(_busy(grid.result(delay, rate), model) for rate in rates)])
        per_averaging = [_steps_per_averaging(grid.result(delay, rate), model) for rate in rates]
        if any(text != MISSING for text in per_averaging):
            lines.append(["steps per average", *per_averaging])
        blocks.append(columns_of(lines))
    return "\n\n".join(blocks)


def _cell(result: NetworkResult | None, model: str, algorithm: str) -> str:
    row = next((row for row in result.rows_of(model) if row.algorithm == algorithm), None) if result else None
    if row is None:
        return MISSING
    over = "" if row.speed_up is None else f" {row.speed_up.median:.2f}x"
    return f"{format_ms(row.step_ms)} ms{over or ' ' * len(' 0.00x')}"


def _busy(result: NetworkResult | None, model: str) -> str:
    share = result.machine_busy(model) if result else None
    return MISSING if share is None else f"{share * 100:.0f} %{' ' * len(' 0.00x')}"


def _steps_per_averaging(result: NetworkResult | None, model: str) -> str:
    """Of the algorithm that averages during its steps."""
    known = [row.steps_per_averaging for row in result.rows_of(model) if row.steps_per_averaging] if result else []
    return f"{known[0]:.3g}{' ' * len(' 0.00x')}" if known else MISSING


def winner_table(grid: Grid, model: str, choice: Mapping[str, bool]) -> str:
    head = ["", *(f"{rate:g} Gb/s" for rate in grid.rates)]
    lines = [
        [f"{delay:g} ms", *(_winner_cell(grid, model, delay, rate, choice) for rate in grid.rates)]
        for delay in grid.delays
    ]
    return columns_of([head, *lines])


def _winner_cell(grid: Grid, model: str, delay: float, rate: float, choice: Mapping[str, bool]) -> str:
    result = grid.result(delay, rate)
    winner = winner_of(result.rows_of(model), **choice) if result else None
    return winner_text(winner) + ("" if grid.is_limited(delay, rate) else _BEYOND)


def winner_text(winner: Winner | None) -> str:
    if winner is None:
        return MISSING
    return "all-reduce" if winner.algorithm == ALL_REDUCE else f"{winner.algorithm} {winner.speed_up:.2f}x"


def report_of(
    planned: Sequence[PlannedNetwork],
    options: argparse.Namespace,
    outcome: SweepOutcome,
    capacity_gbit: Mapping[bool, float],
) -> Report:
    grid = Grid(planned, outcome.results)
    found: list[Figure] = []
    for result in outcome.results:
        # A network that the machine is too slow for was measured without a limit, and has no rate.
        rate = result.network.rate_gbit if result.is_limited else None
        delay = result.network.delay_ms
        labels = case_of(options.ranks, options.device, options.sharing, rate_gbps=rate, delay_ms=delay)
        found += step_figures(result.rows, labels)
    moved = f"Without a limit this machine moves {_moved(capacity_gbit)}."
    of_networks = [f"{result.network}: {note}" for result in outcome.results for note in result.notes]
    return Report(
        title=f"Step time by network: {', '.join(options.model)} on {options.ranks} ranks, emulated networks",
        heading=ranks_text(options, outcome.facts),
        table="\n\n".join(_tables(grid, model, options) for model in options.model) + "\n",
        figures=found,
        lines=closing_lines(grid, outcome, capacity_gbit),
        notes=[*sharing_notes(options), *compression_notes(outcome.facts), *outcome.notes, *of_networks, moved],
        errors=outcome.errors,
        facts=outcome.facts,
        parameters={"models": {model: size_of(options, model) for model in options.model}},
        rows=[row for result in outcome.results for row in result.rows],
        samples=outcome.results,
    )


def _tables(grid: Grid, model: str, options: argparse.Namespace) -> str:
    size = size_of(options, model)
    parts = [f"== {model}, length {size['length']}, batch size {size['batch_size']} per rank, {size['dtype']}"]
    parts.append(step_tables(grid, model, options.algorithms))
    parts += [
        f"-- the fastest, {which} ({model})\n{winner_table(grid, model, choice)}" for which, choice in _TABLES.items()
    ]
    return "\n\n".join(parts)


def closing_lines(grid: Grid, outcome: SweepOutcome, capacity_gbit: Mapping[bool, float]) -> list[str]:
    lines = [
        f"x: step time of gradient all-reduce ({ALL_REDUCE}) over the algorithm's, median of the rounds",
        "delay: one way; a round trip takes twice as long",
        f"fastest: in every round, and by 5 % in the median, faster than all-reduce, which {REFERENCE} is, too",
    ]
    if any(not grid.is_limited(delay, rate) for delay in grid.delays for rate in grid.rates):
        lines.append(
            f"{_BEYOND}: more than this machine moves ({_moved(capacity_gbit)}); measured without a limit, once for all"
            " such rates"
        )
    if any(row.steps_per_averaging for result in outcome.results for row in result.rows):
        lines.append("steps per average: of async, from one average to the next; its step time is the mean of them")
    busy = [result for result in outcome.results if any(_is_busy(row) for row in result.rows)]
    if busy:
        names = "; ".join(str(result.network) for result in busy)
        lines.append(f"CPUs {BUSY * 100:.0f} % busy or more, so that they limit as well: {names}")
    late = {result.network: lateness_ms(result.delays) for result in outcome.results if result.delays}
    if late:
        worst = max(late, key=lambda network: late[network])
        lines.append(f"packets were kept {late[worst]:.2f} ms longer than the delay at most, on average ({worst})")
    return lines


def _is_busy(row: Row) -> bool:
    return row.machine_busy is not None and row.machine_busy >= BUSY


def _moved(capacity_gbit: Mapping[bool, float]) -> str:
    names = {False: "without delay", True: "with"}
    return ", ".join(f"{capacity:.3g} Gb/s {names[delayed]}" for delayed, capacity in sorted(capacity_gbit.items()))


def lateness_ms(usages: Sequence[DelayUsage]) -> float:
    """The mean over all packets."""
    packets = sum(usage.packets for usage in usages)
    return sum(usage.mean_late_ms * usage.packets for usage in usages) / max(1, packets)
