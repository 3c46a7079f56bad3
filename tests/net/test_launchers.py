"""Which rank this is: Python and the plugin find the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua.launch_environment import LAUNCHERS, job_position
from bagua.net import _core

_NAMES = [name for launcher in LAUNCHERS for name in launcher[1:] if name]
_VALUES = st.sampled_from(
    ["0", "1", " 7 ", "4096", "4097", str((1 << 31) - 1), str(1 << 31), "-1", "+1", "1_0", "\u0663", "x", "", " "]
)


def positions_of(environment: dict[str, str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(-1 if one is None else one for one in job_position(environment)), _core.job_position(environment)


@given(st.dictionaries(st.sampled_from(_NAMES), _VALUES))
def test_the_plugin_finds_the_same(environment: dict[str, str]) -> None:
    ours, of_the_plugin = positions_of(environment)
    assert ours == of_the_plugin


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda one: one.launcher)
def test_every_launcher_is_understood(launcher: tuple[str, ...]) -> None:
    expected = (3, 8, 1, 4 if launcher[4] else -1)
    environment = {name: str(value) for name, value in zip(launcher[1:], expected, strict=True) if name}
    assert positions_of(environment) == (expected, expected)


def test_the_first_launcher_that_says_it_counts() -> None:
    """mpirun inside a Slurm allocation: Slurm's variables are those of its daemon."""
    slurm = {"SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}
    expected = (-1, 4, 3, -1)
    environment = slurm | {"OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
    assert positions_of(environment) == (expected, expected)
