"""tools/bench/measure_patterns.py: real ranks and connections, over loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.ports import free_port
from support.tool_module import load_script

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "bench" / "measure_patterns.py"
DEADLINE_S = 120


def _start(*words: str, **variables: str) -> subprocess.Popen[str]:
    # NCCL_SOCKET_IFNAME: loopback, which the plugin takes only if it is named.
    environment = {**os.environ, "NCCL_SOCKET_IFNAME": "lo", **variables}
    return subprocess.Popen(
        [sys.executable, SCRIPT, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _run(ranks: int, *words: str, **variables: str) -> list[tuple[int, str, str]]:
    """Exit status, stdout and stderr of each."""
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **variables}
    started = [_start(*words, RANK=str(rank), **place) for rank in range(ranks)]
    try:
        outputs = [rank.communicate(timeout=DEADLINE_S) for rank in started]
    finally:
        for rank in started:
            rank.kill()
            rank.wait()
    return [(rank.returncode, *output) for rank, output in zip(started, outputs, strict=True)]


def test_every_pattern_comes_to_its_end() -> None:
    # Neither a multiple of the messages' size nor of the channels and ranks.
    (code, output, error), *others = _run(4, "--bytes", "1500001", "--turns", "3")
    assert code == 0, error
    assert [(other, silent) for other, silent, _ in others] == [(0, "")] * 3
    title, _, _, *lines = output.splitlines()
    assert title.startswith("4 ranks, 1500001 bytes in 3 turns each; ")
    assert [line.split()[0] for line in lines] == ["ring", "pairs", "shift", "all-to-all"]
    for line in lines:
        mean, median, longest = map(float, line.split()[1:])
        # A turn of a fast machine rounds to 0 ms.
        assert 0 <= median <= longest
        assert mean >= 0


@pytest.mark.parametrize(
    ("words", "ranks", "message"),
    [
        ((), "", "WORLD_SIZE=: this is between two ranks or more"),
        ((), "3", "WORLD_SIZE=3: an odd number has no pairs; add --patterns ring,all-to-all"),
        (("--bytes", "7"), "4", "--bytes 7 is less than a byte for each of 4 ranks and 2 channels"),
        (("--patterns", "star"), "4", "star"),
    ],
)
def test_wrong_options(
    words: tuple[str, ...],
    ranks: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    with pytest.raises(SystemExit) as ended:
        load_script("tools/bench/measure_patterns.py").main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_library_that_is_none_is_an_error(tmp_path: Path) -> None:
    broken = tmp_path / "libnccl-net.so"
    broken.write_bytes(b"no library")
    with pytest.raises(OSError, match=r"invalid ELF header|file too short"):
        load_script("tools/bench/measure_patterns.py").Plugin(broken)
