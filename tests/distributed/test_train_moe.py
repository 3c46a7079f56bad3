"""examples/train_moe.py: it learns, and goes on from a checkpoint as if it had not stopped."""

from __future__ import annotations

import runpy
from pathlib import Path

from support.page_programs import REPOSITORY
from support.ranks import run_ranks
from support.training import begin


def _trained(folder: str) -> None:
    _, device = begin()
    train = runpy.run_path(str(REPOSITORY / "examples" / "train_moe.py"))["train"]
    first = train(1, None, device)
    whole = train(60, None, device)
    assert whole < 0.7 * first
    train(40, folder, device, save_every=20)
    assert train(60, folder, device, save_every=20) == whole


def test_it_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    run_ranks(2, _trained, str(tmp_path), reuse=True)
    assert sorted(one.name for one in tmp_path.glob("iter_*")) == ["iter_0000040", "iter_0000060"]
