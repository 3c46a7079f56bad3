"""`measure all-reduce`: all-reduce, or other collectives, of NCCL's own settings and of the plugin, by network.

In each network, `bagua-net-bench --nccl` runs on every host with the options of this tool, and prints its table and its
errors: --rounds are its --repeats, and --network-limit is its --time-limit. The ratios of all networks follow. A run
that is cut off is taken up by the next one with the same --lines, network by network.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from netlab import TOLD, LinkPlan
from netlab.rank_runner import RankRunner

from bagua.net.bench.api import (
    BEST_TUNED_NAME,
    GPU_COLLECTIVES,
    BenchError,
    Column,
    Figure,
    PairedRatio,
    backend_label,
    figures,
    format_size,
    gpu_name,
    names_of,
    read_result,
    within,
)
from measure.network import NETWORKS, RANKS_PER_HOST, Network, check_hosts, parse_network, told_text
from measure.nics.drivers import RawTcp
from measure.nics.nic_set import NicSet
from measure.processes import Placement
from measure.runner import Case, Measure, Plan, Row, Sample, Tool, ratio

BEST, DEFAULT = map(backend_label, (BEST_TUNED_NAME, "NCCL default"))
# Of --raw, in each direction: what the connections of all backends share, and as many as a limit per connection needs.
_RAW_STREAMS = 8
_RAW_S = 0.3
# Beyond --network-limit: to start the processes, and to end them.
_PATIENCE_S = 300.0


@dataclass(frozen=True)
class CellRow(Row):
    """The plugin with one collective at one size, over the best of NCCL's settings, or over the only one."""

    figure: Mapping[str, Any] = field(default_factory=dict)

    @property
    def speedup(self) -> PairedRatio:
        return PairedRatio(*(self.figure[name] for name in ("median", "low", "high", "repetitions")))


class AllReduce(Tool):
    name = "all-reduce"
    title = "Collectives on {ranks} ranks, by network and size"
    ranks = (2, 128)
    keeps_logs = True
    auto_is_cuda = True
    options = (
        NETWORKS,
        RANKS_PER_HOST,
        ("collectives", names_of("collective", GPU_COLLECTIVES), ("all_reduce",), f"of {', '.join(GPU_COLLECTIVES)}"),
        ("sizes", str, "64K,256K,1M,4M,16M,64M,256M", "of the larger of input and output"),
        ("tuned", str, "2x4,2x2x8,2x2x16", "hand-tuned NCCL, as of bagua-net-bench --nccl --tuned"),
        ("raw", None, False, "also raw TCP in both directions, in emulated networks of two hosts"),
        ("network_limit", within(float, 1.0, 86400.0), 50.0, "seconds for one network, after the start"),
        ("turn", within(float, 0.001, 60.0), 0.15, "seconds of a turn"),
    )
    length = (7, 560.0, 60.0)
    same = ("ranks_per_host",)
    columns = (
        Column("network", "", lambda row: row.case.network, left=True),
        Column("told", "Mb/s", lambda row: told_text(row.case.network), optional=True),
        Column("collective", "", lambda row: row.figure["case"]["collective"], left=True),
        Column("size", "", lambda row: format_size(row.figure["case"]["size_bytes"])),
        Column("bagua-net over best of NCCL", "x", lambda row: ratio(row.speedup)),
    )

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        about = "the plugin with variables set, besides the plugin without; may be repeated"
        parser.add_argument("--variant", action="append", default=[], metavar="NAME:VAR=VALUE,...", help=about)

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
        super().check(parser, given)
        check_hosts(parser, given)

    @property
    def rounds(self) -> int:
        return 1  # bagua-net-bench has those of a network

    @property
    def least_s(self) -> float:  # type: ignore[override]
        return float(self.given.network_limit)

    def plan(self) -> Mapping[Network, Plan]:
        return {network: {Case(network=network.name): ["bagua-net-bench"]} for network in self.given.networks}

    @contextlib.contextmanager
    def session(self, network: Network, plan: Plan) -> Iterator[Measure]:
        with network.placement(self.given) as placement:
            yield lambda _case, _variant, _round: self._measure(network, placement)

    def _measure(self, network: Network, placement: Placement) -> Sample:
        path = self.folder / "".join(one if one.isalnum() else "-" for one in network.name)
        command = [*self._command(placement), "--output-dir", str(path)]
        print(f"== {network}", flush=True)
        (path / "nccl.json").unlink(missing_ok=True)
        code = self._run(placement, command)
        if not (path / "nccl.json").is_file():
            raise BenchError(f"bagua-net-bench exited with code {code}, without a result")
        if code:
            self.errors.append(f"{network}: bagua-net-bench exited with code {code}; see above")
        result = read_result(path / "nccl.json")
        self.learn({name: result.parameters.get(name) for name in ("torch", "nccl", "device", "threads")})
        return {"figures": [asdict(one) for one in [*result.figures, *self._raw(network, placement)]]}

    def _command(self, placement: Placement) -> list[str]:
        given = self.given
        command = [sys.executable, "-P", "-m", "bagua.cli.net_bench", "--nccl", "--datatype", "float32"]
        if given.device == "cpu":
            command += ["--backend", "gloo", "--device", "cpu"]
        if placement.lab is None:
            command += ["--local", "--ranks", str(given.ranks), *(["--share-gpus"] if given.share_gpus else [])]
        for option, value in (
            ("--collectives", ",".join(given.collectives)),
            ("--sizes", given.sizes),
            ("--tuned", given.tuned),
            ("--repeats", given.rounds),
            ("--turn-seconds", given.turn),
            ("--time-limit", given.network_limit),
            ("--timeout", given.timeout),
            *(("--variant", one) for one in given.variant),
        ):
            command += [option, str(value)]
        return command

    def _run(self, placement: Placement, command: Sequence[str]) -> int:
        given, limit = self.given, self.given.network_limit + _PATIENCE_S
        if placement.lab is None:
            try:
                return subprocess.run(command, timeout=limit).returncode
            except subprocess.TimeoutExpired:
                return 1
        each, gpus = given.ranks_per_host, 0
        if given.device == "cuda":
            gpus = given.ranks if given.sharing is None else given.sharing.gpus
        names = [
            ",".join(gpu_name(rank % gpus) for rank in range(host * each, host * each + each)) if gpus else ""
            for host in range(len(placement.lab.hosts))
        ]
        runner = RankRunner(placement.lab, timeout_seconds=limit, grace_seconds=30.0, gpus=names, ranks_per_host=each)
        return runner.run(command, {})

    def _raw(self, network: Network, placement: Placement) -> list[Figure]:
        if not self.given.raw or placement.lab is None or len(placement.lab.hosts) != 2:
            return []
        nics = NicSet(network.name, (Network(network.name, LinkPlan(network.rate_mbit).speed_mbit(TOLD)),))
        with RawTcp(nics, placement.lab, self.given.timeout, streams=_RAW_STREAMS) as raw:
            rates = [raw.rate([0], _RAW_S) / 1e9 for _ in range(3)]
        self.lines.append(f"{network}: raw TCP carries {min(rates):.2f}..{max(rates):.2f} GB/s each way")
        return figures({"backend": "raw_tcp"}, {("busbw", "GB/s"): rates})

    def rows(self) -> list[CellRow]:
        rows = []
        for case, variant in self.turns.samples:
            found = [one for one in self.turns.of(case, variant)[0]["figures"] if one["metric"] == "speedup"]
            baseline = BEST if any(one["case"]["baseline"] == BEST for one in found) else DEFAULT
            rows += [CellRow(self.turns, case, variant, one) for one in found if one["case"]["baseline"] == baseline]
        return rows

    def is_loud(self, row: Row) -> bool:
        assert isinstance(row, CellRow)
        return row.speedup.high < 1

    def all_figures(self, rows: Sequence[Row]) -> list[Figure]:
        return [
            Figure(**{**one, "case": {**one["case"], **parse_network(case.network).labels()}})
            for case, variant in self.turns.samples
            for one in self.turns.of(case, variant)[0]["figures"]
        ]


main = AllReduce.main
