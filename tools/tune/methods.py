"""Ways to search, each driven by drawn turns: Bagua's, the same without its cost model, and Optuna's."""

from __future__ import annotations

import importlib
import importlib.util
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bagua.engine.plan_tuner import STEPS_PER_TURN, WARMUP_STEPS
from bagua.tuning.search import Search
from bagua.tuning.setting import Setting, Turn
from tune.recorded_case import RecordedCase

Draw = Callable[[Setting], Turn]
_TURNS_OF_EACH = 7
# For a fair comparison Optuna's trials take about as many turns as Bagua's search before its paired test.
_TRIALS = 57


@dataclass(frozen=True)
class Found:
    setting: Setting
    steps: int


class _PairsAlone(Search):
    """Only the paired test of Bagua's search, for the setting that another method has found."""

    def __init__(self, settings: Sequence[Setting], candidate: Setting, seed: int) -> None:
        self._candidate = candidate
        super().__init__(settings, seed=seed)

    def _search(self) -> Any:
        outcome = yield from self._pairs(self._candidate)
        return outcome


def bagua(case: RecordedCase, draw: Draw, seed: int, with_model: bool = True) -> Found:
    return _drive(Search(case.settings, case.layout if with_model else None, seed=seed), draw)


def without_model(case: RecordedCase, draw: Draw, seed: int) -> Found:
    return bagua(case, draw, seed, with_model=False)


def optuna(case: RecordedCase, draw: Draw, seed: int) -> Found:
    """Its default, TPE (Bergstra et al., 2011), over the same settings; then Bagua's paired test."""
    package: Any = importlib.import_module("optuna")
    package.logging.set_verbosity(package.logging.ERROR)
    study = package.create_study(sampler=package.samplers.TPESampler(seed=seed))
    algorithms = sorted({one.algorithm for one in case.settings})
    sizes = sorted({one.bucket_bytes or 0 for one in case.settings})
    known = set(case.settings)
    turns = 0
    while turns < _TRIALS:
        trial = study.ask()
        algorithm = trial.suggest_categorical("algorithm", algorithms)
        size = sizes[trial.suggest_int("size", 0, len(sizes) - 1)]
        first = trial.suggest_categorical("first", [False, True])
        setting = _nearest(algorithm, size, first, known, case.settings[0])
        trial.set_user_attr("setting", setting.as_tuple())
        study.tell(trial, draw(setting).step_s)
        turns += 1
    candidate = Setting.from_json(study.best_trial.user_attrs["setting"])
    if candidate == case.settings[0]:
        return Found(candidate, WARMUP_STEPS + turns * (1 + STEPS_PER_TURN))
    found = _drive(_PairsAlone(case.settings, candidate, seed), draw)
    return Found(found.setting, found.steps + turns * (1 + STEPS_PER_TURN))


def _nearest(algorithm: str, size: int, first: bool, known: set[Setting], default: Setting) -> Setting:
    first_bytes = (1 << 20) if first else None
    for one in (Setting(algorithm, size or None, first_bytes), Setting(algorithm, size or None, None)):
        if one in known:
            return one
    return Setting(algorithm, default.bucket_bytes, default.first_bucket_bytes)


def _drive(search: Search, draw: Draw) -> Found:
    turns = 0
    while search.outcome is None:
        turns += len(search.turns)
        search.end_repetition({one: draw(one) for one in search.turns})
    return Found(search.outcome.setting, WARMUP_STEPS + turns * (1 + STEPS_PER_TURN))


def every_setting(case: RecordedCase, draw: Draw, _seed: int) -> Found:
    """The shortest median of some turns of each, without a test: how well one can tell the settings apart."""
    turns = {one: [draw(one).step_s for _ in range(_TURNS_OF_EACH)] for one in case.settings}
    best = min(turns, key=lambda one: statistics.median(turns[one]))
    return Found(best, WARMUP_STEPS + len(turns) * _TURNS_OF_EACH * (1 + STEPS_PER_TURN))


def default(case: RecordedCase, _draw: Draw, _seed: int) -> Found:
    return Found(case.settings[0], 0)


METHODS: dict[str, Callable[[RecordedCase, Draw, int], Found]] = {
    "bagua": bagua,
    "bagua without its cost model": without_model,
    "optuna": optuna,
    "every setting 7 times": every_setting,
    "the default": default,
}


if importlib.util.find_spec("optuna") is None:  # no package of the repository needs it
    del METHODS["optuna"]


def draw_of(case: RecordedCase, seed: int, pauses: float, noise: float) -> Draw:
    generator = random.Random(seed)
    return lambda setting: case.draw(setting, generator, pauses, noise)
