"""An option's value that is one or several names of those that are known."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence


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
                f"unknown {kind} {', '.join(map(repr, unknown)) or repr(text)}; give one or several, with commas, of"
                f" {', '.join([*known, *(groups or {})])}"
            )
        return tuple(dict.fromkeys(names))

    return convert
