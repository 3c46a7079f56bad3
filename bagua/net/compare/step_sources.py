"""Where the times of steps come from: a list of sources, of which the first that finds any in the first run is used
for all. Another source is one more entry of `default_sources`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bagua.net.compare.command_run import CommandRun

_MIN_STEPS = 3

_SECONDS = {
    "s": 1.0,
    "sec": 1.0,
    "secs": 1.0,
    "second": 1.0,
    "seconds": 1.0,
    "ms": 1e-3,
    "msec": 1e-3,
    "millisecond": 1e-3,
    "milliseconds": 1e-3,
    "us": 1e-6,
}

_MAX_S = 1e6
_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)"
_TIME_UNIT = rf"({'|'.join(sorted(_SECONDS, key=len, reverse=True))})\b"
_STEP = r"(?:step|iter(?:ation)?|it|batch)"
_ITEMS = r"(?:samples?|examples?|seq(?:uence)?s?|tok(?:en)?s?|images?|imgs?)"
_JSON_KEY = re.compile(
    r"(?:.*[/_.])?(?:(?:step|iter(?:ation)?|batch)_?(?:time|duration|seconds|ms)|time_per_(?:step|iter(?:ation)?|batch))"
    r"(?:_(?P<unit>s|sec|seconds|ms|us))?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class StepTimes:
    """
    Attributes:
        seconds: one per step, in order; or a single figure of the whole run.
        is_summary: whether each value is already one of many steps, so that there is no warm-up to drop.
    """

    seconds: Sequence[float]
    is_summary: bool = False


class StepSource(Protocol):
    @property
    def name(self) -> str:
        """What is read, for the user."""

    @property
    def caveat(self) -> str:
        """What the user has to know of these times; "" for nothing."""

    def read(self, run: CommandRun) -> StepTimes:
        """Empty where this source finds nothing in that run."""


@dataclass(frozen=True)
class PrintedTimes:
    """Of the lines that match a pattern, whose first group is the number.

    Attributes:
        seconds: from the match to the time of a step.
    """

    name: str
    pattern: re.Pattern[str]
    seconds: Callable[[re.Match[str]], float]
    caveat: str = ""

    def read(self, run: CommandRun) -> StepTimes:
        found = [self.seconds(match) for line in run.lines if (match := self.pattern.search(line))]
        return StepTimes([value for value in found if 0 < value < _MAX_S])


@dataclass(frozen=True)
class JsonLines:
    """A field of JSON lines such as {"step": 3, "step_time_ms": 12.3}."""

    name: str = "the step times in JSON lines"
    caveat: str = ""

    def read(self, run: CommandRun) -> StepTimes:
        return StepTimes([value for line in run.lines if (value := self._value(line)) is not None])

    def _value(self, line: str) -> float | None:
        begin = line.find("{")
        if begin < 0 or not line.rstrip().endswith("}"):
            return None
        try:
            document = json.loads(line[begin:])
        except (ValueError, RecursionError):
            return None
        for key, value in document.items() if isinstance(document, dict) else ():
            match = _JSON_KEY.fullmatch(key)
            if match and type(value) in (int, float) and 0 < value < _MAX_S:
                unit = match["unit"] or ("ms" if key.lower().endswith("ms") else "s")
                return float(value) * _SECONDS[unit.lower()]
        return None


_STATS = re.compile(rf"step {_NUMBER} ms; communication {_NUMBER} ms, of which exposed {_NUMBER} ms")


@dataclass(frozen=True)
class BaguaStatistics:
    """Printed `bagua_ddp.stats()`: a median over many steps each, of which the last counts."""

    name: str = "`bagua_ddp.stats()`"
    caveat: str = ""

    def read(self, run: CommandRun) -> StepTimes:
        found = _statistics(run)
        return StepTimes([found[0]] if found else [], is_summary=True)


@dataclass(frozen=True)
class TrafficTime:
    """Of a command that prints nothing: steps move the same bytes each, so that the time of the middle 80 % of a run's
    bytes is that of 80 % of its steps."""

    name: str = "the time in which the command's TCP connections carried the middle 80 % of their bytes"
    caveat: str = (
        "No step times were found in the command's output. These times leave start-up out, and are right if all steps"
        " move the same number of bytes. Print the time of each step, or give --pattern."
    )

    def read(self, run: CommandRun) -> StepTimes:
        return StepTimes([] if run.middle_s is None else [run.middle_s], is_summary=True)


@dataclass(frozen=True)
class WallTime:
    """Of the whole command: it always works."""

    name: str = "the wall time of the whole command"
    caveat: str = (
        "No step times were found in the command's output, and too little traffic to tell them, so whole runs are"
        " compared: start-up, compilation and loading of data included, which hide a difference. Print the time of each"
        " step, or give --pattern."
    )

    def read(self, run: CommandRun) -> StepTimes:
        return StepTimes([run.wall_s], is_summary=True)


def exposed_share(run: CommandRun) -> float | None:
    """The part of a step that waits for communication, where the command printed `bagua_ddp.stats()`."""
    found = _statistics(run)
    return found[1] / found[0] if found else None


def _statistics(run: CommandRun) -> tuple[float, float] | None:
    """Step time and exposed time in seconds, as they were printed last."""
    found = [(float(match[1]) / 1e3, float(match[3]) / 1e3) for line in run.lines if (match := _STATS.search(line))]
    return found[-1] if found and 0 < found[-1][0] < _MAX_S else None


def _with_unit(match: re.Match[str]) -> float:
    return float(match[1]) * _SECONDS[(match[2] or "s").lower()]


def _per_second(match: re.Match[str]) -> float:
    return 1 / float(match[1]) if float(match[1]) else float("inf")


def _printed(
    name: str, pattern: str, seconds: Callable[[re.Match[str]], float] = _with_unit, caveat: str = ""
) -> PrintedTimes:
    return PrintedTimes(name, re.compile(pattern, re.IGNORECASE), seconds, caveat)


def default_sources() -> list[StepSource]:
    """The most precise first."""
    return [
        JsonLines(),
        # Before "step 185 ms", which would take its first number only.
        BaguaStatistics(),
        _printed(
            'lines like "elapsed time per iteration (ms): 12.3"',
            rf"time[ _-]per[ _-]{_STEP}s?\s*\((?:ms)\)\s*[:=]?\s*{_NUMBER}",
            lambda match: float(match[1]) * 1e-3,
        ),
        _printed(
            'lines like "step_time 12.3 ms"',
            rf"\b(?:{_STEP}[ _-]?time|time[ _-]?(?:per[ _-]|/){_STEP})s?\s*[:=]?\s*{_NUMBER}\s*(?:{_TIME_UNIT})?",
        ),
        _printed('lines like "12.3 ms/step"', rf"{_NUMBER}\s*{_TIME_UNIT}\s*(?:/|per)\s*{_STEP}\b"),
        _printed('lines like "3.4 it/s"', rf"{_NUMBER}\s*{_STEP}s?\s*/\s*s(?:ec)?\b", _per_second),
        _printed(
            'lines like "step 7 ... 12.3 ms"',
            rf"\b{_STEP}\W{{1,3}}\d+\b(?![.\d])[^\n]*?\b{_NUMBER}\s*(ms|s|us)\b",
        ),
        _printed(
            'lines like "123 samples/s"',
            rf"{_NUMBER}\s*{_ITEMS}\s*(?:/|per)\s*s(?:ec(?:ond)?)?\b",
            _per_second,
            "Rates of samples were compared: both settings must use the same batch size.",
        ),
        TrafficTime(),
        WallTime(),
    ]


def source_of_pattern(pattern: str, unit: str) -> PrintedTimes:
    """
    Raises:
        ValueError: it is not a regular expression with exactly one group.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"--pattern {pattern!r} is not a regular expression: {error}") from error
    if compiled.groups != 1:
        raise ValueError(
            f"--pattern {pattern!r} has {compiled.groups} groups; put exactly the number into one, for example"
            r" 'took ([\d.]+) ms', and the others into (?:...)"
        )

    def seconds(match: re.Match[str]) -> float:
        try:
            value = float(match[1])
        except (TypeError, ValueError):
            return 0.0  # not a time; the caller drops it
        if unit == "it/s":
            return 1 / value if value else 0.0
        return value * _SECONDS[unit]

    return PrintedTimes(f"lines that match --pattern, in {unit}", compiled, seconds)


_NOT_PRINTED = (TrafficTime, WallTime)


def choose_source(sources: Sequence[StepSource], run: CommandRun) -> StepSource:
    """
    Raises:
        ValueError: none finds anything: the caller gave only a pattern.
    """
    found = [(source, len(source.read(run).seconds)) for source in sources]
    for source, count in found:
        if count >= _MIN_STEPS or (count and source.read(run).is_summary and not isinstance(source, _NOT_PRINTED)):
            return source
    for source, count in found:
        if count:
            return source
    raise ValueError(
        f"no step times found in {len(run.lines)} lines of output: {sources[0].name}\n"
        + "\n".join(f"  {line}" for line in list(run.lines)[-5:])
        + "\nCorrect --pattern; without it, common forms are recognized."
    )
