"""The search for the fastest setting, on step times that are made up."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

import pytest

from bagua.tuning.cost_model import bucket_sizes
from bagua.tuning.search import MIN_GAIN, ModelLayout, Search
from bagua.tuning.setting import MIB, Bucket, Outcome, Remembered, Setting, Turn, settings_for

STEPS_PER_TURN = 3  # one of them is not counted
DEFAULT = Setting("plain", None, MIB)
LAYOUT = ModelLayout([MIB] * 40, 25 * MIB, starts_small=False)
SETTINGS = settings_for(40 * MIB, DEFAULT, ["short"])


def search(
    turn_of: Callable[[Setting], Turn], remembered: Remembered | None = None, layout: ModelLayout | None = LAYOUT
) -> tuple[Outcome, int]:
    """What is found, and after how many steps."""
    searching, turns = Search(SETTINGS, layout, remembered), 0
    while searching.outcome is None:
        order = searching.turns
        assert DEFAULT in order
        turns += len(order)
        searching.end_repetition({setting: turn_of(setting) for setting in order})
    return searching.outcome, turns * STEPS_PER_TURN


def turn_of_network(setting: Setting, latency_s: float, s_per_mib: float, compute_s: float = 0.1) -> Turn:
    """Gradients come at an even pace in the second half of the step; bytes of "short" take a quarter of the time."""
    s_per_mib *= 0.25 if setting.algorithm == "short" else 1.0
    limit = setting.bucket_bytes or 25 * MIB
    sizes = bucket_sizes(LAYOUT.tensor_bytes, limit, setting.first_bucket_bytes)
    buckets, done, end = [], 0, -math.inf
    for nbytes in sizes:
        done += nbytes
        ready = -0.5 * compute_s * (1 - done / (40 * MIB))
        seconds = latency_s + s_per_mib * nbytes / MIB
        end = max(end, ready) + seconds
        buckets.append(Bucket(nbytes, seconds, -ready))
    exposed = max(0.0, end)
    return Turn(compute_s + exposed, exposed, tuple(buckets))


def noisy(turn: Turn, generator: random.Random, noise: float) -> Turn:
    return dataclasses.replace(turn, step_s=turn.step_s * (1 + noise * generator.random()))


def test_the_settings() -> None:
    only = settings_for(300, DEFAULT)
    assert only == [DEFAULT, Setting("plain", MIB, None)], "all fits into one bucket"
    large = settings_for(1 << 40, DEFAULT, ["short"])
    assert large[0] == DEFAULT
    assert {Setting("plain", 25 * MIB, None), Setting("short", 25 * MIB, MIB), Setting("short", None, MIB)} < set(large)
    assert len(set(large)) == len(large)


@pytest.mark.parametrize(("latency_s", "s_per_mib"), [(1e-4, 1e-2), (0.02, 1e-3), (0.002, 3e-3)])
def test_what_is_fastest_in_a_network_is_found(latency_s: float, s_per_mib: float) -> None:
    """Within 5 %, also where the machine is as much slower for whole repetitions, and each step has some noise."""
    best = min(turn_of_network(one, latency_s, s_per_mib).step_s for one in SETTINGS)
    wrong = 0
    for seed in range(20):
        generator = random.Random(seed)
        outcome, steps = search(lambda one, g=generator: noisy(turn_of_network(one, latency_s, s_per_mib), g, 0.05))
        assert steps <= 295
        wrong += turn_of_network(outcome.setting, latency_s, s_per_mib).step_s > 1.05 * best
    assert wrong <= 1


def test_hidden_communication_ends_the_search() -> None:
    outcome, steps = search(lambda one: dataclasses.replace(turn_of_network(one, 0, 0), exposed_s=0.0))
    assert (outcome.setting, outcome.speedup) == (DEFAULT, 1.0)
    assert "nothing to gain" in outcome.reason
    assert steps <= 30


@pytest.mark.parametrize("layout", [LAYOUT, None])
def test_the_default_stays_where_nothing_is_faster(layout: ModelLayout | None) -> None:
    for seed in range(30):
        generator = random.Random(seed)
        outcome, steps = search(lambda _, g=generator: noisy(Turn(1.0, 0.5), g, 0.03), layout=layout)
        assert (outcome.setting, outcome.speedup) == (DEFAULT, 1.0)
        assert steps <= 295
    outcome, compared = search(lambda one: Turn(1.0 if one == DEFAULT else 1 - MIN_GAIN / 2, 0.5))
    assert outcome.setting == DEFAULT, "too little to tell from noise"
    outcome, steps = search(lambda one: Turn(1.0 if one == DEFAULT else 1.1, 0.5))
    assert outcome.setting == DEFAULT
    assert steps < compared, "nothing is compared in pairs with what is slower"


@pytest.mark.parametrize("slow", ["short", "plain"])
def test_a_pause_does_not_decide(slow: str) -> None:
    """One turn of the fastest, or of the default, took a hundred times as long, in the paired test or before."""
    fast = Setting("short", 10 * MIB, None)
    for number in (3, 9):
        turns: dict[Setting, int] = {}

        def turn_of(setting: Setting, number: int = number, turns: dict[Setting, int] = turns) -> Turn:
            turns[setting] = turns.get(setting, 0) + 1
            pause = setting in (fast, DEFAULT) and setting.algorithm == slow and turns[setting] == number
            step_s = 0.8 if setting == fast else 1.0 if setting.algorithm == "plain" else 0.95
            return Turn(step_s * (100 if pause else 1), 0.5)

        outcome, _ = search(turn_of, layout=None)
        assert outcome.setting == fast


def test_what_was_found_before_is_checked() -> None:
    fast = Setting("short", None, MIB)
    remembered = Remembered(fast, 1.0, 0.5)
    outcome, steps = search(lambda one: Turn(0.5 if one == fast else 1.0, 0.5), remembered)
    assert (outcome.setting, outcome.is_check, steps) == (fast, True, 30)
    assert outcome.speedup == pytest.approx(2)
    outcome, steps = search(lambda one: Turn(2.0 if one == fast else 1.0, 0.5), remembered)
    assert (outcome.setting, outcome.is_check) == (DEFAULT, False)


@pytest.mark.parametrize(
    ("step_s", "exposed_s", "is_same"), [(1.1, 0.5, True), (1.0, 0.2, False), (2.0, 0.5, False), (1.0, math.nan, False)]
)
def test_that_the_default_was_best_is_checked(step_s: float, exposed_s: float, is_same: bool) -> None:
    outcome, steps = search(lambda _: Turn(step_s, exposed_s), Remembered(DEFAULT, 1.0, 0.5))
    assert (outcome.setting, outcome.is_check) == (DEFAULT, is_same)
    assert (steps == 12) == is_same


def test_there_may_be_no_choice() -> None:
    assert Search([DEFAULT]).outcome == Outcome(DEFAULT, 1.0, "there is no other setting")
