"""Text and amounts as people read them: three digits and a unit. Bytes are decimal (GB = 10^9), as rates of networks
are."""

from __future__ import annotations

UNKNOWN = "-"

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def printable(text: str) -> str:
    """Without what a terminal would obey: nobody vouches for what other processes and hosts write."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def bytes_text(amount: float | None) -> str:
    if amount is None:
        return UNKNOWN
    unit = 0
    while amount >= 999.5 and unit < len(_UNITS) - 1:
        amount /= 1000
        unit += 1
    return f"{_three_digits(amount) if unit else f'{amount:.0f}'} {_UNITS[unit]}"


def rate_text(bytes_per_s: float | None) -> str:
    return UNKNOWN if bytes_per_s is None else f"{bytes_text(bytes_per_s)}/s"


def seconds_text(seconds: float | None) -> str:
    """0.000031 is "31 us", 4000 is "1 h 6 min"."""
    if seconds is None:
        return UNKNOWN
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1e3)} ms"
    if seconds < 60:
        return f"{_three_digits(seconds)} s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {int(seconds) % 60} s"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes // 60 % 24} h"


def share_text(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.0f} %"


def _three_digits(number: float) -> str:
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"
