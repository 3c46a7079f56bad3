"""Who divides by the number of ranks: the backend, or whoever fills the bucket."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bagua.comm_ops.centralized import AllReduce
from bagua.job import torch_internals

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("device", "backend", "dtype", "ranks", "by_backend"),
    [
        (GPU, "nccl", torch.float32, 3, True),
        (GPU, "nccl", torch.complex64, 3, True),
        (GPU, "nccl", torch.bfloat16, 8, True),
        # NCCL has 1/n in the dtype, and 1/3 in bfloat16 is 0.334.
        (GPU, "nccl", torch.bfloat16, 3, False),
        (GPU, "nccl", torch.float16, 6, False),
        (GPU, "gloo", torch.float32, 2, False),
        (torch.device("cpu"), "gloo", torch.float32, 2, False),
    ],
)
def test_who_divides(
    device: torch.device, backend: str, dtype: torch.dtype, ranks: int, by_backend: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(torch_internals, "backend_name", lambda *_: backend)
    communicator: Any = SimpleNamespace(nranks=lambda: ranks, torch_group=None)
    operation = AllReduce(communicator, True, device, dtype)
    assert operation.prescale == (None if by_backend else 1 / ranks)
    assert (operation._options.reduceOp == dist.ReduceOp.AVG) == by_backend


def test_a_sum_is_not_divided() -> None:
    communicator: Any = SimpleNamespace(nranks=lambda: 3, torch_group=None)
    operation = AllReduce(communicator, False, GPU, torch.bfloat16)
    assert operation.prescale is None
    assert operation._options.reduceOp == dist.ReduceOp.SUM
