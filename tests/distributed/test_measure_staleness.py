"""tools/train/measure_staleness.py measures what docs/algorithms/async.md tells."""

from __future__ import annotations

import contextlib
import io

from support.ranks import run_ranks
from support.tool_module import load_script


def _measured() -> str:
    module = load_script("tools/train/measure_staleness.py")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert module.main(["--model", "mlp", "--device", "cpu", "--intervals", "0", "--seconds", "1"]) == 0
    return output.getvalue()


def test_a_row_for_each_interval() -> None:
    first, second = run_ranks(2, _measured)
    assert second == ""
    title, head, alone, without_pause = first.splitlines()
    assert title.startswith("mlp, 2 ranks, CPU")
    assert len(head.split()) == 8
    assert alone.split()[0] == "alone"
    interval_ms, steps, averages, took_ms, mean, largest = map(float, without_pause.split())
    assert interval_ms == 0
    assert steps >= averages > 0
    assert took_ms > 0
    assert 0 < mean <= largest
