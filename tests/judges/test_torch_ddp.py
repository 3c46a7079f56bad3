"""torch's own tests of DDP, which its wheel has, with Bagua's wrapper in the place of torch's.

On CPUs: those without a GPU, and those of GPUs where a CPU can pass for one (judges.pretended_gpus). All of them run on
two GPUs by hand: judges.torch_ddp.
"""

from __future__ import annotations

import tempfile

import pytest
from judges import torch_ddp_rank
from judges.torch_ddp import verdict
from judges.torch_ddp_expectations import FAILS, NEEDS_A_GPU, TOO_LONG
from judges.torch_ddp_rank import Outcome
from support.ranks import run_ranks

RANKS = 2


def _outcomes(folders: list[str] | None) -> dict[str, tuple[str, str]]:
    import os

    torch_ddp_rank.prepare(pretended=True, rank=int(os.environ["RANK"]))
    names = [name for name in torch_ddp_rank.names_of_tests() if name not in TOO_LONG]
    assert folders is not None
    assert len(names) <= len(folders)
    return {name: tuple(torch_ddp_rank.run_test(name, folder)) for name, folder in zip(names, folders, strict=False)}  # type: ignore[misc]


@pytest.mark.deep
def test_torch_s_tests_of_ddp() -> None:
    """Every one passes but for those that are listed with the reason, and those fail."""
    with tempfile.TemporaryDirectory() as root:
        folders = [tempfile.mkdtemp(dir=root) for _ in range(200)]
        by_rank = run_ranks(RANKS, _outcomes, folders, timeout=240)
    table = {name: [Outcome(*one[name]) for one in by_rank] for name in by_rank[0]}
    wrong = [
        f"{what} {name} {why}"
        for name, outcomes in table.items()
        for what, why, is_good in [verdict(name, outcomes, pretended=True)]
        if not is_good
    ]
    assert not wrong, "\n".join(wrong)
    stale = {*FAILS, *NEEDS_A_GPU, *TOO_LONG} - {*table, *TOO_LONG}
    assert not stale, "torch has no such tests any more"
    passed = [name for name, outcomes in table.items() if all(one.verdict == "PASS" for one in outcomes)]
    assert len(passed) >= 60, passed
