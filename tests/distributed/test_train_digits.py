"""examples/train_digits.py in two ranks: it learns, and Bagua and torch's DDP print the same."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import sys

import pytest
from support.ranks import run_ranks
from support.tool_module import load_script


def _printed(*options: str) -> list[str]:
    sys.argv = ["train_digits.py", *options]
    leave, os._exit = os._exit, lambda _: None  # type: ignore[assignment,return-value]  # which its last line calls
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            load_script("examples/train_digits.py").main()
    finally:
        os._exit = leave
    return printed.getvalue().splitlines()


@pytest.mark.deep
@pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None,
    reason="needs scikit-learn, which brings the digits: pip install scikit-learn",
)
def test_it_learns_and_agrees_with_ddp() -> None:
    ours, nothing = run_ranks(2, _printed, "--epochs", "4")
    theirs, _ = run_ranks(2, _printed, "--epochs", "4", "--ddp")
    assert nothing == [], "rank 0 alone prints"
    assert len(ours) == 5
    assert ours[:-1] == theirs[:-1]
    found = re.search(r"Bagua, 2 processes on cpu: test accuracy ([0-9.]+)%", ours[-1])
    assert found is not None, ours[-1]
    assert float(found[1]) > 88
