"""tools/bench/measure_duplex_tcp.py: real connections over loopback, with both ranks started by it or one by one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.ports import free_port

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "bench" / "measure_duplex_tcp.py"
SHORT = ("--streams", "1,2", "--seconds", "0.5", "--memory", "1M")


def _environment(**variables: str) -> dict[str, str]:
    own = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return {**own, **variables}


def _figures(output: str) -> list[list[float]]:
    title, *lines = output.splitlines()
    assert title.startswith("TCP between two ranks, 1 MiB for each process; ")
    return [[float(word) for word in line.split()] for line in lines[2:]]


def _check(figures: list[list[float]]) -> None:
    assert [row[0] for row in figures] == [1, 2]
    for _, one_way, out, back, cpu in figures:
        assert min(one_way, out, back) > 0
        assert cpu > 0


def test_both_ranks_on_this_host() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, *SHORT], env=_environment(), capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    _check(_figures(done.stdout))


def test_a_rank_each() -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, *SHORT],
            env=_environment(RANK=rank, **place),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("1", "0")
    ]
    try:
        (silent, error), (output, other_error) = (rank.communicate(timeout=120) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert silent + error + other_error == ""
    _check(_figures(output))


@pytest.mark.parametrize(
    ("words", "variables", "says"),
    [
        (["--streams", "4,0"], {}, "--streams: 0 is outside 1..256"),
        (["--memory", "0"], {}, "--memory 0 leaves nothing to send"),
        (["--seconds", "0"], {}, "--seconds: 0 is outside 0.1..600"),
        ([], {"RANK": "0", "WORLD_SIZE": "3"}, "WORLD_SIZE=3: this is between two ranks"),
        ([], {"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2: there are ranks 0 and 1"),
        ([], {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "::1"}, "RANK is set, but not MASTER_PORT"),
    ],
)
def test_what_is_refused(words: list[str], variables: dict[str, str], says: str) -> None:
    environment = _environment(**variables)
    if "MASTER_PORT" not in variables:
        environment.pop("MASTER_PORT", None)
    if variables.get("RANK") == "2":
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    done = subprocess.run([sys.executable, SCRIPT, *words], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert says in done.stderr
