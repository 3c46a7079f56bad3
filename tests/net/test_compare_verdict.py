"""`bagua-net compare`: what the runs mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from bagua.net.bench.errors import UsageError
from bagua.net.bench.nccl_log import NetworkProof
from bagua.net.bench.traffic import Traffic, TrafficMeter
from bagua.net.compare.command_run import CommandRun, RunError
from bagua.net.compare.rounds import Rounds, run_rounds
from bagua.net.compare.run_figure import RunFigure
from bagua.net.compare.setting import Setting, parse_setting
from bagua.net.compare.step_sources import WallTime, default_sources
from bagua.net.compare.verdict import Outcome, judge
from bagua.progress import Progress

WITHOUT, WITH = Setting("NCCL", {}, plugin=False), Setting("Bagua-Net", {}, plugin=True)
SOCKET = NetworkProof(network="Socket", transports=("NET/Socket/0",))
OURS = NetworkProof(network="BaguaNet", transports=("NET/BaguaNet/0",))


def rounds_of(
    before: Sequence[float], after: Sequence[float], proofs: tuple[NetworkProof, NetworkProof] = (SOCKET, OURS)
) -> Rounds:
    found = Rounds(source=WallTime())
    for setting, times, proof in ((WITHOUT, before, proofs[0]), (WITH, after, proofs[1])):
        for number, seconds in enumerate(times):
            found.runs.append(CommandRun(setting, number, 9.0, [], (proof,), wrote_nccl_log=True))
            found.figures.append(RunFigure(seconds, 10))
    return found


@pytest.mark.parametrize(
    ("after", "outcome", "said"),
    [
        ([0.5, 0.4, 0.5], Outcome.FASTER, "Bagua-Net is faster than NCCL: 2.000x (spread 2.000..2.500 over 3 rounds)"),
        ([2.0, 2.0, 4.0], Outcome.SLOWER, "steps take 2.000x as long (spread 2.000..4.000 over 3 rounds)"),
        ([0.9, 1.1, 1.0], Outcome.NO_DIFFERENCE, "No difference between Bagua-Net and NCCL"),
        ([1.0, 1.0, 1.0], Outcome.NO_DIFFERENCE, "spread 1.000..1.000"),
        ([0.5, 0.5], Outcome.TOO_FEW_ROUNDS, "2 of at least 3 rounds"),
        ([], Outcome.TOO_FEW_ROUNDS, "0 of at least 3 rounds"),
    ],
)
def test_the_verdict_follows_the_rounds(after: list[float], outcome: Outcome, said: str) -> None:
    verdict = judge(rounds_of([1.0] * 3, after), WITHOUT, WITH)
    assert verdict.outcome is outcome
    assert said in verdict.headline


def test_drift_of_the_machine_is_no_difference_between_the_settings() -> None:
    assert judge(rounds_of([1.0, 2.0, 4.0], [0.5, 1.0, 2.0]), WITHOUT, WITH).outcome is Outcome.FASTER


@pytest.mark.parametrize(
    ("proofs", "outcome", "headline", "reason"),
    [
        ((None, None), Outcome.NCCL_NOT_USED, "NCCL was not used: no plugin can change this job.", ""),
        ((SOCKET, SOCKET), Outcome.PLUGIN_NOT_USED, "NCCL used Socket", "bagua-net doctor"),
        ((OURS, OURS), Outcome.PLUGIN_IN_BOTH, "", ""),
        (tuple(replace(one, transports=("P2P/CUMEM",)) for one in (SOCKET, OURS)), Outcome.NO_TRAFFIC, "", "P2P/CUMEM"),
    ],
)
def test_runs_that_compare_nothing(
    proofs: tuple[NetworkProof, NetworkProof], outcome: Outcome, headline: str, reason: str
) -> None:
    found = rounds_of([1.0] * 3, [0.5] * 3, proofs)
    if proofs[0] is None:
        found.runs = [replace(run, proofs=(), wrote_nccl_log=False) for run in found.runs]
    verdict = judge(found, WITHOUT, WITH)
    assert verdict.outcome is outcome
    assert headline in verdict.headline
    assert reason in verdict.reasons[0]
    assert verdict.ratio is not None, "the times were taken nevertheless"


def test_settings_that_do_not_name_the_plugin_are_compared_without_nccl() -> None:
    found = rounds_of([1.0] * 3, [0.5] * 3)
    plain = [replace(one, plugin=None) for one in (WITHOUT, WITH)]
    found.runs = [
        replace(run, setting=plain[run.setting is WITH], proofs=(), wrote_nccl_log=False) for run in found.runs
    ]
    verdict = judge(found, *plain)
    assert verdict.outcome is Outcome.FASTER
    assert "NCCL was not used: no plugin can change this job." in verdict.reasons


def test_why_there_is_no_difference() -> None:
    found = rounds_of([1.0] * 3, [1.0] * 3)
    hidden = "step 200 ms; communication 50 ms, of which exposed 1 ms (0 % of the step); 1 MiB in 1 bucket"
    full = Traffic("eth0", 10**10, 1.2e9, 1.25e9)
    found.runs = [replace(run, lines=[hidden], traffic=full) for run in found.runs]
    verdict = judge(found, WITHOUT, WITH)
    assert [reason.split(":")[0] for reason in verdict.reasons] == [
        "Communication is hidden behind computation",
        "The network is saturated",
    ]
    assert "eth0 carried up to 9.6 of its 10 Gb/s" in verdict.reasons[1]
    found.runs[-1] = replace(found.runs[-1], traffic=replace(full, peak_bytes_per_s=1.0e9))
    assert len(judge(found, WITHOUT, WITH).reasons) == 1, "one run has left the network room"
    assert judge(rounds_of([1.0] * 3, [1.0] * 3), WITHOUT, WITH).reasons == ()


def test_the_meter_finds_the_busiest_interface_and_its_busiest_second() -> None:
    counted = iter(
        [
            {("eth0", "sent"): 0, ("eth0", "received"): 0, ("lo", "sent"): 0},
            {("eth0", "sent"): 100, ("eth0", "received"): 10, ("lo", "sent"): 50},
            {("eth0", "sent"): 700, ("eth0", "received"): 20, ("lo", "sent"): 60},
            {("eth0", "sent"): 800, ("eth0", "received"): 30, ("lo", "sent"): 70},
        ]
    )
    meter = TrafficMeter(0.0, lambda: next(counted))
    meter.sample(0.5)  # too early: nothing is read
    meter.sample(1.0)
    meter.sample(3.0)
    assert meter.result(lambda _: None) == Traffic("eth0", 800, 300.0, None)


def test_a_run_without_traffic_makes_whole_runs_count() -> None:
    """One setting may keep ranks of one host off the network."""

    def runner(setting: Setting, number: int, _timeout_s: float, _on_line: object) -> CommandRun:
        return CommandRun(setting, number, 20.0, [], middle_s=8.0 if setting is WITHOUT else None)

    with Progress(1, quiet=True) as quiet:
        found = run_rounds([WITHOUT, WITH], 3, 1000.0, default_sources(), None, runner, quiet, lambda: 0.0)
    assert isinstance(found.source, WallTime)
    assert [figure.seconds for _, figure in found.of(WITHOUT)] == [20.0] * 3


def test_a_folder_that_cannot_be_written_is_an_error_and_no_fault() -> None:
    def runner(*_: object) -> CommandRun:
        raise OSError(28, "No space left on device")

    with Progress(1, quiet=True) as quiet:
        found = run_rounds([WITHOUT, WITH], 3, 1000.0, [WallTime()], None, runner, quiet, lambda: 0.0)
    assert "No space left on device" in found.error


def played(times: dict[str, list[float]], order: list[str], clock: list[float]) -> Rounds:
    def runner(setting: Setting, number: int, _timeout_s: float, _on_line: object) -> CommandRun:
        order.append(setting.name[0])
        seconds = times[setting.name][number]
        if seconds < 0:
            raise RunError("it failed")
        clock[0] += seconds
        return CommandRun(setting, number, seconds, [])

    with Progress(1, quiet=True) as quiet:
        return run_rounds([WITHOUT, WITH], 4, 100.0, [WallTime()], None, runner, quiet, lambda: clock[0])


def test_settings_take_turns_in_both_orders() -> None:
    order: list[str] = []
    found = played({"NCCL": [1.0] * 4, "Bagua-Net": [2.0] * 4}, order, [0.0])
    assert "".join(order) == "NBBNNBBN"
    assert [figure.seconds for _, figure in found.of(WITH)] == [2.0] * 4


def test_two_settings_of_one_name_are_two() -> None:
    """What differs where nothing does: `--with plugin --with plugin`."""
    twins = [Setting("Bagua-Net", {"TWIN": which}) for which in "ab"]

    def runner(setting: Setting, number: int, _timeout_s: float, _on_line: object) -> CommandRun:
        return CommandRun(setting, number, 1.0, [])

    with Progress(1, quiet=True) as quiet:
        found = run_rounds(twins, 2, 100.0, [WallTime()], None, runner, quiet, lambda: 0.0)
    assert [[run.setting for run, _ in found.of(one)] for one in twins] == [[one, one] for one in twins]


def test_no_round_begins_that_is_longer_than_what_is_left() -> None:
    found = played({"NCCL": [20.0] * 4, "Bagua-Net": [20.0] * 4}, [], [0.0])
    assert len(found.runs) == 4
    assert found.notes == ["2 of 4 rounds ran: another takes 40 s, and 20 s are left of --time-limit 100"]


def test_a_failure_ends_the_rounds_and_keeps_what_there_is() -> None:
    found = played({"NCCL": [1.0, 1.0, 1.0, -1.0], "Bagua-Net": [1.0] * 4}, [], [0.0])
    assert found.error == "it failed"
    assert judge(found, WITHOUT, WITH).ratio is not None


def test_settings_of_variables() -> None:
    base = {"ENABLE_BAGUA_NET": "1", "NCCL_NET": "baguanet", "BAGUA_NET_REQUIRED": "1", "X": "1"}
    without = parse_setting("no-plugin", base)
    assert without.environment == {"ENABLE_BAGUA_NET": "0", "X": "1"}
    assert parse_setting("no-plugin NCCL_NET=Socket", base).environment["NCCL_NET"] == "Socket"
    own = parse_setting("X=2 'Y=a b'", base)
    assert (own.environment["X"], own.environment["Y"], own.plugin) == ("2", "a b", None)
    assert parse_setting("X=2 plugin", {"ENABLE_BAGUA_NET": "0"}).environment["ENABLE_BAGUA_NET"] == "1"
    for text in ("", "bagua", "'X=1"):
        with pytest.raises(UsageError, match="--with"):
            parse_setting(text, base)
