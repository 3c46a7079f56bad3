"""The search for the fastest buckets, on step times that are made up."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from bagua.engine.bucket_search import MIN_GAIN, BucketSearch, Outcome, Setting, settings_for
from bagua.engine.bucket_tuner import STEPS_PER_TURN, WARMUP_STEPS

MIB = 1 << 20
DEFAULT = Setting(None, MIB)


def search(settings: list[Setting], seconds_of: Callable[[Setting], float]) -> tuple[Outcome, int]:
    """What is found, and after how many steps."""
    searching, turns = BucketSearch(settings), 0
    while searching.outcome is None:
        order = searching.next_repetition()
        assert DEFAULT in order
        turns += len(order)
        searching.end_repetition({setting: seconds_of(setting) for setting in order})
    return searching.outcome, WARMUP_STEPS + turns * (1 + STEPS_PER_TURN)


def test_the_settings() -> None:
    assert settings_for(300, DEFAULT) == [DEFAULT, Setting(MIB, None)], "all fits into one bucket"
    large = settings_for(1 << 40, DEFAULT)
    assert large[0] == DEFAULT
    assert Setting(25 * MIB, None) in large
    assert Setting(25 * MIB, MIB) in large
    assert len(set(large)) == len(large)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_faster_one_is_found(noise: float) -> None:
    """Also where the machine is as much slower for whole repetitions, and each step has some noise."""
    settings = settings_for(1 << 30, DEFAULT)
    right = 0
    for seed in range(50):
        generator = random.Random(seed)
        best = generator.choice(settings[1:])

        def seconds_of(setting: Setting, best: Setting = best, generator: random.Random = generator) -> float:
            return (0.8 if setting == best else 1.0) * (1 + noise * generator.random())

        outcome, steps = search(settings, seconds_of)
        assert steps <= 300
        assert outcome.tried == len(settings)
        right += outcome.setting == best
        if not noise:
            assert outcome.speedup == pytest.approx(1.25)
    assert right >= (50 if not noise else 48)


def test_the_default_stays_where_nothing_is_faster() -> None:
    settings = settings_for(1 << 30, DEFAULT)
    for seed in range(50):
        generator = random.Random(seed)
        outcome, _ = search(settings, lambda _, generator=generator: 1 + 0.03 * generator.random())
        assert outcome == Outcome(DEFAULT, 1.0, len(settings))
    outcome, _ = search(settings, lambda setting: 1.0 if setting == DEFAULT else 1 - MIN_GAIN / 2)
    assert outcome.setting == DEFAULT, "too little to tell from noise"


def test_there_may_be_no_choice() -> None:
    assert BucketSearch([DEFAULT]).outcome == Outcome(DEFAULT, 1.0, 1)
