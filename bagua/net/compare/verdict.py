"""From the runs of a comparison to one sentence, and why it is so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from bagua.net.bench import verdict as paired
from bagua.net.bench.nccl_ab.backend import PLUGIN_NETWORK
from bagua.net.bench.verdict import PairedRatio, paired_ratio
from bagua.net.compare.command_run import CommandRun
from bagua.net.compare.rounds import Rounds
from bagua.net.compare.setting import Setting
from bagua.net.compare.step_sources import exposed_share

# Below this share of a step even a network without cost would not be noticed.
_HIDDEN_SHARE = 0.03


class Outcome(Enum):
    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no difference"
    TOO_FEW_ROUNDS = "too few rounds"
    NCCL_NOT_USED = "nccl not used"
    NO_TRAFFIC = "no traffic"
    PLUGIN_NOT_USED = "plugin not used"
    PLUGIN_IN_BOTH = "plugin used in both"


@dataclass(frozen=True)
class Verdict:
    """
    Attributes:
        ratio: step time of the first setting over the second's, within each round; None without a whole round.
    """

    outcome: Outcome
    headline: str
    reasons: tuple[str, ...]
    ratio: PairedRatio | None


def ratio_of(rounds: Rounds, first: Setting, second: Setting) -> PairedRatio | None:
    above, below = ({run.round: figure.seconds for run, figure in rounds.of(one)} for one in (first, second))
    shared = [number for number in above if number in below]
    return paired_ratio([above[n] for n in shared], [below[n] for n in shared]) if shared else None


def networks_of(runs: Sequence[CommandRun]) -> list[str]:
    return sorted({proof.network for run in runs for proof in run.proofs if proof.network})


def judge(rounds: Rounds, first: Setting, second: Setting) -> Verdict:
    ratio = ratio_of(rounds, first, second)
    before, after = ([run for run, _ in rounds.of(one)] for one in (first, second))
    idle = _idle(rounds.runs)
    if (cause := _nothing_compared(rounds, first, second)) is not None:
        outcome, headline, reason = cause
        return Verdict(outcome, headline, (reason,), ratio)
    outcome, headline = _by_ratio(ratio, first.name, second.name)
    reasons = [] if outcome is Outcome.FASTER else [*_hidden(rounds.runs), *_saturated(before, after)]
    if idle is not None:
        reasons += idle[1:]  # other variables than the network's may have been compared
    return Verdict(outcome, headline, tuple(reasons), ratio)


def _by_ratio(ratio: PairedRatio | None, first: str, second: str) -> tuple[Outcome, str]:
    found = paired.Verdict.TOO_FEW if ratio is None else ratio.verdict()
    if ratio is None or found is paired.Verdict.TOO_FEW:
        done = 0 if ratio is None else ratio.repetitions
        return Outcome.TOO_FEW_ROUNDS, f"No verdict: {done} of at least {paired.MIN_REPETITIONS} rounds ran."
    low, high = (1 / ratio.high, 1 / ratio.low) if found is paired.Verdict.LESS else (ratio.low, ratio.high)
    spread = f"spread {low:.3f}..{high:.3f} over {ratio.repetitions} rounds"
    if found is paired.Verdict.SAME:
        return Outcome.NO_DIFFERENCE, f"No difference between {second} and {first} ({spread})."
    if found is paired.Verdict.MORE:
        return Outcome.FASTER, f"{second} is faster than {first}: {ratio.median:.3f}x ({spread})."
    return Outcome.SLOWER, f"{second} is slower than {first}: steps take {1 / ratio.median:.3f}x as long ({spread})."


Cause = tuple[Outcome, str, str]


def is_pointless(rounds: Rounds, first: Setting, second: Setting) -> bool:
    """Whether the rounds that ran show that more of them cannot compare the plugin with anything."""
    return _nothing_compared(rounds, first, second) is not None


def _nothing_compared(rounds: Rounds, first: Setting, second: Setting) -> Cause | None:
    """None where settings other than the plugin are compared: these may matter without NCCL's network."""
    if first.plugin is None and second.plugin is None:
        return None
    before, after = ([run for run, _ in rounds.of(one)] for one in (first, second))
    return _idle(rounds.runs) or _wrong_networks(first, before, second, after)


def _idle(runs: Sequence[CommandRun]) -> Cause | None:
    return _not_nccl(runs) or _no_traffic(runs)


def _not_nccl(runs: Sequence[CommandRun]) -> Cause | None:
    if not runs or any(run.wrote_nccl_log for run in runs):
        return None
    reason = (
        "NCCL wrote no log in any run. Either the ranks communicate by other means (gloo, MPI), or they do not get the"
        " environment of this command: mpirun needs -x NAME, docker needs -e NAME."
    )
    return Outcome.NCCL_NOT_USED, "NCCL was not used: no plugin can change this job.", reason


def _wrong_networks(
    first: Setting, before: Sequence[CommandRun], second: Setting, after: Sequence[CommandRun]
) -> Cause | None:
    for setting, runs in ((first, before), (second, after)):
        networks = networks_of(runs)
        named = " and ".join(networks) or "no network that its log names"
        if setting.plugin and runs and networks != [PLUGIN_NETWORK]:
            return (
                Outcome.PLUGIN_NOT_USED,
                f"The plugin was not used: with {setting.name}, NCCL used {named}.",
                "Run `bagua-net doctor` in the environment of the ranks; BAGUA_NET_REQUIRED=1 makes NCCL say why.",
            )
        if setting.plugin is False and PLUGIN_NETWORK in networks:
            return (
                Outcome.PLUGIN_IN_BOTH,
                f"Nothing was compared: with {setting.name}, NCCL used {named}, too.",
                "The command switches the plugin on itself; let it leave ENABLE_BAGUA_NET and NCCL_NET_PLUGIN alone.",
            )
    return None


def _no_traffic(runs: Sequence[CommandRun]) -> Cause | None:
    """NCCL names a network even where no connection uses it."""
    transports = {one for run in runs for proof in run.proofs for one in proof.transports}
    if not transports or any(one.startswith(("NET/", "COLL")) for one in transports):
        return None
    reason = (
        f"NCCL connected all ranks by {', '.join(sorted(transports))}: they are on one host. Compare with ranks on"
        " several hosts; NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 makes one host use its network."
    )
    return Outcome.NO_TRAFFIC, "No traffic on the network: no plugin can change this job.", reason


def _hidden(runs: Sequence[CommandRun]) -> list[str]:
    shares = [share for run in runs if (share := exposed_share(run)) is not None]
    if not shares or max(shares) > _HIDDEN_SHARE:
        return []
    reason = (
        f"Communication is hidden behind computation: a step waits for it for at most {max(shares):.1%} of its time, so"
        " a faster network gains at most that."
    )
    return [reason]


def _saturated(before: Sequence[CommandRun], after: Sequence[CommandRun]) -> list[str]:
    if not before or not after or not all(run.traffic.is_saturated for run in (*before, *after)):
        return []
    traffic = after[-1].traffic
    assert traffic.speed_bytes_per_s is not None
    reason = (
        f"The network is saturated: {traffic.interface} carried up to {traffic.peak_bytes_per_s * 8e-9:.1f} of its"
        f" {traffic.speed_bytes_per_s * 8e-9:g} Gb/s. Only fewer bytes help: a compressing algorithm or larger batches."
    )
    return [reason]
