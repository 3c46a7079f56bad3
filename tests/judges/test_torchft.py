"""torchft's own tests, with Bagua's process group in the place of its gloo group."""

from __future__ import annotations

import importlib.util

import pytest
from judges import torchft_tests


@pytest.mark.deep
@pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="needs torchft")
def test_torchft_s_tests() -> None:
    statuses = torchft_tests.run()
    assert not any(statuses.values()), statuses
    assert len(statuses) >= 8
