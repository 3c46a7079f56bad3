"""Variables of launchers: Python and the plugin look at the same ones, in the same order."""

from __future__ import annotations

import pytest

from bagua.net import _core
from bagua.net.launchers import LAUNCHERS, stated_local_rank, stated_world_size


def test_the_plugin_has_the_same_table() -> None:
    assert _core.launchers() == [tuple(names) for names in LAUNCHERS]


@pytest.mark.parametrize(
    ("environment", "local_rank", "world_size"),
    [
        ({}, "", ""),
        ({"RANK": "3", "LOCAL_RANK": " 1 ", "WORLD_SIZE": "8"}, "1", "8"),
        ({"SLURM_LOCALID": "2", "SLURM_NTASKS": "16"}, "2", "16"),
        # mpirun inside a Slurm allocation: Slurm's variables are those of its daemon.
        (
            {
                "SLURM_LOCALID": "0",
                "SLURM_NTASKS": "1",
                "OMPI_COMM_WORLD_LOCAL_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "4",
            },
            "3",
            "4",
        ),
    ],
)
def test_the_first_launcher_that_says_it_counts(environment: dict[str, str], local_rank: str, world_size: str) -> None:
    assert stated_local_rank(environment) == local_rank
    assert stated_world_size(environment) == world_size
