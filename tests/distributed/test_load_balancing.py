"""Load-balancing samplers within a job, and the example that uses them."""

from __future__ import annotations

import contextlib
import io
import re

from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.tool_module import load_script

from bagua.torch_api.contrib import LoadBalancingDistributedSampler


@on_ranks(3)
def test_rank_and_world_size_are_those_of_the_job(rank: int) -> None:
    assert (
        list(LoadBalancingDistributedSampler(range(8), float, shuffle=False)) == [[0, 3, 6], [1, 4, 7], [2, 5, 0]][rank]
    )


def _printed() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        load_script("examples/train_unequal_lengths.py").main()
    return printed.getvalue()


def test_the_example_learns_and_is_balanced() -> None:
    printed, nothing = run_ranks(2, _printed)
    assert nothing == ""
    found = re.fullmatch(r"test accuracy ([0-9.]+)%, busiest rank ([0-9.]+) x the mean\n", printed)
    assert found is not None, printed
    assert float(found[1]) > 70
    assert 1 <= float(found[2]) < 1.05
