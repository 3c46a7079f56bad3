"""Which tensors lie one after another in memory, alike in several lists."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs PyTorch, whose tensors are looked at")
import torch
from torch import Tensor

from bagua.torch_api.contrib.fuse.optimizer import calculate_mutual_groups


def pieces(flat: Tensor, *bounds: tuple[int, int]) -> list[Tensor]:
    return [flat[begin:end] for begin, end in bounds]


ORDER = [(10, 14), (3, 5), (5, 10), (0, 3), (20, 22), (22, 23), (30, 31)]


def test_order_of_memory() -> None:
    weights, gradients = (pieces(torch.zeros(40), *ORDER) for _ in range(2))
    assert calculate_mutual_groups([weights, gradients]) == [[3, 1, 2, 0], [4, 5]]


def test_every_list_counts() -> None:
    weights = pieces(torch.zeros(40), *ORDER)
    moved = pieces(torch.zeros(50), *[(begin + 10 * (begin >= 5), end + 10 * (begin >= 5)) for begin, end in ORDER])
    assert calculate_mutual_groups([weights, moved]) == [[4, 5]]  # [3, 1, 2, 0] is two runs there


def test_neighbours_of_other_storages_and_dtypes_are_none() -> None:
    flat = torch.zeros(8)
    strided = torch.zeros(4, 4)
    assert calculate_mutual_groups([[flat[:4], flat[4:].view(torch.int32)]]) == []
    assert calculate_mutual_groups([[strided[:, :2], strided[:, 2:]]]) == []
    assert calculate_mutual_groups([[torch.zeros(0), torch.zeros(0)]]) == []
    assert calculate_mutual_groups([]) == []


def test_channels_last_is_dense() -> None:
    flat = torch.zeros(60)
    first = flat[:24].view(1, 3, 4, 2).permute(0, 3, 1, 2)
    assert calculate_mutual_groups([[flat[24:], first]]) == [[1, 0]]


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match=r"\[1, 2\] entries"):
        calculate_mutual_groups([[torch.zeros(1)], [torch.zeros(1), torch.zeros(1)]])
