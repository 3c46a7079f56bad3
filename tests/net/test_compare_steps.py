"""`bagua-net compare`: where the times of steps come from, and the bytes of a command's own TCP connections."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from bagua.net.compare import job_traffic
from bagua.net.compare.command_run import CommandRun
from bagua.net.compare.job_traffic import JobTraffic, bytes_of_connections, sockets_of
from bagua.net.compare.run_figure import figure_of
from bagua.net.compare.setting import Setting
from bagua.net.compare.step_sources import (
    StepSource,
    WallTime,
    choose_source,
    default_sources,
    source_of_pattern,
)

SETTING = Setting("a", {})


def a_run(lines: Sequence[str], wall_s: float = 60.0) -> CommandRun:
    return CommandRun(SETTING, 0, wall_s, lines)


def chosen(lines: Sequence[str]) -> StepSource:
    return choose_source(default_sources(), a_run(lines))


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
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
    ],
)
def test_common_forms(line: str, seconds: float) -> None:
    lines = ["starting", line, line, line, "done in 3 minutes"]
    assert list(chosen(lines).read(a_run(lines)).seconds) == [pytest.approx(seconds)] * 3


@pytest.mark.parametrize(
    "line",
    [
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
    ],
)
def test_other_numbers_are_not_times(line: str) -> None:
    assert isinstance(chosen([line] * 5), WallTime)


def test_printed_statistics_are_summaries_of_which_the_last_counts() -> None:
    line = "step {} ms; communication 161 ms, of which exposed 87.7 ms (47 % of the step); 32 MiB in 2 buckets"
    run = a_run([line.format(300), line.format(185)])
    source = chosen(run.lines)
    assert source.name == "`bagua_ddp.stats()`"
    assert figure_of(source, run, warmup=1).seconds == pytest.approx(0.185)


def test_without_step_times_whole_runs_are_compared_with_a_warning() -> None:
    run = a_run(["hello"], wall_s=12.0)
    source = chosen(run.lines)
    assert figure_of(source, run, None).seconds == 12.0
    assert "start-up" in source.caveat


def test_without_step_times_the_traffic_tells_them() -> None:
    run = CommandRun(SETTING, 0, 60.0, ["hello"], middle_s=8.0)
    source = choose_source(default_sources(), run)
    assert figure_of(source, run, None).seconds == 8.0
    assert "leave start-up out" in source.caveat
    # One printed figure says more.
    printed = replace(run, lines=["3.4 it/s"])
    assert figure_of(choose_source(default_sources(), printed), printed, None).seconds == pytest.approx(1 / 3.4)


def test_warm_up_steps_do_not_count() -> None:
    source = source_of_pattern(r"took (\S+) ms", "ms")
    run = a_run([f"took {time} ms" for time in [900.0] * 5 + [10.0] * 20])
    assert figure_of(source, run, None).seconds == pytest.approx(0.01)
    assert (figure_of(source, run, None).steps, figure_of(source, run, None).dropped) == (20, 5)
    # A short run keeps most of its steps.
    short = a_run(["took 900 ms"] * 2 + ["took 10 ms"] * 4)
    assert (figure_of(source, short, None).steps, figure_of(source, short, None).dropped) == (4, 2)


def test_too_few_steps() -> None:
    source = source_of_pattern(r"took (\S+) ms", "ms")
    with pytest.raises(ValueError, match=r"a, round 1: too few steps: 2 found, and --warmup 5 drops them all"):
        figure_of(source, a_run(["took 1 ms"] * 2), 5)
    with pytest.raises(ValueError, match="no step times in its output"):
        figure_of(source, a_run(["nothing"]), None)


@pytest.mark.parametrize(("unit", "seconds"), [("s", 4.0), ("ms", 0.004), ("us", 4e-6), ("it/s", 0.25)])
def test_a_pattern_of_the_users_own(unit: str, seconds: float) -> None:
    run = a_run(["speed: 4", "speed: fast", "speed: 0"])
    assert list(source_of_pattern(r"speed: (\w+)", unit).read(run).seconds) == [pytest.approx(seconds)]


def test_a_pattern_that_finds_nothing_shows_the_output() -> None:
    with pytest.raises(ValueError, match=r"(?s)no step times found in 2 lines.*two"):
        choose_source([source_of_pattern("x(y)", "s")], a_run(["one", "two"]))


@pytest.mark.parametrize(
    ("pattern", "message"), [("(", "not a regular expression"), ("x", "0 groups"), ("(a)(b)", "2")]
)
def test_patterns_that_cannot_work(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        source_of_pattern(pattern, "s")


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


@pytest.fixture
def own_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_traffic, "sockets_of", lambda _: {7, 8})
    monkeypatch.setattr(job_traffic, "descendants", lambda _: [])


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


@pytest.mark.usefixtures("own_sockets")
def test_the_middle_of_the_traffic_has_no_start_up_in_it() -> None:
    assert middle_of(3, 20) == pytest.approx(16.0, rel=0.05)
    assert middle_of(30, 20) == pytest.approx(16.0, rel=0.05)
    assert middle_of(100, 3000) == pytest.approx(2400.0, rel=0.01), "samples are thinned out"
    assert middle_of(3, 2) is None, "too short"
    assert middle_of(3, 20, rate=1 << 10) is None, "too little: it is not of training"
