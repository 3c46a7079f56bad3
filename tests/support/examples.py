"""How many examples hypothesis draws for tests whose examples are dear. tests/conftest.py says how many others draw."""

from __future__ import annotations

from hypothesis import settings


def examples(price: float) -> int:
    """Of which each costs as much as `price` of those of most tests, by the profile of this run."""
    return max(1, round(settings.default.max_examples / price))


def is_default_run() -> bool:
    return settings.get_current_profile_name() == "default run"
