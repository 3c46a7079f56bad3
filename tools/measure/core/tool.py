"""`measure core`: train with torch's DDP and with Bagua's algorithms in turns, and compare step time, memory and final
models.

One process group for all; in every round each algorithm trains a fresh copy of the model from the same start, and frees
it. A step's time is that of its slowest rank. Errors: an algorithm that fails or breaks what it promises (the same
parameters on all ranks, or those of torch's DDP), and a log of NCCL that shows another network.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bagua.net.bench.api import MISSING, Backend, Column, Event, Figure, Label, ignored_variables, names_of, within
from measure.core.catalogue import (
    ALGORITHMS,
    ALL_REDUCE,
    DEFAULT_ALGORITHMS,
    DEFAULT_MODELS,
    DEFAULT_MODELS_ON_CPU,
    DTYPES,
    FLOAT32,
    GROUPS,
    MODELS,
    REFERENCE,
    Promise,
)
from measure.network import NETWORKS, Network, parse_network
from measure.processes import Ranks, bagua_net_by_activation
from measure.runner import (
    Case,
    Measure,
    Plan,
    Row,
    Sample,
    Tool,
    choose_device,
    format_ms,
    name_of,
    number,
    ranks_text,
    ratio_figure,
)

# An algorithm's sums may be of another order than DDP's, and training carries the last bit's difference on. A gradient
# that was not averaged is ten times beyond this.
DEFAULT_TOLERANCE = 0.1
# Of rounds of DDP against each other; three of them are hardly the largest difference there is.
_SPREAD_FACTOR = 3.0
# Who changes the training for less gains less than machines differ by.
LEAST_SPEED_UP = 1.05
# Said of those that do not train as DDP does.
_PROMISES = {
    Promise.EQUAL: "another training than DDP's, in which all ranks keep the same parameters",
    Promise.OWN: "another training than DDP's, in which every rank has parameters of its own",
}
_MIB = 1 << 20


# Options of what is trained.
TRAINING = ("batch_size", "dtype", "length", "seed", "deterministic")


# --- what other tools use, too ---------------------------------------------------------------------------------------


def training(models: tuple[str, ...] | None, about_models: str = "") -> tuple[Any, ...]:
    """Options of a tool that trains. `models`: By default these."""
    return (
        ("model", names_of("model", list(MODELS)), models, f"of {', '.join(MODELS)}{about_models}"),
        ("batch_size", within(int, 1, 65536), None, "per rank (default: the model's)"),
        ("dtype", DTYPES, None, "bf16: autocast (default: the model's; float32 on CPUs)"),
        ("length", within(int, 1, 65536), None, "pixels, tokens or layers (default: the model's)"),
        ("seed", int, 1, "of weights and batches"),
        ("deterministic", None, False, "deterministic kernels where there are such"),
    )


def steps(measured: int, warmup: int) -> tuple[Any, ...]:
    """Options of a tool that times steps."""
    return (
        ("steps", within(int, 1, 100_000), measured, "timed steps of a turn"),
        ("warmup", within(int, 0, 10_000), warmup, "steps before them"),
    )


def size_of(given: argparse.Namespace, model: str) -> dict[str, Any]:
    """What a rank is told of the model and its size."""
    entry = MODELS[model]
    on_gpu = given.device == "cuda"
    return {
        "model": model,
        "length": given.length or (entry.length if on_gpu else entry.length_on_cpu),
        "batch_size": given.batch_size or (entry.batch_size if on_gpu else entry.batch_size_on_cpu),
        "dtype": given.dtype or (entry.dtype if on_gpu else FLOAT32),
        "seed": given.seed,
    }


def combined(events: Sequence[Event]) -> Sample:
    """A turn of all ranks together: what measure.core.rank returns, where ranks differ as said here."""
    first = events[0]
    kept = [f"rank {rank}: {event['kept']}" for rank, event in enumerate(events) if event["kept"]]
    # Of each step, or cycle of steps, that of the slowest rank.
    step_seconds = [max(step) for step in zip(*(event["step_seconds"] for event in events), strict=True)]
    return {
        "seconds": statistics.median(step_seconds),
        "step_seconds": step_seconds,
        "steps": first["steps"],  # that rank 0 measured
        # Of the measured steps that all ranks have, mean over the ranks.
        "losses": [statistics.fmean(step) for step in zip(*(event["losses"] for event in events), strict=False)],
        "parameters": first["parameters"],
        "peak_bytes": most([event["peak_bytes"] for event in events]),
        "steps_peak_bytes": most([event["steps_peak_bytes"] for event in events]),
        "machine_busy": first["machine_busy"],
        "averagings": first["averagings"],
        "replicas_agree": all(event["fingerprint"] == first["fingerprint"] for event in events),
        # From DDP's final parameters; None: that is what the others are compared with.
        "largest_difference": first["largest_difference"],
        "relative_difference": first["relative_difference"],
        "kept": "; ".join(kept) or None,  # what a rank did not free
    }


def most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


# --- the table -------------------------------------------------------------------------------------------------------


def promise_of(row: Row) -> Promise:
    return ALGORITHMS[row.variant].promise


def steps_ms(row: Row) -> list[float]:
    """Of all rounds."""
    return [seconds * 1e3 for steps in row.values("step_seconds") for seconds in steps]


def _low_to_high(row: Row) -> str:
    """A tenth of the steps is below, a tenth above."""
    steps = steps_ms(row)
    tenths = statistics.quantiles(steps, n=10, method="inclusive") if len(steps) > 1 else steps
    return f"{format_ms(tenths[0])}..{format_ms(tenths[-1])}"


def peak_mib(row: Row, name: str) -> float | None:
    found = most(row.values(name))
    return None if found is None else found / _MIB


def extra_bytes(row: Row) -> float | None:
    """In measured steps, beyond gradient all-reduce, for each element of the parameters. Medians over rounds: on a CPU
    a single figure may hold what the allocator happened to keep."""
    mine, plain = row.median("steps_peak_bytes"), row.median("steps_peak_bytes", ALL_REDUCE)
    if mine is None or plain is None or row.variant == ALL_REDUCE:
        return None
    return (mine - plain) / row.values("parameters")[0]


def busy_percent(row: Row) -> float | None:
    known = [value for value in row.values("machine_busy") if value is not None]
    return statistics.fmean(known) * 100 if known else None


def steps_per_averaging(row: Row) -> float | None:
    """None: it does not average during its steps."""
    averagings = sum(value or 0 for value in row.values("averagings"))
    return sum(row.values("steps")) / averagings if averagings else None


def replicas(row: Row) -> str:
    return "agree" if all(row.values("replicas_agree")) else "own" if promise_of(row) is Promise.OWN else "DIFFER"


def own_spread(row: Row) -> float:
    """How far rounds of DDP end from its first: what this machine's arithmetic does by itself."""
    own = row.values("relative_difference", REFERENCE)
    return max((value for value in own if value is not None and math.isfinite(value)), default=0.0)


def is_compared(row: Row) -> bool:
    """With DDP's final parameters."""
    return promise_of(row) is Promise.AS_DDP and row.variant != REFERENCE


class Core(Tool):
    name = "core"
    epilog = "\n".join(
        [
            "models:",
            *(f"  {name:<10} {entry.about}" for name, entry in MODELS.items()),
            "\nalgorithms:",
            *(f"  {name:<28} {entry.about}" for name, entry in ALGORITHMS.items()),
            f"  or several by one name: {', '.join(GROUPS)}",
        ]
    )
    title = "Step time of training: {model} on {ranks} ranks"
    keeps_logs = True
    options = (
        NETWORKS,
        ("algorithms", names_of("algorithm", list(ALGORITHMS), GROUPS), DEFAULT_ALGORITHMS, "see below"),
        ("baseline", tuple(ALGORITHMS), REFERENCE, "what speed-ups are over"),
        *training(None, f" (default {','.join(DEFAULT_MODELS)}; on CPUs {','.join(DEFAULT_MODELS_ON_CPU)})"),
        *steps(20, 5),
        ("tolerance", within(float, 0.0, 10.0), DEFAULT_TOLERANCE, "of final parameters, of their way from the start"),
        ("network", ("nvlink", "tcp"), None, "of NCCL; tcp: Bagua-Net (default nvlink)"),
    )
    length = (5, 420.0, 120.0)
    same = ("steps", "warmup", "network", *TRAINING)
    metrics = (
        ("step_time", "ms", lambda row: [seconds * 1e3 for seconds in row.values()]),
        ("memory", "MiB", lambda row: [peak_mib(row, "steps_peak_bytes")]),
        ("cpu", "%", lambda row: [busy_percent(row)]),
        ("steps_per_average", "steps", lambda row: [steps_per_averaging(row)]),
    )

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
        choose_device(parser, given, auto_is_cuda_with_any=True)
        if given.device == "cpu" and given.network is not None:
            parser.error(
                f"--network {given.network} is a choice of NCCL's; gloo on CPUs has loopback TCP: leave it out"
            )
        if given.device == "cuda" and any(network.is_emulated for network in given.networks):
            if given.network == "nvlink":
                parser.error(
                    "--network nvlink is of one host; emulated --networks have a host for each rank: leave it out"
                )
            given.network = "tcp"
        if given.sharing is not None and given.network != "tcp":
            parser.error(
                f"--share-gpus: ranks of one GPU reach each other over TCP only; add --network tcp, or give as many"
                f" ranks as there are GPUs, {given.sharing.gpus}"
            )
        if given.baseline not in given.algorithms:
            if len(given.algorithms) < 2:
                parser.error(
                    f"--algorithms {given.algorithms[0]} has nothing to be compared with; add {given.baseline}"
                )
            if given.baseline != REFERENCE:
                parser.error(f"--baseline {given.baseline} is none of --algorithms; add it there")
        for name in given.algorithms:
            least = ALGORITHMS[name].least_warmup
            if given.warmup < least:
                parser.error(
                    f"--warmup {given.warmup}: {name} compresses only after some steps; give {least} or more, or leave"
                    " it out"
                )
        given.model = given.model or (DEFAULT_MODELS if given.device == "cuda" else DEFAULT_MODELS_ON_CPU)
        if given.device == "cuda":
            given.network = given.network or "nvlink"

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        self._settled: set[tuple[Case, int]] = set()  # models that these ranks have trained
        if ignored := ignored_variables(os.environ):
            self.notes.append(f"left out of the ranks' environment: {', '.join(ignored)}")
        short = "DDP" if given.baseline == REFERENCE else given.baseline
        self.columns = (
            Column("network", "", lambda row: row.case.network if len(self.networks) > 1 else "", True, True),
            Column("model", "", lambda row: row.case.model, left=True),
            Column("algorithm", "", lambda row: row.variant, left=True),
            Column("step", "ms", lambda row: format_ms(statistics.median(steps_ms(row)))),
            Column("p10..p90", "ms", _low_to_high),
            Column(f"over {short}", "x", lambda row: self._over(row, "{0.median:.3f}")),
            Column("by round", "x", lambda row: self._over(row, "{0.low:.3f}..{0.high:.3f}")),
            Column("samples", "/s", self._samples_per_second),
            Column("peak", "MiB", lambda row: number(peak_mib(row, "peak_bytes"), ".0f"), optional=True),
            Column("extra", "B/elem", lambda row: number(extra_bytes(row), "+.1f"), optional=True),
            Column("CPU", "%", lambda row: number(busy_percent(row), ".0f"), optional=True),
            Column(
                "from DDP",
                "largest",
                lambda row: number(most(row.values("largest_difference")), ".2g") if is_compared(row) else MISSING,
                optional=True,
            ),
            Column("replicas", "", replicas),
        )

    @property
    def networks(self) -> list[str]:
        return list(dict.fromkeys(case.network for case, _ in self.turns.samples))

    def speed_up(self, row: Row) -> Any:
        return None if row.variant == self.given.baseline else row.over(self.given.baseline)

    def _over(self, row: Row, style: str) -> str:
        found = self.speed_up(row)
        return MISSING if found is None else style.format(found)

    def _samples_per_second(self, row: Row) -> str:
        samples = self.given.ranks * size_of(self.given, row.case.model)["batch_size"]
        return f"{samples / (statistics.median(steps_ms(row)) * 1e-3):.4g}"

    def plan(self) -> Mapping[Network, Plan]:
        given = self.given
        return {
            network: {Case(network=network.name, model=model): given.algorithms for model in given.model}
            for network in given.networks
        }

    @contextlib.contextmanager
    def session(self, network: Network, plan: Plan) -> Iterator[Measure]:
        given, is_tcp = self.given, self.given.network == "tcp"
        self._settled.clear()
        with (
            network.placement(given) as placement,
            Ranks(
                given,
                "measure.core.rank",
                options=("algorithms", "deterministic"),
                placement=placement,
                backend=bagua_net_by_activation() if is_tcp else Backend("ranks", "", {"ENABLE_BAGUA_NET": "0"}),
                log_folder=self.folder,
                tcp_only=is_tcp,
                shows_network=is_tcp,
            ) as ranks,
        ):
            self.learn(ranks.ready().facts)
            yield lambda case, variant, _: self._turn(ranks, case, variant)

    def _turn(self, ranks: Ranks, case: Case, algorithm: str) -> Sample:
        given = self.given
        fields = {"algorithm": algorithm, "warmup": given.warmup, **size_of(given, case.model)}
        ranks.ready()
        # Initialization (loading kernels, allocating memory, connecting) would distort the first turn.
        if (case, ranks.starts) not in self._settled:
            ranks.call("settle", steps=max(1, given.warmup), **fields)
            self._settled.add((case, ranks.starts))
        sample = combined(ranks.call("turn", steps=given.steps, **fields))
        note = f"{algorithm} did not free everything with {case.model}"
        # Noted once: the memory figures of all later turns include it.
        if sample["kept"] is not None and not any(text.startswith(note) for text in self.notes):
            self.notes.append(f"{note} ({sample['kept']})")
        return sample

    def block(self, row: Row) -> object:
        return row.case

    def is_loud(self, row: Row) -> bool:
        return replicas(row) == "DIFFER"

    def labels(self, row: Row) -> dict[str, Label]:
        network = {} if self.given.network is None else {"network": self.given.network}
        model = {"model": row.case.model, "algorithm": name_of(row.variant)}
        return {**model, **parse_network(row.case.network).labels(), **self.where, **network}

    def figures(self, row: Row) -> list[Figure]:
        return [*super().figures(row), *ratio_figure(self.labels(row), self.speed_up(row))]

    def faults(self, rows: Sequence[Row]) -> Iterator[str]:
        """What makes figures worthless: ranks or algorithms that did not train what they promise to."""
        for row in rows:
            what = f"{row.case.network}: {row.variant} with {row.case.model}"
            if replicas(row) == "DIFFER":
                yield f"{what}: the ranks ended with different parameters"
            yield from (
                f"{what}: the loss became {losses[-1]}"
                for losses in row.values("losses")
                if not math.isfinite(losses[-1])
            )
            own, difference = own_spread(row), most(row.values("relative_difference"))
            allowed = max(self.given.tolerance, _SPREAD_FACTOR * own)
            if is_compared(row) and difference is not None and not difference <= allowed:
                yield (
                    f"{what}: final parameters differ from {REFERENCE}'s by {difference:.3g} of the way from the start;"
                    f" allowed {allowed:.3g}, rounds of {REFERENCE} differ by {own:.3g}"
                )

    def closing(self, rows: Sequence[Row]) -> Iterator[str]:
        baseline = self.given.baseline
        yield f"over: step time of {baseline} over the algorithm's, within a round; above 1 is faster"
        if any(extra_bytes(row) is not None for row in rows):
            yield f"extra: peak of the measured steps beyond {ALL_REDUCE}'s, for each element of the parameters"
        if any(busy_percent(row) is not None for row in rows):
            yield "CPU: of this machine's CPUs, by everything on it; near 100 they are the limit"
        for promise, meaning in _PROMISES.items():
            if promising := list(dict.fromkeys(row.variant for row in rows if promise_of(row) is promise)):
                yield f"{meaning}: {', '.join(promising)}"
        for row in rows:
            what = f"{row.case.network}, {row.case.model}: "
            if (steps := steps_per_averaging(row)) is not None:
                yield f"{what}{row.variant} averaged parameters once in {steps:.1f} steps"
            if is_compared(row) and (largest := most(row.values("largest_difference"))) is not None:
                relative = most(row.values("relative_difference"))
                yield (
                    f"{what}final parameters of {row.variant} are at most {largest:.2g} from those of {REFERENCE}"
                    f" ({relative:.2g} of the way from the start)"
                )
            if row.variant == REFERENCE and (spread := own_spread(row)):
                yield f"{what}rounds of {REFERENCE} end {spread:.2g} of the way from the start apart"
        for case in dict.fromkeys(row.case for row in rows) if len(self.networks) > 1 else ():
            equal, every = (
                self._fastest([row for row in rows if row.case == case and promise_of(row) in promises])
                for promises in ((Promise.EQUAL,), (Promise.EQUAL, Promise.OWN))
            )
            yield f"{case.network}: the fastest, {case.model}: with equal replicas {equal}, of all {every}"
        if (package := self.facts.get("python_compression")) is not None:
            self.notes.append(
                f"{package} has no compiled compression: what compresses runs in Python here, several times slower than"
                " for users; install the package (make install), and leave the source tree out of PYTHONPATH"
            )

    def _fastest(self, rows: Sequence[Row]) -> str:
        """Of those that were faster than the baseline in every round, and by 5 % in the median, the fastest."""
        found = {row.variant: over for row in rows if (over := self.speed_up(row)) is not None}
        gains = {name: over.median for name, over in found.items() if over.low > 1 and over.median >= LEAST_SPEED_UP}
        best = max(gains, key=lambda name: gains[name], default=None)
        return "gradient all-reduce" if best is None else f"{best} {gains[best]:.2f}x"

    def heading(self) -> str:
        given = self.given
        network = f", network {given.network}" if given.network else ", gloo"
        return f"{ranks_text(given, self.facts)}{network}; turns of {given.steps} steps after {given.warmup}"

    def parameters(self) -> Mapping[str, Any]:
        return {"models": {model: size_of(self.given, model) for model in self.given.model}}


main = Core.main
