"""Which elements of parameters are counted where several share memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import bagua.torch_api.tensor  # noqa: F401 - gives tensors their methods
from bagua.comm_ops.async_average import BucketAverage
from bagua.comm_ops.shared_elements import count_once
from bagua.engine.bucket import Bucket


def _tied(base: Tensor) -> list[Tensor]:
    return [base, base.t(), base[1:3], base.view(-1)[::5]]


def _partly(base: Tensor) -> list[Tensor]:
    return [base[:3], base[2:], base[:, :2]]


def _interleaved(base: Tensor) -> list[Tensor]:
    return [base[:, ::2], base[:, 1::2]]


def _apart(base: Tensor) -> list[Tensor]:
    return [base[:2], base[2:], base[:0], torch.zeros(3)]


@pytest.mark.parametrize(
    ("make", "counted"),
    [
        (_tied, [24, 0, 0, 0]),
        (_partly, [18, 6, 0]),
        (_interleaved, [12, 12]),
        (_apart, [12, 12, 0, 3]),
    ],
)
def test_each_element_counts_once_and_is_given_once(make: Callable[[Tensor], list[Tensor]], counted: list[int]) -> None:
    base = torch.arange(24.0).view(4, 6)
    tensors = make(base)
    counts = count_once(tensors)
    assert counted == [
        tensor.numel() if count is None else int(count.sum()) for tensor, count in zip(tensors, counts, strict=True)
    ]
    assert (counts == [None] * len(tensors)) == (make in (_interleaved, _apart))
    # What this rank is owed: with another one that has zeros, half of what it has is taken away.
    for number, tensor in enumerate(tensors):
        tensor.ensure_bagua_tensor(f"t{number}", "module")  # type: ignore[attr-defined]
    before = [tensor.clone() for tensor in tensors]
    average = BucketAverage(Bucket(tensors, "b", flatten=False), counts)
    average.copy_from(tensors)
    average.exchange(lambda _: None, 2, False, torch.empty_like(average.contribution))
    average.give(tensors)
    for tensor, was in zip(tensors, before, strict=True):
        assert torch.equal(tensor, was / 2)


def test_the_default_device_does_not_matter() -> None:
    tensors = _tied(torch.zeros(4, 6))
    with torch.device("meta"):
        counts = count_once(tensors)
    assert [None if one is None else int(one.sum()) for one in counts] == [None, 0, 0, 0]
