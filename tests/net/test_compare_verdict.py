"""`bagua-net compare`: where the times of steps come from, and what the runs mean."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from bagua.net.bench.nccl_log import NetworkProof
from bagua.net.bench.traffic import Traffic, TrafficMeter
from bagua.net.compare import job_traffic
from bagua.net.compare.command_run import CommandRun, RunError
from bagua.net.compare.job_traffic import JobTraffic, bytes_of_connections, sockets_of
from bagua.net.compare.rounds import Rounds, RunFigure, figure_of, run_rounds
from bagua.net.compare.setting import Setting, parse_setting
from bagua.net.compare.step_sources import StepSource, WallTime, choose_source, default_sources, source_of_pattern
from bagua.net.compare.verdict import Outcome, judge
from bagua.progress import Progress

WITHOUT, WITH = Setting("NCCL", {}, plugin=False), Setting("Bagua-Net", {}, plugin=True)
SOCKET = NetworkProof(network="Socket", transports=("NET/Socket/0",))
OURS = NetworkProof(network="BaguaNet", transports=("NET/BaguaNet/0",))

# --- times of steps ---------------------------------------------------------------------------------------------------


def chosen(run: CommandRun) -> StepSource:
    return choose_source(default_sources(), run)


def a_run(lines: Sequence[str]) -> CommandRun:
    return CommandRun(WITHOUT, 0, 60.0, lines)


def test_common_forms() -> None:
    for line, seconds in (
        ("step_time 12.5 ms", 0.0125),
        ("epoch 1 | step time: 250ms | loss 2.31", 0.25),
        ("iter_time=0.5 loss=1.0", 0.5),
        ("loss 2.5, time per step 1.5e-1 s", 0.15),
        ("rank 0: 12.5 ms/step, loss 3.0", 0.0125),
        ("  3%|#         | 3/100 [00:04<02:30,  2.00it/s, loss=3.1]", 0.5),
        ("  3%|#         | 3/100 [00:04<02:30,  1.25s/it]", 1.25),
        ("throughput 4 steps/s", 0.25),
        (" iteration 100/500 | elapsed time per iteration (ms): 123.0 | lm loss: 6.4", 0.123),
        ("step   7  loss 0.701156     100.5 ms", 0.1005),
        ("[step 7] loss 0.7 took 1.5 s", 1.5),
        ("iter 7, 1000.0 samples/s", 0.001),
        ("2,000 of 9,000: 250 tokens/sec", 0.004),
        ('{"step": 7, "step_time_ms": 12.5, "loss": 0.5}', 0.0125),
        ('INFO {"train/iteration_time": 0.5, "loss": 0.5}', 0.5),
        ('{"time_per_step": 2, "unit": "s"}', 2.0),
    ):
        run = a_run(["starting", line, line, line, "done in 3 minutes"])
        assert list(chosen(run).read(run).seconds) == [pytest.approx(seconds)] * 3, line


def test_other_numbers_are_not_times() -> None:
    for line in (
        "median step 12.34 ms of all ranks",
        "loaded 4 shards in 12.5 s",
        "step 7 loss 0.5",
        '{"step_time": "fast"}',
        '{"step_time": NaN}',
        '{"step_time": -0.5}',
        '{"step_time": 1e999}',
        '{"step_time": 1' + "0" * 400 + "}",
        "step 0 ms; communication 0 ms, of which exposed 0 ms",
        '{"step": 12}',
        "{" * 5000 + "}",
        '{"a":' * 5000 + "1" + "}" * 5000,
    ):
        assert isinstance(chosen(a_run([line] * 5)), WallTime), line[:100]


def test_printed_statistics_are_summaries_of_which_the_last_counts() -> None:
    line = "step {} ms; communication 161 ms, of which exposed 87.7 ms (47 % of the step); 32 MiB in 2 buckets"
    run = a_run([line.format(300), line.format(185)])
    assert chosen(run).name == "`bagua_ddp.stats()`"
    assert figure_of(chosen(run), run, warmup=1).seconds == pytest.approx(0.185)


def test_without_step_times_the_traffic_or_whole_runs_are_compared_with_a_warning() -> None:
    run = a_run(["hello"])
    assert figure_of(chosen(run), run, None).seconds == 60.0
    assert "start-up" in chosen(run).caveat
    moving = replace(run, middle_s=8.0)
    assert figure_of(chosen(moving), moving, None).seconds == 8.0
    assert "leave start-up out" in chosen(moving).caveat
    # One printed figure says more.
    printed = replace(moving, lines=["3.4 it/s"])
    assert figure_of(chosen(printed), printed, None).seconds == pytest.approx(1 / 3.4)


@pytest.mark.parametrize(("first", "then", "steps", "dropped"), [(5, 20, 20, 5), (2, 4, 4, 2)])
def test_warm_up_steps_do_not_count_but_a_short_run_keeps_most_of_its_steps(
    first: int, then: int, steps: int, dropped: int
) -> None:
    run = a_run([f"took {time} ms" for time in [900.0] * first + [10.0] * then])
    figure = figure_of(source_of_pattern(r"took (\S+) ms", "ms"), run, None)
    assert (figure.seconds, figure.steps, figure.dropped) == (pytest.approx(0.01), steps, dropped)


@pytest.mark.parametrize(("unit", "seconds"), [("s", 4.0), ("ms", 0.004), ("us", 4e-6), ("it/s", 0.25)])
def test_a_pattern_of_the_users_own(unit: str, seconds: float) -> None:
    run = a_run(["speed: 4", "speed: fast", "speed: 0"])
    assert list(source_of_pattern(r"speed: (\w+)", unit).read(run).seconds) == [pytest.approx(seconds)]


# --- traffic ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_kernel_counts_the_bytes_of_a_connection(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with (
        socket.create_server((address, 0), family=family) as server,
        socket.create_connection(server.getsockname()[:2]) as one,
        server.accept()[0] as other,
    ):
        one.sendall(bytes(1000))
        other.recv(1000, socket.MSG_WAITALL)
        other.sendall(bytes(50))
        one.recv(50, socket.MSG_WAITALL)
        inodes = {os.fstat(end.fileno()).st_ino for end in (one, other)}
        assert inodes <= sockets_of([os.getpid()])
        counted = bytes_of_connections()
    # The last bytes may not be acknowledged yet.
    assert [counted[inode] >= 1000 for inode in inodes] == [True, True]


def middle_of(start_up_s: float, seconds: float, rate: int = 10 << 20) -> float | None:
    now = [0.0]

    def connections() -> Mapping[int, int]:
        """7 is replaced by 8 on the way, and that by another one of this number; each begins at 0. 9 is another
        command's."""
        carried = int(rate * min(max(now[0] - start_up_s, 0.0), seconds))
        number, carried = divmod(carried, int(rate * seconds / 3) + 1)
        return {7 if number == 0 else 8: carried, 9: int(now[0] * (1 << 30))} if now[0] < start_up_s + seconds else {}

    job = JobTraffic(1, 0.0, connections)
    while now[0] < start_up_s + seconds + 5:
        now[0] += 0.1
        job.sample(now[0])
    return job.middle_s()


def test_the_middle_of_the_traffic_has_no_start_up_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_traffic, "sockets_of", lambda _: {7, 8})
    monkeypatch.setattr(job_traffic, "descendants", lambda _: [])
    assert middle_of(3, 20) == pytest.approx(16.0, rel=0.05)
    assert middle_of(30, 20) == pytest.approx(16.0, rel=0.05)
    assert middle_of(100, 3000) == pytest.approx(2400.0, rel=0.01), "samples are thinned out"
    assert middle_of(3, 2) is None, "too short"
    assert middle_of(3, 20, rate=1 << 10) is None, "too little: it is not of training"


def test_the_meter_finds_the_busiest_interface_and_its_busiest_second() -> None:
    eth0, received, lo = ("eth0", "sent"), ("eth0", "received"), ("lo", "sent")
    counted = iter(
        {eth0: sent, received: 10 * second, lo: 20 * second} for second, sent in enumerate((0, 100, 700, 800))
    )
    meter = TrafficMeter(0.0, lambda: next(counted))
    for moment in (0.5, 1.0, 3.0):  # the first is too early: nothing is read
        meter.sample(moment)
    assert meter.result(lambda _: None) == Traffic("eth0", 800, 300.0, None)


# --- what runs mean ---------------------------------------------------------------------------------------------------


def rounds_of(
    before: Sequence[float], after: Sequence[float], proofs: tuple[NetworkProof | None, NetworkProof | None]
) -> Rounds:
    found = Rounds(source=WallTime())
    for setting, times, proof in ((WITHOUT, before, proofs[0]), (WITH, after, proofs[1])):
        logs = (proof,) if proof else ()
        for number, seconds in enumerate(times):
            found.runs.append(CommandRun(setting, number, 9.0, [], logs, wrote_nccl_log=bool(logs)))
            found.figures.append(RunFigure(seconds, 10))
    return found


@pytest.mark.parametrize(
    ("before", "after", "outcome", "said"),
    [
        ([1.0] * 3, [0.5, 0.4, 0.5], Outcome.FASTER, "is faster than NCCL: 2.000x (spread 2.000..2.500 over 3 rounds)"),
        ([1.0, 2.0, 4.0], [0.5, 1.0, 2.0], Outcome.FASTER, ""),  # the machine drifts
        ([1.0] * 3, [2.0, 2.0, 4.0], Outcome.SLOWER, "steps take 2.000x as long (spread 2.000..4.000 over 3 rounds)"),
        ([1.0] * 3, [0.9, 1.1, 1.0], Outcome.NO_DIFFERENCE, "No difference between Bagua-Net and NCCL"),
        ([1.0] * 3, [1.0, 1.0, 1.0], Outcome.NO_DIFFERENCE, "spread 1.000..1.000"),
        ([1.0] * 3, [0.5, 0.5], Outcome.TOO_FEW_ROUNDS, "2 of at least 3 rounds"),
        ([1.0] * 3, [], Outcome.TOO_FEW_ROUNDS, "0 of at least 3 rounds"),
    ],
)
def test_the_verdict_follows_the_rounds(before: list[float], after: list[float], outcome: Outcome, said: str) -> None:
    verdict = judge(rounds_of(before, after, (SOCKET, OURS)), WITHOUT, WITH)
    assert verdict.outcome is outcome
    assert said in verdict.headline


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
    proofs: tuple[NetworkProof | None, NetworkProof | None], outcome: Outcome, headline: str, reason: str
) -> None:
    verdict = judge(rounds_of([1.0] * 3, [0.5] * 3, proofs), WITHOUT, WITH)
    assert verdict.outcome is outcome
    assert headline in verdict.headline
    assert reason in verdict.reasons[0]
    assert verdict.ratio is not None, "the times were taken nevertheless"


def test_settings_that_do_not_name_the_plugin_are_compared_without_nccl() -> None:
    found = rounds_of([1.0] * 3, [0.5] * 3, (None, None))
    plain = [replace(one, plugin=None) for one in (WITHOUT, WITH)]
    found.runs = [replace(run, setting=plain[run.setting is WITH]) for run in found.runs]
    verdict = judge(found, *plain)
    assert verdict.outcome is Outcome.FASTER
    assert "NCCL was not used: no plugin can change this job." in verdict.reasons


def test_why_there_is_no_difference() -> None:
    found = rounds_of([1.0] * 3, [1.0] * 3, (SOCKET, OURS))
    assert judge(found, WITHOUT, WITH).reasons == ()
    hidden = "step 200 ms; communication 50 ms, of which exposed 1 ms (0 % of the step); 1 MiB in 1 bucket"
    full = Traffic("eth0", 10**10, 1.2e9, 1.25e9)
    found.runs = [replace(run, lines=[hidden], traffic=full) for run in found.runs]
    communication, network = judge(found, WITHOUT, WITH).reasons
    assert communication.startswith("Communication is hidden behind computation:")
    assert network.startswith("The network is saturated: eth0 carried up to 9.6 of its 10 Gb/s")
    found.runs[-1] = replace(found.runs[-1], traffic=replace(full, peak_bytes_per_s=1.0e9))
    assert len(judge(found, WITHOUT, WITH).reasons) == 1, "one run has left the network room"


def played(run: Callable[[Setting, int], CommandRun], *settings: Setting) -> Rounds:
    """Four rounds, in a time of their own."""
    clock = [0.0]

    def runner(setting: Setting, number: int, _timeout_s: float, _on_line: object) -> CommandRun:
        found = run(setting, number)
        clock[0] += found.wall_s
        return found

    with Progress(1, quiet=True) as quiet:
        return run_rounds(settings, 4, 100.0, default_sources(), None, runner, quiet, lambda: clock[0])


def test_settings_take_turns_in_both_orders() -> None:
    order: list[str] = []

    def run(setting: Setting, number: int) -> CommandRun:
        order.append(setting.name[0])
        # One setting may keep ranks of one host off the network, which makes whole runs count.
        return CommandRun(setting, number, 2.0, [], middle_s=1.0 if setting is WITHOUT else None)

    found = played(run, WITHOUT, WITH)
    assert "".join(order) == "NBBNNBBN"
    assert isinstance(found.source, WallTime)
    assert [figure.seconds for _, figure in found.of(WITHOUT)] == [2.0] * 4
    # What differs where nothing does: `--with plugin --with plugin`.
    twins = [Setting("Bagua-Net", {"TWIN": which}) for which in "ab"]
    found = played(lambda setting, number: CommandRun(setting, number, 1.0, []), *twins)
    assert [[run.setting for run, _ in found.of(one)] for one in twins] == [[one] * 4 for one in twins]


def test_rounds_end_with_the_time_and_with_a_failure_and_keep_what_there_is() -> None:
    found = played(lambda setting, number: CommandRun(setting, number, 20.0, []), WITHOUT, WITH)
    assert len(found.runs) == 4
    assert found.notes == ["2 of 4 rounds ran: another takes 40 s, and 20 s are left of --time-limit 100"]
    for error in (RunError("it failed"), OSError(28, "No space left on device")):

        def run(setting: Setting, number: int, error: Exception = error) -> CommandRun:
            if (setting, number) == (WITHOUT, 3):
                raise error
            return CommandRun(setting, number, 1.0, [])

        found = played(run, WITHOUT, WITH)
        assert (error.args[-1] in found.error, len(found.of(WITHOUT))) == (True, 3)
        assert judge(found, WITHOUT, WITH).ratio is not None


def test_settings_of_variables() -> None:
    base = {"ENABLE_BAGUA_NET": "1", "NCCL_NET": "baguanet", "BAGUA_NET_REQUIRED": "1", "X": "1"}
    assert parse_setting("no-plugin", base).environment == {"ENABLE_BAGUA_NET": "0", "X": "1"}
    assert parse_setting("no-plugin NCCL_NET=Socket", base).environment["NCCL_NET"] == "Socket"
    own = parse_setting("X=2 'Y=a b'", base)
    assert (own.environment["X"], own.environment["Y"], own.plugin) == ("2", "a b", None)
    assert parse_setting("X=2 plugin", {"ENABLE_BAGUA_NET": "0"}).environment["ENABLE_BAGUA_NET"] == "1"
