"""The search of autotune=True on recorded turns, many times: a turn of a setting takes its true time and the noise of a
recorded one, and now and then a pause is in it. `recordings` has turns of all settings in emulated networks."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch, which bagua.engine imports")

from bagua.engine.bucket_plan import DEFAULT_BUCKET_BYTES_ON_CPU
from bagua.engine.plan_tuner import STEPS_PER_TURN, WARMUP_STEPS
from bagua.tuning.search import ModelLayout, Search
from bagua.tuning.setting import Bucket, Setting, Turn

RECORDINGS = Path(__file__).parent / "recordings"
PAUSES, PAUSE = 0.02, 10.0  # the part of turns that have one, and how many times as long they take
SEEDS = 20


class RecordedCase:
    """
    Attributes:
        settings: the default first.
        step_s: of each setting, in a repetition of medium speed: what is true here.
    """

    def __init__(self, path: Path) -> None:
        document = json.loads(path.read_text(encoding="utf-8"))
        self.layout = ModelLayout(document["tensor_bytes"], DEFAULT_BUCKET_BYTES_ON_CPU, starts_small=False)
        self._turns: dict[Setting, list[Turn]] = {Setting.from_json(document["default"]): []}
        for setting, turn in document["turns"]:
            buckets = tuple(Bucket(*bucket) for bucket in turn["buckets"])
            turns = self._turns.setdefault(Setting.from_json(setting), [])
            turns.append(Turn(turn["step_s"], turn["exposed_s"], buckets))
        self.settings = list(self._turns)
        # The machine may be faster in one repetition than in another: what counts is how a turn compares with those of
        # its repetition.
        levels = [statistics.median(turn.step_s for turn in turns) for turns in zip(*self._turns.values(), strict=True)]
        level = statistics.median(levels)
        self.step_s = {
            one: level * statistics.median(turn.step_s / now for turn, now in zip(turns, levels, strict=True))
            for one, turns in self._turns.items()
        }
        # How far turns are from that: of all settings, for a few turns alone say little.
        self._noise = [
            turn.step_s / now * level / self.step_s[one]
            for one, turns in self._turns.items()
            for turn, now in zip(turns, levels, strict=True)
        ]

    def search(self, seed: int) -> tuple[Setting, int]:
        """What is chosen, and after how many steps."""
        generator = random.Random(seed)
        searching, turns = Search(self.settings, self.layout, seed=seed), 0
        while searching.outcome is None:
            turns += len(searching.turns)
            searching.end_repetition({one: self._draw(one, generator) for one in searching.turns})
        return searching.outcome.setting, WARMUP_STEPS + turns * (1 + STEPS_PER_TURN)

    def _draw(self, setting: Setting, generator: random.Random) -> Turn:
        noise = generator.choice(self._noise) * (PAUSE if generator.random() < PAUSES else 1.0)
        return replace(generator.choice(self._turns[setting]), step_s=self.step_s[setting] * noise)


@pytest.fixture(scope="module")
def cases() -> Sequence[RecordedCase]:
    return [RecordedCase(path) for path in sorted(RECORDINGS.glob("tuning-*.json"))]


def test_what_is_chosen_is_nearly_the_best_and_never_slower_than_the_default(cases: Sequence[RecordedCase]) -> None:
    regrets, losses, steps = [], [], []
    for case in cases:
        default = case.step_s[case.settings[0]]
        assert default > 2 * min(case.step_s.values()), "there is something to find"
        for seed in range(SEEDS):
            setting, taken = case.search(seed)
            regrets.append(case.step_s[setting] / min(case.step_s.values()) - 1)
            losses.append(case.step_s[setting] / default - 1)
            steps.append(taken)
    close = sum(regret <= 0.05 for regret in regrets)
    assert close >= 0.85 * len(regrets), (
        f"within 5 % of the best in {close} of {len(regrets)}; {max(regrets):.0%} over it"
    )
    assert max(losses) <= 0.02, "slower than the default"
    assert max(steps) <= 295, "so long does the documentation let the search take"
