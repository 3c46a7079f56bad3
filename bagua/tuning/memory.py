"""What earlier runs have found, in files of the user's cache folder: $XDG_CACHE_HOME/bagua/tuning, by default
~/.cache/bagua/tuning (https://specifications.freedesktop.org/basedir-spec/). One file for each model, number of ranks,
hardware and network. A file that cannot be read, or holds something else, is a miss and a warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagua.env import read_text
from bagua.tuning.setting import Outcome, Remembered, Setting, Tried

SCHEMA = 2
_MAX_BYTES = 1 << 20  # a file of ours has some kilobytes
_MAX_TEXT = 4000
_MAX_NUMBER = 1e10  # of seconds since 1970, that is in the year 2286

_logger = logging.getLogger("bagua")


@dataclass(frozen=True)
class Fingerprint:
    """What an answer depends on.

    Attributes:
        model: a name for people, and a hash of names, shapes and dtypes of what is synchronized.
        world: ranks and nodes, such as "8 ranks on 2 nodes".
        hardware: the device and the CPUs of rank 0's node.
        network: backend, interface and its speed.
        space: the algorithms that may be used, and the default.
    """

    model: str
    world: str
    hardware: str
    network: str
    space: str

    def key(self, with_world: bool = True) -> str:
        values = dataclasses.asdict(self)
        if not with_world:
            del values["world"]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Answer:
    """
    Attributes:
        setting: that was chosen.
        speedup: compared with the default; 1 for the default.
        reason: in one line.
        tried: the default first.
        steps: that the search took.
        compressed_speedups: by codec, estimated, of steps that send compressed gradients; those that are known, where
            no other algorithm was allowed.
        found_at: seconds since 1970.
    """

    fingerprint: Fingerprint
    setting: Setting
    speedup: float
    reason: str
    tried: tuple[Tried, ...]
    steps: int
    compressed_speedups: Mapping[str, float]
    found_at: float

    def __str__(self) -> str:
        return f"{self.setting}, {self.speedup:.2f}x the speed of the default"

    def to_check(self) -> Remembered:
        """For the search of another run."""
        default = self.tried[0] if self.tried else None
        step_s, exposed_s = (math.nan, math.nan) if default is None else (default.step_s, default.exposed_s)
        return Remembered(self.setting, step_s, exposed_s)

    @classmethod
    def of(
        cls,
        outcome: Outcome,
        fingerprint: Fingerprint,
        steps: int,
        compressed_speedups: Mapping[str, float] | None = None,
    ) -> Answer:
        chosen = outcome.setting, outcome.speedup, outcome.reason, outcome.tried
        return cls(fingerprint, *chosen, steps, compressed_speedups or {}, found_at=time.time())

    def as_json(self) -> dict[str, Any]:
        """Numbers that are not known are None."""
        tried = [
            {
                "setting": one.setting.as_tuple(),
                **{name: _or_none(getattr(one, name)) for name in _FIGURES},
                "turns": one.turns,
            }
            for one in self.tried
        ]
        return {
            "schema": SCHEMA,
            "fingerprint": dataclasses.asdict(self.fingerprint),
            "setting": self.setting.as_tuple(),
            "speedup": self.speedup,
            "reason": self.reason,
            "tried": tried,
            "steps": self.steps,
            "compressed_speedups": dict(self.compressed_speedups),
            "found_at": self.found_at,
        }

    @classmethod
    def from_json(cls, document: Any) -> Answer:
        """
        Raises:
            ValueError: what `as_json` gives has another form.
        """
        try:
            if document["schema"] != SCHEMA:
                raise ValueError(f"schema {document['schema']!r}, not {SCHEMA}")
            names = [field.name for field in dataclasses.fields(Fingerprint)]
            fingerprint = Fingerprint(**{name: _text(document["fingerprint"][name]) for name in names})
            tried = tuple(
                Tried(
                    Setting.from_json(one["setting"]),
                    step_s=_positive(one["step_s"]),
                    exposed_s=_number_or_nan(one["exposed_s"]),
                    communication_s=_number_or_nan(one["communication_s"]),
                    ratio=_positive(one["ratio"]),
                    turns=int(_number(one["turns"])),
                )
                for one in document["tried"]
            )
            return cls(
                fingerprint,
                Setting.from_json(document["setting"]),
                _positive(document["speedup"]),
                _text(document["reason"]),
                tried,
                int(_number(document["steps"])),
                {_text(name): _positive(value) for name, value in document["compressed_speedups"].items()},
                _number(document["found_at"]),
            )
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


_FIGURES = ("step_s", "exposed_s", "communication_s", "ratio")


def folder() -> Path:
    """Where the files are. It need not exist."""
    base = read_text(os.environ, "XDG_CACHE_HOME")
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "bagua" / "tuning"


def look_up(fingerprint: Fingerprint) -> Answer | None:
    """What was found for this fingerprint or else, most recently, for another number of ranks."""
    family = fingerprint.key(with_world=False)
    try:
        exact = folder() / f"{family}-{fingerprint.key()}.json"
        others = sorted(folder().glob(f"{family}-*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    except (OSError, RuntimeError):  # no home, no access, or a file that is gone
        return None
    for path in [exact, *(other for other in others if other != exact)]:
        answer = read(path)
        if answer is not None and dataclasses.replace(answer.fingerprint, world=fingerprint.world) == fingerprint:
            return answer
    return None


def read(path: Path) -> Answer | None:
    """None, and a warning unless there is no such file: it cannot be used."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES} bytes")
        return Answer.from_json(json.loads(data))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        _logger.warning(f"{path}: not a result of tuning ({error}). It is ignored; delete it.")
        return None


def read_all() -> list[tuple[Path, Answer]]:
    """All answers, the latest last."""
    found = [(path, answer) for path in folder().glob("*.json") if (answer := read(path)) is not None]
    return sorted(found, key=lambda one: one[1].found_at)


def store(answer: Answer) -> Path | None:
    """Replace what was found before. A folder that cannot be written to is a warning; None then."""
    try:
        target = folder() / f"{answer.fingerprint.key(with_world=False)}-{answer.fingerprint.key()}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(answer.as_json(), indent=1, allow_nan=False)
        descriptor, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=target.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise
        return target
    except (OSError, RuntimeError) as error:
        _logger.warning(f"The result of tuning is not kept for the next run: {error}")
        return None


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= _MAX_NUMBER:  # nor NaN
        raise ValueError(f"{value!r:.40} is not a number up to {_MAX_NUMBER:g}")
    return float(value)


def _positive(value: Any) -> float:
    if _number(value) <= 0:
        raise ValueError(f"{value!r:.40} is not above 0")
    return float(value)


def _number_or_nan(value: Any) -> float:
    return math.nan if value is None else _number(value)


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT or not value.isprintable():
        raise ValueError("a text is missing, or too long")
    return value
