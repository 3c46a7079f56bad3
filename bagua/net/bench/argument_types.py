"""Types of command line arguments that all parsers of bagua-net-bench, and the tools', share: numbers within
limits, sizes, names."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from bagua.net.bench.sizes import parse_size

_Number = TypeVar("_Number", int, float)


def within(kind: Callable[[str], _Number], low: _Number, high: _Number) -> Callable[[str], _Number]:
    """An int or float (`kind`) from `low` to `high`, both included."""
    nouns: dict[object, str] = {int: "an integer"}
    noun = nouns.get(kind, "a number")

    def convert(text: str) -> _Number:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {noun}; give one in {low}..{high}") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is outside {low}..{high}; give {noun} in that range")
        return value

    return convert


def byte_size(text: str) -> int:
    """`64K`, `1M`: bytes, powers of 1024."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def names_of(
    kind: str, known: Sequence[str], groups: Mapping[str, Sequence[str]] | None = None
) -> Callable[[str], tuple[str, ...]]:
    """For argparse: one or several, with commas, each once; `groups` are names for several."""

    def convert(text: str) -> tuple[str, ...]:
        words = [name.strip() for name in text.split(",") if name.strip()]
        names = [name for word in words for name in (groups or {}).get(word, (word,))]
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(
                f"unknown {kind} {', '.join(map(repr, unknown)) or repr(text)}; give a comma-separated list of"
                f" {', '.join([*known, *(groups or {})])}"
            )
        return tuple(dict.fromkeys(names))

    return convert
