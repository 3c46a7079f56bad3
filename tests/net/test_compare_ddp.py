"""The figures of tools/train/compare_ddp.py: losses, step times, the best tuned setting, rounds. Runs are played; real
ones are in test_bench_nccl_training.py."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools" / "train"))

from ddp_comparison.figure import write_figure
from ddp_comparison.losses import DEFAULT_TOLERANCE, judge_losses
from ddp_comparison.options import bagua_net_by_activation, parse_arguments
from ddp_comparison.report import closing_lines, render
from ddp_comparison.rounds import Rounds, run_rounds
from ddp_comparison.step_times import StepReport, report_steps
from ddp_comparison.training_run import RunError, Training

from bagua.net.bench.nccl_ab.backend import Backend, hand_tuned, own_transport

DEFAULT, OURS = own_transport(), bagua_net_by_activation()
TUNED = [hand_tuned("2x4"), hand_tuned("4x1")]


def training(backend: str, losses: list[float], round_number: int = 0) -> Training:
    return Training(backend, round_number, losses, [0.1] * len(losses), 320.0, True, 1.0)


def timed(backend: Backend, step_s: float, round_number: int = 0) -> Training:
    # The first five steps are not looked at.
    steps = [9.0] * 5 + [step_s] * 5
    return Training(backend.name, round_number, [2.0] * 10, steps, 32 / step_s, True, 10.0)


def test_one_different_loss_is_a_failure_that_says_by_how_much() -> None:
    runs = [
        training("NCCL default", [2.0, 1.0, 0.5]),
        training("bagua-net", [2.0, 1.0, 0.5]),
        training("bagua-net", [2.0, 1.0, 0.5001], 1),
    ]
    verdict = judge_losses(runs, "NCCL default", 0.0)
    (failure,) = verdict.failures
    assert "bagua-net" in failure
    assert "by 5e-05" in failure
    assert judge_losses(runs[:2], "NCCL default", 0.0).failures == []
    assert judge_losses(runs, "NCCL default", 1e-3).failures == []


def test_the_spread_of_the_default_is_allowed_to_us_too() -> None:
    runs = [
        training("NCCL default", [2.0, 1.0]),
        training("NCCL default", [2.0, 1.1], 1),
        training("bagua-net", [2.0, 1.05]),
        training("other", [2.0, 1.2]),
    ]
    verdict = judge_losses(runs, "NCCL default", 0.0)
    assert verdict.own_spread == pytest.approx(0.05)
    assert [failure.split()[2] for failure in verdict.failures] == ["other"]


@pytest.mark.parametrize("place", [0, 1])
def test_a_loss_that_is_not_a_number_is_never_equal(place: int) -> None:
    ours = [[2.0, 1.0], [2.0, 1.0]]
    ours[place] = [2.0, math.nan]
    runs = [training("NCCL default", [2.0, 1.0])]
    runs += [training("bagua-net", losses, number) for number, losses in enumerate(ours)]
    assert len(judge_losses(runs, "NCCL default", 0.02).failures) == 1


def test_speedups_are_medians_over_the_steady_steps() -> None:
    slow, fast = timed(DEFAULT, 0.4), timed(OURS, 0.1)
    fast.step_seconds[-1] = 5.0
    steps = report_steps([slow, fast], [DEFAULT, OURS])
    assert [row.step_ms for row in steps.rows] == [pytest.approx(400), pytest.approx(100)]
    assert [row.speedup for row in steps.rows] == [1.0, pytest.approx(4.0)]
    assert [row.speedup_over_best for row in steps.rows] == [None, None]
    assert steps.best_tuned is None


def two_rounds() -> StepReport:
    runs = []
    for number, (default, wide, threads, ours) in enumerate([(0.4, 0.2, 0.3, 0.1), (0.4, 0.24, 0.1, 0.12)]):
        runs += [timed(DEFAULT, default, number), timed(TUNED[0], wide, number)]
        runs += [timed(TUNED[1], threads, number), timed(OURS, ours, number)]
    # Medians over both rounds: 0.22 of t2s4, 0.2 of t4s1.
    return report_steps(runs, [DEFAULT, *TUNED, OURS])


def test_best_tuned_is_that_of_the_least_median_and_is_paired_by_round() -> None:
    steps = two_rounds()
    assert steps.best_tuned == "NCCL t4s1"
    assert [(speedup.baseline, speedup.backend) for speedup in steps.speedups] == [
        ("NCCL default", "NCCL default"),
        ("best tuned", "NCCL t4s1"),
    ]
    ratio = steps.speedups[1].ratio
    assert (ratio.low, ratio.high) == pytest.approx((0.1 / 0.12, 3.0))
    (ours,) = (row for row in steps.rows if row.backend == "bagua-net")
    assert ours.speedup_over_best == pytest.approx(0.2 / 0.11)


def test_the_report_shows_both_speedups() -> None:
    steps = two_rounds()
    lines = render(steps, None).splitlines()
    assert lines[0].split() == [
        *("backend", "step", "ms", "samples/s", "over", "default", "over", "best", "first", "loss", "last", "loss"),
        *("loss", "diff"),
    ]
    assert lines[4].split()[:5] == ["bagua-net", "110.00", "293.3", "3.64x", "1.82x"]
    closing = closing_lines(steps, None, Rounds(errors=["something broke"], notes=["a note"]))
    assert closing[0].startswith("bagua-net over NCCL default: too few iterations for a verdict (2 of 3 repetitions)")
    assert closing[1].startswith("bagua-net over best tuned (NCCL t4s1): too few iterations")
    assert closing[-2:] == ["note: a note", "ERROR: something broke"]


def test_a_setting_that_failed_on_the_way_is_not_the_best() -> None:
    runs = [timed(one, 0.4, number) for one in (DEFAULT, TUNED[0], OURS) for number in (0, 1)]
    assert report_steps([*runs, timed(TUNED[1], 0.1)], [DEFAULT, *TUNED, OURS]).best_tuned == "NCCL default"


def test_without_the_default_nothing_is_compared_with_it() -> None:
    steps = report_steps([timed(TUNED[0], 0.2), timed(OURS, 0.1)], [DEFAULT, *TUNED, OURS])
    assert [row.speedup for row in steps.rows] == [None, None]
    assert steps.speedups == []


def test_nothing_ran_and_the_report_says_so_without_a_fault() -> None:
    steps = report_steps([], [DEFAULT, *TUNED, OURS])
    assert (steps.rows, steps.best_tuned, steps.speedups) == ([], None, [])
    assert render(steps, None).count("\n") == 0


def test_two_ranks_have_to_agree_exactly_and_more_within_rounding(tmp_path: Path) -> None:
    words = ["--output-dir", str(tmp_path), "--nproc-per-node"]
    assert parse_arguments([*words, "2"]).tolerance == 0.0
    assert parse_arguments([*words, "4"]).tolerance == DEFAULT_TOLERANCE


def test_ours_is_switched_on_by_the_variable_alone(tmp_path: Path) -> None:
    arguments = parse_arguments(["--output-dir", str(tmp_path)])
    assert [backend.name for backend in arguments.backends] == ["NCCL default", "NCCL t2s2 8ch", "bagua-net"]
    assert arguments.backends[-1].settings == {"ENABLE_BAGUA_NET": "1"}
    assert arguments.backends[-1].network == "BaguaNet"


def test_tuned_takes_several_settings_and_best(tmp_path: Path) -> None:
    words = ["--output-dir", str(tmp_path), "--tuned"]
    assert len(parse_arguments([*words, "best"]).backends) == 10
    names = [backend.name for backend in parse_arguments([*words, "2x4,4x1"]).backends]
    assert names == ["NCCL default", "NCCL t2s4", "NCCL t4s1", "bagua-net"]
    assert len(parse_arguments([*words, "none"]).backends) == 2


class PlayedTraining:
    def __init__(self, seconds: Mapping[str, float], breaks: tuple[str, int] | None = None) -> None:
        self.now = 0.0
        self.order: list[tuple[int, str]] = []
        self._seconds = seconds
        self._breaks = breaks

    def __call__(
        self,
        backend: Backend,
        round_number: int,
        arguments: argparse.Namespace,
        inherited: Mapping[str, str],
        *,
        timeout_s: float,
    ) -> Training:
        if self._breaks == (backend.name, round_number):
            raise RunError(f"{backend.name}, round {round_number}: exit code 1")
        self.order.append((round_number, backend.name))
        self.now += self._seconds[backend.name]
        return timed(backend, 0.1, round_number)


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., tuple[PlayedTraining, Rounds]]:
    def run(time_limit: float, breaks: tuple[str, int] | None = None) -> tuple[PlayedTraining, Rounds]:
        words = ["--tuned", "2x4", "--rounds", "3", "--backend", "gloo", "--time-limit", str(time_limit)]
        played = PlayedTraining({"NCCL default": 30.0, "NCCL t2s4": 20.0, "bagua-net": 10.0}, breaks)
        arguments = parse_arguments([*words, "--output-dir", str(tmp_path)])
        return played, run_rounds(arguments, played, lambda: played.now)

    return run


def test_each_round_begins_with_another_backend(play: Callable[..., tuple[PlayedTraining, Rounds]]) -> None:
    played, rounds = play(1000.0)
    assert [name for _, name in played.order[::3]] == ["NCCL default", "NCCL t2s4", "bagua-net"]
    assert len(rounds.trainings) == 9
    assert (rounds.errors, rounds.notes) == ([], [])


def test_a_round_that_would_be_cut_short_is_not_begun(play: Callable[..., tuple[PlayedTraining, Rounds]]) -> None:
    played, rounds = play(170.0)
    assert [number for number, _ in played.order] == [0, 0, 0, 1, 1, 1]
    assert rounds.errors == []
    assert rounds.notes == ["2 of 3 rounds ran: another needs 60 s, and of --time-limit 170 s 50 are left"]


def test_a_limit_within_the_first_round_is_an_error(play: Callable[..., tuple[PlayedTraining, Rounds]]) -> None:
    _, rounds = play(45.0)
    assert rounds.errors == ["--time-limit 45 s: round 0 of bagua-net not run"]


def test_a_backend_that_fails_is_left_out(play: Callable[..., tuple[PlayedTraining, Rounds]]) -> None:
    played, rounds = play(1000.0, ("NCCL t2s4", 1))
    assert rounds.errors == ["NCCL t2s4, round 1: exit code 1"]
    assert [name for _, name in played.order].count("NCCL t2s4") == 1
    assert [name for _, name in played.order].count("bagua-net") == 3


@pytest.mark.parametrize("settings", [["2x4"], ["2x4", "4x1", "1x2x8", "2x2x8"]])
def test_the_figure_is_drawn_with_few_and_with_many_backends(tmp_path: Path, settings: list[str]) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install bagua[plot]")
    backends = [DEFAULT, *map(hand_tuned, settings), OURS]
    runs = [timed(backend, 0.1 * (place + 1)) for place, backend in enumerate(backends)]
    path = tmp_path / "ddp.svg"
    write_figure(path, runs, backends, report_steps(runs, backends).best_tuned, "a title", "a machine")
    text = path.read_text()
    assert ("other hand-tuned settings" in text) == (len(settings) > 1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--steps", "0"], "--steps: 0 is outside 1..100000"),
        (["--image-size", "0"], "--image-size: 0 is outside 1..65536"),
        (["--tolerance", "nan"], "--tolerance: nan is outside 0.0..10.0"),
        (["--run-timeout", "0"], "--run-timeout: 0 is outside 1.0..86400.0"),
        (["--time-limit", "-1"], "--time-limit: -1 is outside 1.0..86400.0"),
        (["--output-dir", "/dev/null/out"], "--output-dir '/dev/null/out' cannot be created (Not a directory)"),
    ],
)
def test_errors_name_value_and_remedy(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["--output-dir", str(tmp_path), *words])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
