"""A recorded case, from which turns are drawn again."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bagua.engine.bucket_plan import DEFAULT_BUCKET_BYTES, DEFAULT_BUCKET_BYTES_ON_CPU
from bagua.tuning.search import ModelLayout
from bagua.tuning.setting import Bucket, Setting, Turn

_PAUSE = 10.0  # a turn with a pause takes so many times as long


class RecordedCase:
    """
    Attributes:
        document: as `record` has written it.
        settings: the default first.
        step_s: of each setting, in a repetition of medium speed: what is true in a simulation.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document
        self._turns: dict[Setting, list[Turn]] = {}
        default = Setting.from_json(document["default"])
        self._turns[default] = []
        for setting, turn in document["turns"]:
            self._turns.setdefault(Setting.from_json(setting), []).append(_turn(turn))
        self.settings = list(self._turns)
        # The machine may be faster in one repetition than in another: what counts is how a turn compares with those of
        # its repetition.
        repetitions = range(len(self._turns[default]))
        levels = [statistics.median(turns[number].step_s for turns in self._turns.values()) for number in repetitions]
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

    @classmethod
    def read(cls, path: Path) -> RecordedCase:
        """
        Raises:
            OSError, ValueError: it cannot be read.
        """
        return cls(json.loads(path.read_text(encoding="utf-8")))

    def __str__(self) -> str:
        return f"{self.document['model']} on {self.document['device']}, {self.network}"

    @property
    def network(self) -> str:
        """For people."""
        delay = self.document["delay_ms"]
        return f"{self.document['rate_gbit']:g} Gb/s" + (f", {delay:g} ms" if delay else "")

    @property
    def layout(self) -> ModelLayout:
        """For the search's cost model."""
        tensor_bytes = self.document["tensor_bytes"]
        if self.document["device"] == "cpu":
            return ModelLayout(tensor_bytes, DEFAULT_BUCKET_BYTES_ON_CPU, starts_small=False)
        return ModelLayout(tensor_bytes, DEFAULT_BUCKET_BYTES, starts_small=True)

    def draw(self, setting: Setting, generator: random.Random, pauses: float, share: float) -> Turn:
        """A turn of the setting: its true step time with this share of the noise of a recorded one, and what a recorded
        turn waited for; with this probability, a pause in it."""
        noise = generator.choice(self._noise) ** share
        if generator.random() < pauses:
            noise *= _PAUSE
        return replace(generator.choice(self._turns[setting]), step_s=self.step_s[setting] * noise)

    def regret(self, setting: Setting) -> float:
        """How much longer its true step is than the best one's, as a part of that."""
        return self.step_s[setting] / min(self.step_s.values()) - 1

    def loss(self, setting: Setting) -> float:
        """How much longer its true step is than the default's."""
        return self.step_s[setting] / self.step_s[self.settings[0]] - 1


def _turn(value: Mapping[str, Any]) -> Turn:
    def number(one: float | None) -> float:
        return math.nan if one is None else one

    buckets = tuple(
        Bucket(one["nbytes"], number(one["communication_s"]), number(one["launched_s"])) for one in value["buckets"]
    )
    return Turn(value["step_s"], number(value["exposed_s"]), buckets)
