"""A rank is missing when replicas exchange weights: the error speaks of the exchange, and advises what helps there."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.dying_rank import VICTIM, begin_to_lose_one, die
from support.local_steps import RATE, make_step, model_of
from support.processes import wait_until
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bagua.torch_api as bagua
from bagua.job.failure_report import CollectiveError
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.sharded_replicas import exchange_shards

STEPS = 4  # that both ranks make


def _wrapped(device: torch.device, algorithm: Algorithm) -> tuple[Any, torch.optim.Optimizer]:
    model = model_of(0).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return bagua.with_bagua(model, [optimizer], algorithm), optimizer


def _sharded(device: torch.device, algorithm: Algorithm) -> tuple[Any, torch.optim.Optimizer]:
    mesh = init_device_mesh(device.type, (2, 1), mesh_dim_names=("replicate", "shard"))
    model: Any = fully_shard(model_of(0).to(device), mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    exchange_shards(model, [optimizer], algorithm, mesh.get_group("replicate"))
    return model, optimizer


def _train(folder: str, name: str, options: dict[str, Any], how: str, is_sharded: bool) -> str | None:
    rank, device = begin_to_lose_one()
    model, optimizer = (_sharded if is_sharded else _wrapped)(device, Algorithm.init(name, **options))
    for number in range(STEPS):
        make_step(model, [optimizer], number, rank)
    told = Path(folder, "told")
    if rank == VICTIM:
        # Only then has it made all of the exchanges.
        Path(folder, "stepped").touch()
        if how == "killed":
            die()
        if how == "leaves":
            dist.destroy_process_group()
        wait_until(told.exists, "the other rank")
        # The rest of its group is gone.
        os._exit(0)
    wait_until(Path(folder, "stepped").exists, "the other rank")

    def go_on() -> None:
        for number in range(STEPS, 2 * STEPS):
            make_step(model, [optimizer], number, rank)

    with pytest.raises(CollectiveError) as raised:
        go_on()
    told.touch()
    assert raised.value.missing_ranks == (VICTIM,)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    return str(raised.value)


HOW = {
    "killed": "exited.",
    "silent": "did not respond within 3 s.",
    "leaves": "ended (end of script or sys.exit), after fewer",
}
EXCHANGE = "waiting for the weights exchanged in round "
WEIGHTS = "waiting for exchanged weights "
GRADIENTS = "waiting for the gradients of a backward pass ("


@pytest.mark.parametrize(
    ("name", "options", "how", "is_sharded", "where"),
    [
        ("local_sgd", {"sync_every": 2}, "killed", False, f"{EXCHANGE}3 ("),
        ("diloco", {"sync_every": 3}, "silent", True, f"{EXCHANGE}2 ("),
        ("streaming_diloco", {"sync_every": 6, "delay": 1}, "leaves", False, f"{EXCHANGE}2, fragment 2 of 2 ("),
        ("diloco", {"sync_every": 3, "warmup_steps": 9}, "leaves", False, GRADIENTS),
        ("async", {"warmup_steps": 9}, "leaves", False, GRADIENTS),
        ("decentralized", {"hierarchical": False}, "leaves", False, f"{WEIGHTS}("),
        ("decentralized", {"hierarchical": False, "peer_selection_mode": "shift_one"}, "killed", False, f"{WEIGHTS}("),
    ],
)
def test_a_rank_is_missing(
    tmp_path: Path, name: str, options: dict[str, Any], how: str, is_sharded: bool, where: str
) -> None:
    (told, _) = run_ranks(2, _train, str(tmp_path), name, options, how, is_sharded, expect_death={VICTIM})
    first, second, advice, _ = told.splitlines()
    assert first.startswith(f"Rank {VICTIM} (host ")
    assert HOW[how] in first
    assert second.startswith(f"Operation on rank 0: {where}")
    assert ("equal numbers of batches" in advice) == (how == "leaves")
    assert "join" not in advice, "which these algorithms refuse"
