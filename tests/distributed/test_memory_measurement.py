"""`measure memory` with two real ranks on CPUs and a model of 24 MiB."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bagua.net.bench.result_file import read_result

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from measure import memory as tool

CASES = ["decentralized-shift_one"]


@pytest.mark.deep
@pytest.mark.timeout(240)
def test_algorithms_need_what_is_stated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--layers", "6", "--steps", "1", "--json", str(tmp_path / "memory.json")]
    code = tool.main([*words, "--algorithms", ",".join(CASES)])
    printed = capsys.readouterr().out
    assert code == 0, printed
    told = [line.split()[0] for line in printed.splitlines() if line.endswith("as stated, within 10 MiB")]
    assert told == CASES
    result = read_result(tmp_path / "memory.json")
    kept = {figure.case["algorithm"]: figure for figure in result.select("memory_kept")}
    assert list(kept) == ["shift_one"]
    for name, figure in kept.items():
        # Not less either: then it would be the statement that is wrong, or nothing was measured.
        stated = result.find("memory_kept_stated", algorithm=name).median
        half_a_byte = 0.5 * int(str(figure.case["parameters"])) / (1 << 20)
        assert figure.median == pytest.approx(stated, abs=half_a_byte), name
    # The model's weights and the partner's, which the communication thread has memory for: over 7 bytes a parameter.
    assert kept["shift_one"].median > 7 * 6
