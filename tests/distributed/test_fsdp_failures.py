"""A rank is gone, or too late, in a compressed collective of FSDP2: the error names module, operation and codec.
A rank that is late within the timeout is no error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.dying_rank import TIMEOUT, VICTIM, begin_to_lose_one, die
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bagua.fsdp import compress_communication
from bagua.job.failure_report import CollectiveError
from bagua.job.torch_internals import default_store

# Of each operation: options of compress_communication, and whether it is reached in forward or in backward.
OPERATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "The reduce-scatter of int8 gradients of module 'layer'": ({}, "backward"),
    "The all-reduce between replicas of int4 gradients of module 'layer'": ({"gradients": "int4"}, "backward"),
    "The all-gather of bf16 weights of module 'layer'": ({"weights": "bf16"}, "forward"),
    "The all-gather of exact weights of module 'layer'": ({"weights": "bf16", "exact_weights_every": 1}, "forward"),
    "The all-gather of int8 weights of module 'layer'": ({"weights": "int8", "weight_differences": True}, "forward"),
}


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def _begin(operation: str) -> tuple[int, Any, torch.Tensor, str]:
    rank, device = begin_to_lose_one()
    options, where = OPERATIONS[operation]
    shape = (2, 1) if "replicas" in operation else (1, 2)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    model = _Net().to(device)
    fully_shard(model.layer, mesh=mesh if "replicas" in operation else mesh["shard"], reshard_after_forward=False)
    compress_communication(model, **options)
    data = torch.ones(4, 8, device=device)
    for _ in range(2):
        model(data).sum().backward()
    return rank, model, data, where


def _check(error: CollectiveError, operation: str) -> None:
    first, second, third = str(error).splitlines()
    assert first.startswith(f"{operation} failed: a rank exited, came later than the group's timeout"), error
    assert second.startswith("On rank 0, between ranks 0 and 1: "), error
    assert "restart all ranks" in third
    assert isinstance(error.__cause__, RuntimeError)
    assert str(error.__cause__)[:40] in second


def _step(model: Any, data: torch.Tensor, where: str, between: Callable[[], object]) -> None:
    if where == "forward":
        between()
    loss = model(data).sum()
    if where == "backward":
        between()
    loss.backward()


def _dies(operation: str) -> None:
    rank, model, data, where = _begin(operation)
    with pytest.raises(CollectiveError) as caught:
        _step(model, data, where, die if rank == VICTIM else lambda: None)
    _check(caught.value, operation)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_rank_that_dies_is_an_error_of_the_operation(operation: str) -> None:
    run_ranks(2, _dies, operation, expect_death={VICTIM})


def _dies_in_unshard(operation: str) -> None:
    rank, model, _, _ = _begin(operation)
    model.layer.reshard()
    if rank == VICTIM:
        die()
    with pytest.raises(CollectiveError) as caught:
        model.layer.unshard(async_op=True).wait()
    _check(caught.value, operation)


def test_a_rank_that_dies_while_weights_are_gathered_ahead() -> None:
    run_ranks(2, _dies_in_unshard, "The all-gather of bf16 weights of module 'layer'", expect_death={VICTIM})


def _is_late(operation: str) -> None:
    rank, model, data, where = _begin(operation)
    store = default_store()
    # Within the timeout: no error, and the gradient is that of both. Late means that the other rank came first.
    came_first = (lambda: store.wait(["came"])) if rank == VICTIM else (lambda: store.set("came", b""))
    _step(model, data, where, came_first)
    loss = model(data).sum()
    if rank == VICTIM:
        store.wait(["too late"], 5 * TIMEOUT)
        return
    with pytest.raises(CollectiveError) as caught:
        loss.backward()
    store.set("too late", b"")
    _check(caught.value, operation)


def test_a_late_rank_is_an_error_after_the_timeout_alone() -> None:
    run_ranks(2, _is_late, "The reduce-scatter of int8 gradients of module 'layer'")


def _does_not_call() -> None:
    rank, device = begin_to_lose_one()
    model = fully_shard(_Net().to(device), mesh=init_device_mesh(device.type, (2,)))
    store = default_store()
    if rank == VICTIM:
        store.wait(["told"], 5 * TIMEOUT)
        return
    with pytest.raises(CollectiveError) as caught:
        compress_communication(model)
    store.set("told", b"")
    _check(caught.value, "compress_communication, which every rank of the model has to call,")


def test_a_rank_that_does_not_compress_is_named() -> None:
    run_ranks(2, _does_not_call)
