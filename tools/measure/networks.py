"""`measure networks`: what Bagua-Net and Bagua's algorithms gain on a network of a given speed.

In each network, the ranks of all backends start once and take turns: NCCL's default, NCCL tuned by hand, and Bagua-Net,
enabled as users do it, with ENABLE_BAGUA_NET=1 alone. They train with torch's DDP or FSDP2; the ranks of Bagua-Net also
train with Bagua's algorithms. Errors: losses of the baseline that differ between backends, ranks that end with
different parameters, a turn that fails, and a log of NCCL that names another network than that of the backend.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bagua.net.bench.api import (
    BEST_TUNED_NAME,
    DEFAULT_TUNED,
    MISSING,
    Backend,
    BenchError,
    Column,
    Figure,
    Label,
    PairedRatio,
    backend_label,
    figures,
    make_backends,
    names_of,
    tuned_settings,
    within,
)
from measure.core.catalogue import ALGORITHMS, FSDP, GROUPS, REFERENCE
from measure.core.tool import TRAINING, combined, size_of, steps, training
from measure.network import NETWORKS, RANKS_PER_HOST, Network, check_hosts, parse_network, told_text
from measure.processes import Ranks, bagua_net_by_activation, start_all
from measure.runner import Case, Measure, Plan, Row, Sample, Tool, ratio, ratio_figure, time_us

OURS = bagua_net_by_activation().name
DEFAULT = "NCCL default"
# Two ranks add two numbers in either order to the same sum; more ranks add in the order of NCCL's rings, which differs
# with the number of channels, and bf16 training carries the last bit's difference on. So do kernels that add in any
# order, which --deterministic excludes.
EXACT_RANKS = 2
DEFAULT_TOLERANCE = 0.05
_WARM_UP_BYTES = 1 << 20
# Of one call.
_WARM_UP_S = 0.3


def best_tuned(row: Row) -> str | None:
    """The fastest of NCCL's own settings. A setting that failed has fewer rounds and is not considered."""
    found = {name: row.values(variant=name) for case, name in row.turns.samples if case == row.case}
    own = {name: values for name, values in found.items() if name.startswith("NCCL ")}
    most = max(map(len, own.values()), default=0)
    whole = [name for name, values in own.items() if len(values) == most]
    return min(whole, key=lambda name: row.median(variant=name) or math.inf) if len(own) > 1 and most else None


def algorithms_of(row: Row) -> dict[str, PairedRatio]:
    """Those over Bagua-Net, the fastest first, with the ratio to the baseline over Bagua-Net."""
    names = [name for case, name in row.turns.samples if case == row.case and name in ALGORITHMS]
    found = {name: ratio for name in names if (ratio := row.over(OURS, variant=name)) is not None}
    return dict(sorted(found.items(), key=lambda one: row.median(variant=one[0]) or math.inf))


def _best_algorithm(row: Row) -> str:
    return next((f"{name} {ratio(found)}" for name, found in algorithms_of(row).items()), MISSING)


class Networks(Tool):
    name = "networks"
    columns = (
        Column("network", "", lambda row: row.case.network, left=True),
        Column("told", "Mb/s", lambda row: told_text(row.case.network), optional=True),
        Column("", "", lambda row: str(row.case), left=True),
        Column(DEFAULT, "us", lambda row: time_us(row.median(variant=DEFAULT))),
        Column(BEST_TUNED_NAME, "us", lambda row: time_us(row.median(variant=best_tuned(row) or "")), optional=True),
        Column(OURS, "us", lambda row: time_us(row.median())),
        Column("over default", "x", lambda row: ratio(row.over(DEFAULT))),
        Column(f"over {BEST_TUNED_NAME}", "x", lambda row: ratio(row.over(best_tuned(row))), optional=True),
        Column("best algorithm", "x over bagua-net", _best_algorithm, left=True, optional=True),
    )
    title = "Training steps on {ranks} ranks, by network: {networks}"
    keeps_logs = True
    auto_is_cuda = True
    options = (
        NETWORKS,
        *training(("mlp",)),
        ("algorithms", names_of("algorithm", list(ALGORITHMS), GROUPS), (), "trained with over Bagua-Net"),
        ("baseline", (REFERENCE, FSDP), REFERENCE, "what all backends train with"),
        *steps(10, 3),
        # In the first second of a job the plugin finds out how many connections pay.
        ("warm_up", within(float, 0.0, 3600.0), 1.5, "seconds of all-reduces at the beginning, not counted"),
        RANKS_PER_HOST,
        ("tuned", str, DEFAULT_TUNED, "hand-tuned NCCL, as of bagua-net-bench --nccl --tuned"),
        ("tolerance", float, None, "allowed relative difference of a loss (default: 0 where sums have one order)"),
    )
    length = (3, 420.0, 180.0)
    same = ("steps", "warmup", "ranks_per_host", *TRAINING)

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        given.algorithms = tuple(name for name in given.algorithms if name != given.baseline)
        if given.tolerance is None:
            is_exact = given.ranks <= EXACT_RANKS and (given.deterministic or given.device == "cpu")
            given.tolerance = 0.0 if is_exact else DEFAULT_TOLERANCE
        own = make_backends(library=None, tuned=tuned_settings([given.tuned]), variants=[], with_shared_memory=False)
        self.backends = {one.name: one for one in (*own, bagua_net_by_activation())}

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
        super().check(parser, given)
        check_hosts(parser, given)

    def plan(self) -> Mapping[Network, Plan]:
        given = self.given
        variants = [*self.backends, *given.algorithms]
        wrapper = {} if given.baseline == REFERENCE else {"wrapper": given.baseline}
        return {
            network: {Case(network=network.name, model=model, **wrapper): variants for model in given.model}
            for network in given.networks
        }

    @contextlib.contextmanager
    def session(self, network: Network, plan: Plan) -> Iterator[Measure]:
        with network.placement(self.given) as placement, contextlib.ExitStack() as stack:
            ranks = {
                name: stack.enter_context(self._ranks(network, backend, placement))
                for name, backend in self.backends.items()
            }
            failures = start_all(ranks)
            for name, failure in failures.items():
                raise BenchError(f"{name} did not start: {failure}")
            self.learn(ranks[OURS].facts)
            if self.given.device == "cuda":  # gloo has no connections to find
                for one in ranks.values():
                    self._warm_up(one)
            yield lambda case, variant, _: self._turn(ranks, case, variant)
            if self.given.device == "cuda":
                for name, one in ranks.items():
                    self.lines.append(f"{network}, {name}: {one.network_seen()}")
                    if fault := one.network_fault(f"{name}, {network}"):
                        self.errors.append(fault)

    def _ranks(self, network: Network, backend: Backend, placement: Any) -> Ranks:
        given = self.given
        algorithms = given.algorithms if backend.name == OURS else ()
        options = argparse.Namespace(**{**vars(given), "algorithms": (given.baseline, *algorithms)})
        return Ranks(
            options,
            "measure.core.rank",
            options=("algorithms", "deterministic"),
            placement=placement,
            backend=backend,
            log_folder=log_folder(self.folder, network.name, backend.name),
            tcp_only=given.ranks_per_host == 1,
            renews=False,
        )

    def _warm_up(self, ranks: Ranks) -> None:
        end = time.monotonic() + self.given.warm_up
        while (left := end - time.monotonic()) > 0:
            ranks.call("all_reduce", size_bytes=_WARM_UP_BYTES, seconds=min(left, _WARM_UP_S))

    def _turn(self, ranks: Mapping[str, Ranks], case: Case, variant: str) -> Sample:
        given, mine = self.given, ranks[variant if variant in ranks else OURS]
        algorithm = given.baseline if variant in ranks else variant
        fields = {"algorithm": algorithm, "steps": given.steps, "warmup": given.warmup}
        return combined(mine.call("turn", **fields, **size_of(given, case.model)))

    def rows(self) -> list[Row]:
        """Of the cases that NCCL's default and Bagua-Net have."""
        cases = dict.fromkeys(case for case, _ in self.turns.samples)
        rows = [Row(self.turns, case, OURS) for case in cases]
        return [row for row in rows if row.over(DEFAULT) is not None]

    def labels(self, row: Row) -> dict[str, Label]:
        network, *case = vars(row.case).items()
        return {**dict(case), **parse_network(network[1]).labels(), **self.where}

    def figures(self, row: Row) -> list[Figure]:
        labels, best = self.labels(row), best_tuned(row)
        setting: dict[str, Label] = {} if best is None else {"setting": best}
        algorithms = algorithms_of(row)
        columns = [(DEFAULT, DEFAULT), (BEST_TUNED_NAME, best), (OURS, OURS)]
        found = []
        for label, variant in (*columns, *((f"{OURS} {name}", name) for name in algorithms)):
            if variant is not None:
                mine = {"backend": backend_label(label), **(setting if label == BEST_TUNED_NAME else {}), **labels}
                found += figures(mine, {("step_time", "ms"): [one * 1e3 for one in row.values(variant=variant)]})
                found += figures(mine, {("loss", ""): [one[-1] for one in row.values("losses", variant)]})
        ratios = [(OURS, DEFAULT, row.over(DEFAULT)), (OURS, BEST_TUNED_NAME, row.over(best))]
        for variant, baseline, over in (
            *ratios,
            *((f"{OURS} {name}", OURS, over) for name, over in algorithms.items()),
        ):
            names = {"backend": backend_label(variant), "baseline": backend_label(baseline)}
            found += ratio_figure({**names, **labels, **(setting if baseline == BEST_TUNED_NAME else {})}, over)
        return found

    def closing(self, rows: Sequence[Row]) -> Iterable[str]:
        return [
            f"{row.case.network}, {row.case}: {BEST_TUNED_NAME} is {best}" for row in rows if (best := best_tuned(row))
        ]

    def faults(self, rows: Sequence[Row]) -> list[str]:
        return [f"{row.case.network}: {fault}" for row in rows for fault in training_faults(row, self.given.tolerance)]


def log_folder(folder: Path, *names: str) -> Path:
    return folder.joinpath(*("".join(one if one.isalnum() else "-" for one in name) for name in names))


def training_faults(row: Row, tolerance: float) -> list[str]:
    """What makes step times worthless: losses that are not those of NCCL's default, or are not numbers.

    Args:
        tolerance: Relative to the first loss; rounds of the default that differ by more raise it.
    """
    default = row.values("losses", DEFAULT)
    own = max(relative_difference(default[0], losses) for losses in default)
    # If even the default's losses are NaN, nothing can be compared, and nothing may pass.
    allowed = max(tolerance, own) if math.isfinite(own) else tolerance
    faults = []
    for name in [name for case, name in row.turns.samples if case == row.case]:
        mine = row.values("losses", name)
        if name in ALGORITHMS:  # trains differently
            faults += [
                f"the loss of {name} with {row.case} became {losses[-1]}"
                for losses in mine
                if not all(map(math.isfinite, losses))
            ]
            continue
        if (gap := max(relative_difference(default[0], losses) for losses in mine)) > allowed:
            faults.append(
                f"losses of {name} with {row.case} differ from those of {DEFAULT} by {gap:.3g} (relative to the first"
                f" loss); allowed {allowed:.3g}, rounds of {DEFAULT} differ by {own:.3g}"
            )
        if not all(row.values("replicas_agree", name)):
            faults.append(f"{name} with {row.case}: the ranks ended with different parameters")
    return faults


def relative_difference(left: Sequence[float], right: Sequence[float]) -> float:
    """The largest difference of any step, relative to the first loss, because late losses are close to zero."""
    gaps = [abs(a - b) for a, b in zip(left, right, strict=True)]
    # NaN compares as false with everything, so it would pass any limit.
    if not all(math.isfinite(gap) for gap in gaps):
        return math.inf
    return max(gaps) / max(abs(left[0]), 1e-12)


main = Networks.main
