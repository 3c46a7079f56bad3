"""What gloo's rank in bagua-net-bench says of data that is right, and of data that is not."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch, which has gloo")
import torch

from bagua.net.bench import gloo_worker
from bagua.net.bench.gloo_worker import GlooRank

RANKS = 3


def _pattern(rank: int, elements: int) -> torch.Tensor:
    return (torch.arange(elements) * (rank + 1) + rank) % 251


def _verified(size_bytes: int, broken: dict[int, int], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """As rank 1 of three. `broken`: what is added to elements of the sum."""

    def all_reduce(buffer: torch.Tensor) -> None:
        assert torch.equal(buffer, _pattern(1, len(buffer)).to(buffer.dtype))
        for rank in (0, 2):
            buffer.add_(_pattern(rank, len(buffer)).to(buffer.dtype))
        for position, error in broken.items():
            buffer[position] += error

    rank = GlooRank.__new__(GlooRank)
    rank._torch, rank._distributed = torch, SimpleNamespace(all_reduce=all_reduce)
    rank._rank, rank._ranks = 1, RANKS
    rank.verify(size_bytes)
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (answer.pop("event"), answer.pop("bytes")) == ("verified", size_bytes)
    return answer


# Of float32 and of bytes: less than a part, whole parts, parts and a rest.
PART = gloo_worker._CHECK_ELEMENTS
SIZES = (4, 12, 3, 4 * PART, 8 * PART, 8 * PART + 4, PART + 1, 3 * PART + 2)


@pytest.mark.parametrize("size_bytes", SIZES)
def test_right_sums_are_right(size_bytes: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert _verified(size_bytes, {}, capsys) == {"wrong_elements": 0, "first_wrong": None}


@pytest.mark.parametrize("size_bytes", SIZES)
def test_wrong_elements_are_counted_and_the_first_is_named(size_bytes: int, capsys: pytest.CaptureFixture[str]) -> None:
    last = (size_bytes if size_bytes % 4 else size_bytes // 4) - 1
    assert _verified(size_bytes, {last: 1}, capsys) == {"wrong_elements": 1, "first_wrong": last}
    first = last // 2
    found = _verified(size_bytes, dict.fromkeys({first, last}, 1), capsys)
    assert found == {"wrong_elements": len({first, last}), "first_wrong": first}
