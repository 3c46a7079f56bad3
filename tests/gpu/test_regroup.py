"""With NCCL, a job goes on without ranks that it loses: what gloo's tests cannot show. Those run on GPUs, too:
BAGUA_TEST_DEVICE=cuda BAGUA_TEST_SHARE_GPUS=1 pytest tests/distributed/test_regroup*.py."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import DEVICE_VARIABLE, SHARING_VARIABLE, visible_gpus
from support.regrouped import (
    SMALL_BUCKETS,
    Kill,
    check_ledgers,
    check_stopped_rank,
    die,
    drawn_joins,
    ends_early,
    join_job,
    keep_ledger,
    run_job,
)
from torch import nn

import bagua.torch_api as bagua
from bagua.net.library import library_path
from bagua.regroup import coordinator

STEPS = 8
TCP = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")
    monkeypatch.setenv(SHARING_VARIABLE, "1")


# Two ranks have P2P where there are two GPUs. More share them, as ranks of several hosts.
@pytest.mark.parametrize("how", ["with_bagua", "wrapper"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_step_of_each_rank_is_trained_once(how: str, ranks: int) -> None:
    kills = [Kill(ranks - 1, 2, "sent 2")] if ranks == 2 else [Kill(3, 2, "sent 2"), Kill(0, 4, "gradient 2")]
    dead = {one.rank for one in kills}
    codec = "bf16" if how == "wrapper" else None
    env = SMALL_BUCKETS if codec is None else {}
    check_ledgers(run_job(ranks, keep_ledger, kills, STEPS, how, codec, 1, env=env, expect_death=dead), STEPS, dead)


def test_each_step_is_trained_once_over_the_plugin() -> None:
    kills = [Kill(3, 2, "sent 2"), Kill(0, 4, "sent 3")]
    env = {**TCP, **SMALL_BUCKETS, "NCCL_NET_PLUGIN": str(library_path())}
    check_ledgers(
        run_job(4, keep_ledger, kills, STEPS, "with_bagua", None, 1, env=env, expect_death={0, 3}), STEPS, {0, 3}
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_processes_that_join_train_each_step_from_then_on(seed: int) -> None:
    joins, kills = drawn_joins(seed, 3, 2, STEPS)
    how = ("with_bagua", "wrapper")[seed % 2]
    results = run_job(
        *(3, keep_ledger, kills, STEPS, how, None, 1, joins),
        joiners=2,
        env=SMALL_BUCKETS,
        expect_death={one.rank for one in kills},
    )
    check_ledgers(results, STEPS, {rank for rank, one in enumerate(results) if one is None})


# --- a rank that waits for its GPU when another one dies --------------------------------------------------------------


def _waits_for_its_gpu(how: str) -> tuple[int, list[bool]]:
    rank = join_job(min_ranks=1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    model = bagua.with_bagua(net, [optimizer])
    current = coordinator.current()
    assert current is not None
    dropped = []
    while (step := bagua.regroup_step()) < 4:
        if rank == 1 and step == 2:
            # The other one has queued its pass, and waits.
            time.sleep(0.5)
            die()
        optimizer.zero_grad()
        loss = model(torch.randn(16, 64)).square().mean()
        loss.backward()
        if how == "item":
            assert net[0].weight.grad is None or net[0].weight.grad.sum().item() is not None
        elif how == "synchronize":
            torch.cuda.synchronize()
        elif how == "clip":
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        dropped.append(model.step_was_dropped)
    return dist.get_world_size(), dropped


@pytest.mark.parametrize("how", ["item", "synchronize", "clip", "step"])
def test_a_rank_that_waits_for_its_gpu_drops_the_step(how: str) -> None:
    first, _ = run_job(2, _waits_for_its_gpu, how, expect_death={1})
    assert first == (1, [False, False, True, False, False])


@pytest.mark.parametrize("ranks", [2, 4])  # with P2P, which tells nothing of it, and sockets
def test_others_go_on_without_a_rank_that_has_ended(ranks: int) -> None:
    assert run_job(ranks, ends_early) == [ranks - 1, ranks, *[ranks - 1] * (ranks - 2)]


# --- innocents -------------------------------------------------------------------------------------------------------


def test_a_rank_that_is_stopped_is_waited_for_up_to_the_timeout(tmp_path: Path) -> None:
    check_stopped_rank(tmp_path / "pid", 10, {})


# --- what is refused -------------------------------------------------------------------------------------------------


def _on_the_first_gpu() -> None:
    torch.cuda.set_device(0)
    with pytest.raises(ValueError, match="ranks 0 and 1 use the same GPU"):
        bagua.init_process_group(regroup=bagua.Regroup())


@pytest.mark.skipif(len(visible_gpus()) < 2, reason="needs 2 GPUs; that ranks share the only one is allowed")
def test_ranks_that_did_not_choose_a_gpu_are_told_so() -> None:
    run_job(2, _on_the_first_gpu)


def _refusals() -> None:
    rank = join_job()
    values = torch.ones(4)
    with pytest.raises(NotImplementedError, match="of a tensor on a GPU is not supported"):
        (dist.send if rank == 0 else dist.recv)(values, 1 - rank)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = 2 * values
        with pytest.raises(NotImplementedError, match="captured in a CUDA graph"):
            dist.all_reduce(doubled)
    if torch.cuda.device_count() > 1:
        net = nn.Linear(4, 4, device=torch.device("cuda", 1 - rank))
        with pytest.raises(NotImplementedError, match=r"a module on cuda:. is not supported under regroup"):
            bagua.with_bagua(net, [torch.optim.SGD(net.parameters(), 0.1)])
    dist.all_reduce(values)
    assert values.tolist() == [2.0] * 4
    bagua.destroy_process_group()
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    with pytest.raises(ValueError, match="TORCH_NCCL_BLOCKING_WAIT=1"):
        bagua.init_process_group(regroup=bagua.Regroup())


def test_what_does_not_follow_on_gpus_is_refused_by_name() -> None:
    run_job(2, _refusals)
