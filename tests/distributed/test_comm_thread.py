"""Models that train over one group at the same time: their operations keep one order."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.sweeps import each_value_once, rest_is_deep
from support.training import algorithm_of, batches, begin, check_ranks_equal, check_tensor_on_ranks, loss_of
from torch import Tensor, nn

from bagua.torch_api import communication
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.base import AlgorithmImpl
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer
from bagua.torch_api.communication import ReduceOp
from bagua.torch_api.data_parallel import DistributedDataParallel
from bagua.torch_api.data_parallel.functional import all_reduce

STEPS = 10
PAIRS = {
    "both on the thread": [("bytegrad", {"hierarchical": False})] * 2,
    "one that needs no thread": [("gradient_allreduce", {}), ("bytegrad", {"hierarchical": False})],
    "hierarchical": [("gradient_allreduce", {"hierarchical": True})] * 2,
}


def _threads() -> int:
    return sum(thread.name == "bagua-comm" for thread in threading.enumerate())


def _model(seed: int, algorithm: tuple[str, dict[str, Any]], device: torch.device) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    width = 1000 + 300 * seed
    net: Any = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 4)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    return net.with_bagua([optimizer], Algorithm.init(algorithm[0], **algorithm[1])), optimizer


def _train_together(algorithms: list[tuple[str, dict[str, Any]]], name: str, rank: int, device: torch.device) -> None:
    models = [_model(seed, algorithm, device) for seed, algorithm in enumerate(algorithms)]
    for step in range(STEPS):
        batch = batches(rank, 1, device, seed=step)[0]
        for _, optimizer in models:
            optimizer.zero_grad()
        torch.stack([loss_of(model, batch) for model, _ in models]).sum().backward()
        for _, optimizer in models:
            optimizer.step()
    for model, _ in models:
        check_ranks_equal(model, name)
    assert _threads() <= 1, name


def _two_models_in_one_loss(pairs: dict[str, list[tuple[str, dict[str, Any]]]]) -> None:
    rank, device = begin()
    for name, algorithms in pairs.items():
        _train_together(algorithms, name, rank, device)
        gc.collect()
        assert _threads() == 0, f"{name}: the thread has outlived its users"


@pytest.mark.parametrize("world", rest_is_deep([2, 3], 0))
def test_two_models_in_one_loss(world: int) -> None:
    run_ranks(world, _two_models_in_one_loss, PAIRS)


# --- what others say in the group during a backward pass -------------------------------------------------------------


class _UsersCollective(torch.autograd.Function):
    """Sums in the backward pass, as a contrastive loss or statistics do."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        # As long as a bucket, so that one taken for the other would not be noticed by its length.
        values = torch.full((WIDTH * WIDTH + WIDTH,), float(dist.get_rank() + 1), device=gradients[0].device)
        dist.all_reduce(values)
        assert torch.equal(values, torch.full_like(values, sum(range(1, dist.get_world_size() + 1))))
        return gradients[0]


class _UsersMessages(torch.autograd.Function):
    """Exchanges with the other rank in the backward pass, as pipelines do."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        peer = 1 - dist.get_rank()
        sent = torch.full((100_000,), float(dist.get_rank()), device=gradients[0].device)
        received = torch.empty_like(sent)
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, received, peer), dist.P2POp(dist.isend, sent, peer)])
        for work in works:
            work.wait()
        assert torch.equal(received, torch.full_like(received, float(peer)))
        return gradients[0]


WIDTH = 512  # a layer has 1 MiB: more than its chunks may have to travel by collectives
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a collective": _UsersCollective.apply,
    "messages": _UsersMessages.apply,
    "functional": lambda x: x - all_reduce(x.mean(dim=0), ReduceOp.AVG),
}


class _Layers(nn.Module):
    def __init__(self, other: str) -> None:
        super().__init__()
        self.other = other
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = OTHERS[self.other](torch.tanh(layer(x)))
        return x


SEVERAL_OPERATIONS = [
    ("bytegrad", {}),
    ("bytegrad", {"hierarchical": False}),
    ("qadam", {}),
    ("qadam", {"hierarchical": False}),
]


@pytest.mark.parametrize(("other", "algorithm"), each_value_once(list(OTHERS), SEVERAL_OPERATIONS), ids=str)
@on_ranks(2)
def test_communication_of_users_in_a_backward_pass_is_not_mixed_up(
    rank: int, device: torch.device, other: str, algorithm: tuple[str, dict[str, Any]]
) -> None:
    os.environ["BAGUA_DEFAULT_BUCKET_SIZE"] = str(1 << 20)
    torch.manual_seed(0)
    net: Any = _Layers(other).to(device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if algorithm[0] == "qadam":
        optimizer = QAdamOptimizer(net.parameters(), lr=1e-4, warmup_steps=5)
        net.with_bagua([optimizer], QAdamAlgorithm(optimizer, **algorithm[1]))
    else:
        net.with_bagua([optimizer], Algorithm.init(algorithm[0], **algorithm[1]))
    torch.manual_seed(rank)
    for _ in range(12):
        optimizer.zero_grad()
        net(torch.randn(16, WIDTH).to(device)).square().mean().backward()
        optimizer.step()
    check_ranks_equal(net, f"{other} {algorithm}")


class _OnDefaultGroup(AlgorithmImpl):
    """As third parties write them: the operation says what it says in the group that users communicate in."""

    def init_operations(self, bagua_ddp: Any, bucket: Any) -> None:
        bucket.clear_ops()
        bucket.append_python_op(lambda _: communication.allreduce_inplace(bucket.flattened_tensor(), op=ReduceOp.AVG))


@pytest.mark.parametrize("third_party", [False, True])
@on_ranks(2)
def test_agreeing_on_unused_parameters_is_not_mixed_up_with_operations(
    rank: int, device: torch.device, third_party: bool
) -> None:
    torch.manual_seed(0)
    models = [
        DistributedDataParallel(
            nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).to(device),
            algorithm=algorithm_of(_OnDefaultGroup) if third_party else Algorithm.init("bytegrad", hierarchical=False),
            bucket_cap_mb=0.001,
            find_unused_parameters=True,
        )
        for _ in range(2)
    ]
    torch.manual_seed(rank)
    for _ in range(12):
        torch.stack([model(torch.randn(16, 64).to(device)).square().mean() for model in models]).sum().backward()
        for model in models:
            check_tensor_on_ranks(model.module[0].weight.grad, "gradient")
            model.zero_grad()
