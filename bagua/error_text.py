"""Parts of error messages: lists and causes of bounded length. Knows nothing of torch."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence


def listed(items: Sequence[object], limit: int, separator: str = ", ", rest: str = "") -> str:
    """
    Args:
        items: to be named.
        limit: how many are; of the others, their number is told.
        separator: between two. One that is not a comma also precedes the number of the others.
        rest: what the others are; "other ranks" makes "and 3 other ranks". Default: "and 3 more".
    """
    text = separator.join(map(str, items[:limit]))
    more = len(items) - limit
    if more <= 0:
        return text
    return f"{text}{' ' if separator == ', ' else separator}and {more} {rest or 'more'}"


def one_line(error: BaseException, limit: int) -> str:
    """The class and the text of an error, of at most so many characters; what is too long ends after a word."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", limit, placeholder=" ...")
