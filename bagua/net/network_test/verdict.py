"""From what the ranks measured to a table, what limits the network, and what to put into the job script."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bagua.net.bench.measurement import busbw_factor
from bagua.net.bench.nccl_log import NetworkProof
from bagua.net.bench.sizes import format_size
from bagua.net.bench.table import MISSING, format_bandwidth
from bagua.net.bench.traffic import NO_TRAFFIC, Traffic
from bagua.net.compare.command_run import CommandRun
from bagua.net.compare.rounds import Rounds, RunFigure
from bagua.net.compare.setting import Setting
from bagua.net.compare.verdict import Outcome, Verdict, is_pointless, judge

SIZES = (64 << 10, 1 << 20, 64 << 20)
_RDMA_NETWORK = "IB"
_LINE = "export ENABLE_BAGUA_NET=1"
_GLOO = "The plugin has no effect on gloo: both columns show gloo, and their difference is chance."
_RDMA_UNUSED = (
    "{}, and NCCL does not use RDMA without the plugin either: is that wanted?"
    " `bagua-net doctor` says what is missing; NCCL_IB_DISABLE=1 keeps TCP without this question."
)
_RDMA = (
    "NCCL's own network is RDMA here (IB in its log). Bagua-Net replaces it by TCP, which takes CPU time from training."
)
_COMPARED = (Outcome.FASTER, Outcome.SLOWER, Outcome.NO_DIFFERENCE, Outcome.TOO_FEW_ROUNDS)


@dataclass(frozen=True)
class Job:
    """
    Attributes:
        hosts: how many different ones.
        backend: of torch.distributed, "nccl" or "gloo".
        without_gpu: the names of the hosts that have no GPU.
        unused_rdma: "host a: mlx5_0 is up", of the hosts whose RDMA NCCL would use by its own settings.
    """

    ranks: int
    hosts: int
    backend: str
    without_gpu: tuple[str, ...] = ()
    unused_rdma: tuple[str, ...] = ()


@dataclass(frozen=True)
class Turn:
    """All ranks, in one round, with one setting.

    Attributes:
        setting: 0 without the plugin, 1 with it.
        seconds: of one all-reduce, by size in bytes.
        networks, transports: those that NCCL's logs name.
        traffic: of the rank whose interface carried most, in the busiest round of this setting.
    """

    setting: int
    round: int
    seconds: Mapping[int, float]
    networks: tuple[str, ...] = ()
    transports: tuple[str, ...] = ()
    wrote_nccl_log: bool = False
    traffic: Traffic = NO_TRAFFIC


@dataclass
class Results:
    job: Job
    settings: tuple[Setting, Setting]
    turns: list[Turn] = field(default_factory=list)

    def is_pointless(self) -> bool:
        return is_pointless(self._rounds(SIZES[-1]), *self.settings)

    def verdict(self, size: int) -> Verdict:
        return judge(self._rounds(size), *self.settings)

    def busbw_gb_s(self, size: int, setting: int) -> float | None:
        """The median of the rounds."""
        seconds = [turn.seconds[size] for turn in self.turns if turn.setting == setting]
        return size / statistics.median(seconds) / 1e9 * busbw_factor("all_reduce", self.job.ranks) if seconds else None

    def _rounds(self, size: int) -> Rounds:
        """As `bagua-net compare` sees them."""
        found = Rounds()
        for turn in self.turns:
            proofs = tuple(NetworkProof(network, transports=turn.transports) for network in turn.networks)
            setting = self.settings[turn.setting]
            found.runs.append(CommandRun(setting, turn.round, 0.0, (), proofs, turn.wrote_nccl_log, turn.traffic))
            found.figures.append(RunFigure(turn.seconds[size], 1))
        return found


@dataclass(frozen=True)
class Conclusion:
    """
    Attributes:
        headline: one sentence.
        reasons: what limits the network, or why nothing was compared.
        advice: what to do with a job on these nodes.
        use_plugin: whether that is to use the plugin; None: this test cannot tell.
    """

    headline: str
    reasons: tuple[str, ...]
    advice: str
    use_plugin: bool | None


def report(results: Results) -> dict[str, Any]:
    """What `--json` prints."""
    sizes = []
    for size in SIZES:
        ratio = results.verdict(size).ratio if results.job.backend == "nccl" else None
        without, with_plugin = (results.busbw_gb_s(size, setting) for setting in (0, 1))
        speedup = None if ratio is None else asdict(ratio)
        sizes.append({"bytes": size, "without_gb_s": without, "with_gb_s": with_plugin, "speedup": speedup})
    turns = [asdict(turn) for turn in results.turns]
    return {"schema": 1, **asdict(results.job), "sizes": sizes, **asdict(conclude(results)), "turns": turns}


def rows(results: Results) -> list[tuple[str, str, str, str]]:
    """Size, GB/s without, GB/s with, and the ratio."""
    found = []
    for size in SIZES:
        without, with_plugin = (results.busbw_gb_s(size, setting) for setting in (0, 1))
        verdict = results.verdict(size)
        compares = results.job.backend == "nccl" and verdict.outcome in _COMPARED
        ratio = MISSING if not compares or verdict.ratio is None else str(verdict.ratio)
        found.append((format_size(size), _bandwidth(without), _bandwidth(with_plugin), ratio))
    return found


def _bandwidth(value: float | None) -> str:
    return MISSING if value is None else format_bandwidth(value)


def conclude(results: Results) -> Conclusion:
    if results.job.backend == "gloo":
        hosts = ", ".join(results.job.without_gpu)
        return Conclusion(
            "gloo was used: nothing was compared.",
            (f"torch finds no GPU on {hosts}, or is a build without NCCL.", _GLOO),
            "To compare, start this command on nodes with GPUs and a CUDA build of torch, one or more ranks on each.",
            None,
        )
    largest = results.verdict(SIZES[-1])
    if largest.outcome not in _COMPARED:
        return Conclusion(largest.headline, largest.reasons, _without_comparison(largest.outcome, results.job), None)
    by_size = {size: results.verdict(size) for size in SIZES}
    reasons = (*_rdma(results), *_limit(largest, results))
    faster = [size for size in SIZES if by_size[size].outcome is Outcome.FASTER]
    slower = [size for size in SIZES if by_size[size].outcome is Outcome.SLOWER]
    if _uses_rdma(results) and not faster:
        return Conclusion(largest.headline, reasons, "Leave ENABLE_BAGUA_NET unset, and keep RDMA.", False)
    if faster and not slower:
        return Conclusion(_headline(by_size, faster, "faster"), reasons, f"Put into the job script:\n  {_LINE}", True)
    if faster:
        text = _headline(by_size, faster, "faster") + " " + _headline(by_size, slower, "slower")
        advice = f"Compare your own job: bagua-net compare -- CMD. The line for the job script is\n  {_LINE}"
        return Conclusion(text, reasons, advice, None)
    if slower:
        return Conclusion(_headline(by_size, slower, "slower"), reasons, "Leave ENABLE_BAGUA_NET unset.", False)
    if largest.outcome is Outcome.TOO_FEW_ROUNDS:
        return Conclusion(largest.headline, reasons, "Run more rounds: --rounds 3.", None)
    text = "No difference between Bagua-Net and NCCL's own network at any size."
    return Conclusion(text, reasons, "There is no reason to set ENABLE_BAGUA_NET on these nodes.", False)


def _headline(verdicts: dict[int, Verdict], sizes: Sequence[int], word: str) -> str:
    each = []
    for size in sizes:
        ratio = verdicts[size].ratio
        assert ratio is not None
        each.append(f"{ratio.median:.2f}x at {format_size(size)}")
    return f"Bagua-Net is {word} than NCCL's own network: {', '.join(each)}."


def _uses_rdma(results: Results) -> bool:
    return any(_RDMA_NETWORK in turn.networks for turn in results.turns if turn.setting == 0)


def _rdma(results: Results) -> list[str]:
    if _uses_rdma(results):
        return [_RDMA]
    return [_RDMA_UNUSED.format("; ".join(results.job.unused_rdma))] if results.job.unused_rdma else []


def _limit(largest: Verdict, results: Results) -> list[str]:
    """What `judge` found; else how much of the NIC was used."""
    if largest.reasons:
        return list(largest.reasons)
    traffic = max((turn.traffic for turn in results.turns), key=lambda one: one.peak_bytes_per_s)
    if not traffic.interface or not traffic.peak_bytes_per_s:
        return []
    return [_share_of_link(traffic)]


def _share_of_link(traffic: Traffic) -> str:
    carried = f"{traffic.interface} carried up to {traffic.peak_bytes_per_s * 8e-9:.3g} Gb/s"
    if traffic.speed_bytes_per_s is None:
        return (
            f"{carried}; the speed of its link is unknown. `bagua-net doctor --peer HOST` says what the path carries."
        )
    speed = traffic.speed_bytes_per_s
    if traffic.is_saturated:
        return f"The network is saturated: {carried} of its {speed * 8e-9:g} Gb/s."
    share = traffic.peak_bytes_per_s / speed
    return (
        f"{carried} of its {speed * 8e-9:g} Gb/s ({share:.0%}): the NIC is not the limit."
        " `bagua-net doctor --peer HOST` says what is."
    )


def _without_comparison(outcome: Outcome, job: Job) -> str:
    if outcome is Outcome.NO_TRAFFIC:
        where = "one host" if job.hosts == 1 else f"{job.hosts} hosts"
        return f"The {job.ranks} ranks ran on {where}. Start this command on two nodes: torchrun --nnodes 2 ..."
    if outcome is Outcome.PLUGIN_NOT_USED:
        return "Run `bagua-net doctor` on each node; it says what keeps NCCL from the plugin."
    return "Correct this, and run the command again."
