"""tools/train/compare_side_by_side.py: its options, what it makes of times, and a comparison with real ranks."""

from __future__ import annotations

import contextlib
import io
import math

import pytest
from support.ranks import run_ranks
from support.tool_module import load_script

TOOL = "tools/train/compare_side_by_side.py"


def _compared() -> tuple[str, list[int]]:
    import torch

    sizes: list[int] = []
    tool = load_script(TOOL)
    make = tool.wrap

    def noting(*arguments: object, **named: object) -> object:
        training = make(*arguments, **named)
        if named["bucket_mib"] is not None:
            sizes.append(len(arguments[1].bagua_ddp.bagua_buckets))  # type: ignore[attr-defined]
        return training

    tool.wrap = noting
    torch.set_num_threads(1)
    words = "--model mlp --device cpu --seconds 1 --builds 2 --steps 1 --contenders torch-ddp,with-bagua@1,bagua-ddp"
    with contextlib.redirect_stdout(io.StringIO()) as output:
        tool.main(words.split())
    return output.getvalue(), sizes


def test_a_row_for_each_contender() -> None:
    (first, sizes), (second, _) = run_ranks(2, _compared)
    assert second == ""
    title, _, _, *rows = first.splitlines()
    assert title.startswith("mlp, 2 ranks, CPU, ")
    assert [row.split()[0] for row in rows] == ["torch-ddp", "with-bagua@1", "bagua-ddp"]
    for row in rows:
        step_ms, gain, _ = map(float, row.split()[1:])
        assert step_ms > 0
        assert gain > 0
    assert float(rows[0].split()[2]) == 1
    assert sizes == [2, 2]  # made twice; with the default it is one bucket


def test_the_gain_is_that_of_rounds() -> None:
    rows = load_script(TOOL).rows_of(["a", "b"], [[2.0, 1.0], [8.0, 8.0]])
    assert [(row.contender, row.step_ms, row.gain, row.rounds) for row in rows] == [
        ("a", 5000, 1, 2),
        ("b", 4500, 1.5, 2),
    ]
    assert rows[0].error == 0
    assert math.isclose(rows[1].error, 0.5)


@pytest.mark.parametrize(
    ("contenders", "says"),
    [
        ("torch-ddp,nobody", "unknown contender 'nobody'; choose of torch-ddp"),
        ("torch-ddp", "name two contenders or more, each once"),
        ("torch-ddp,torch-ddp", "name two contenders or more, each once"),
        ("torch-ddp,with-bagua@", "'with-bagua@': after @ stands a number of MiB, 1 or more"),
        ("torch-ddp,with-bagua@0", "after @ stands a number of MiB, 1 or more"),
    ],
)
def test_what_cannot_be_compared(contenders: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_script(TOOL).main(["--model", "mlp", "--contenders", contenders])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
