"""A process that is started while the job has begun joins it: what it has then, who is refused, who is waited for."""

from __future__ import annotations

import copy
import datetime
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import wait_until
from support.regrouped import (
    SMALL_BUCKETS,
    check_ledgers,
    die,
    drawn_joins,
    job_store,
    join_job,
    keep_ledger,
    on_cpus,
    run_job,
    start,
    use_device,
)
from support.sweeps import rest_is_deep
from torch import nn

import bagua.torch_api as bagua
from bagua.regroup import coordinator, groups, joining
from bagua.regroup.following import Following
from bagua.regroup.job_step import WorldChange
from bagua.regroup.transfer import Fetch
from bagua.torch_api.checkpoint import load_checkpoint

STEPS = 8


# Some of those that join, and of those that they join, die at any point of that. Some cannot follow.
@pytest.mark.parametrize("seed", rest_is_deep(range(250), *range(3)))
def test_processes_that_join_train_each_step_from_then_on(seed: int) -> None:
    how = ("with_bagua", "wrapper")[seed % 2]
    codec = "bf16" if seed % 5 == 3 else None
    joins, kills = drawn_joins(seed, 3, 2, STEPS)
    on_loss, has_one_pass = "repeat" if seed % 4 in (1, 2) else "drop", seed % 4 == 2
    results = run_job(
        *(3, keep_ledger, kills, STEPS, how, codec, 1, joins, seed % 3 != 2, 1 + has_one_pass, on_loss, has_one_pass),
        joiners=2,
        env=SMALL_BUCKETS if codec is None else {},
        expect_death={one.rank for one in kills},
    )
    check_ledgers(results, STEPS, {rank for rank, one in enumerate(results) if one is None}, has_one_pass)


# --- what one that joins has -----------------------------------------------------------------------------------------


class _Position:
    """Of a sampler."""

    def __init__(self) -> None:
        self.samples = 0

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.samples = state["samples"]


def _net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4), nn.Linear(4, 4))
    net[0].weight = nn.Parameter(torch.randn(8, 32).t())  # not contiguous
    net[4].requires_grad_(False)
    return net


def _loss(model: nn.Module, number: int, step: int) -> torch.Tensor:
    torch.manual_seed(100 * number + step)
    return model(torch.randn(16, 8)).square().mean()


def _join_the_last_one(how: str) -> None:
    """Of two ranks one dies, and another process of its RANK joins the other."""
    store, number, is_new = job_store(), int(os.environ["RANK"]), os.environ["WORLD_SIZE"] == "3"
    if is_new:
        store.wait(["lost"])
        os.environ.update(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    use_device()
    net = _net(number)
    optimizer = torch.optim.Adam([{"params": net[0].parameters()}, {"params": net[1:].parameters(), "lr": 3e-3}], 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    position = _Position()
    start(min_ranks=1, state={"scheduler": scheduler, "position": position})
    dist.barrier()  # alone or not
    fetches: list[Fetch] = []
    original = Fetch.run

    def run(fetch: Fetch, *arguments: Any) -> bool:
        fetches.append(fetch)
        return original(fetch, *arguments)

    Fetch.run = run  # type: ignore[method-assign]
    if how == "wrapper":
        model: Any = bagua.data_parallel.DistributedDataParallel(net, optimizers=[optimizer])
    else:
        model = bagua.with_bagua(net, [optimizer])
    joined: list[tuple[int, nn.Sequential, torch.optim.Optimizer]] = []

    def keep() -> None:
        twin = _net(7)
        twin.load_state_dict(net.state_dict())
        stepper = torch.optim.Adam([{"params": twin[0].parameters()}, {"params": twin[1:].parameters()}], 1.0)
        stepper.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        joined.append((bagua.regroup_step(), twin, stepper))

    def follow(change: WorldChange) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= change.world_size / change.previous_world_size
        if change.joined_ranks:
            assert (change.joined_ranks, change.lost_ranks, change.rank) == ((1,), (), 0)
            keep()
        else:
            assert change.lost_ranks == (1,)
            store.set("lost", b"")

    model.on_regroup(follow)
    if is_new:
        keep()
        # It has followed the steps of the others, so that there was nothing left to take but what they do not step.
        (fetch,) = fetches
        assert (fetch.differing, fetch.received) == (0, 0)
        assert (dist.get_rank(), os.environ["RANK"], bagua.get_world_size()) == (1, "1", 2)
    while not joined or bagua.regroup_step() < joined[0][0] + 4:
        step = bagua.regroup_step()
        if number == 1 and step == 2:
            die()
        optimizer.zero_grad()
        loss = _loss(model, number, step)
        loss.backward()
        optimizer.step()
        if not model.step_was_dropped:
            scheduler.step()
            position.samples += 1
        lost: tuple[int, ...] = (1,)
        try:
            dist.all_reduce(loss)  # of the program; a rank that joins raises nothing here
        except bagua.Regrouped as error:
            lost = error.lost_ranks
        assert lost == (1,)
    begin, twin, stepper = joined[0]
    assert not model.step_was_dropped
    # Plain torch: the mean of two replicas' gradients.
    other = copy.deepcopy(twin)
    schedule = torch.optim.lr_scheduler.StepLR(stepper, 3, 0.7)
    schedule.last_epoch = begin
    for step in range(begin, begin + 4):
        for mine, theirs in zip(twin.parameters(), other.parameters(), strict=True):
            theirs.data.copy_(mine.data)
        for one, first in ((twin, 0), (other, 2)):
            one.zero_grad()
            _loss(one, first, step).backward()
        for mine, theirs in zip(twin.parameters(), other.parameters(), strict=True):
            if mine.grad is not None and theirs.grad is not None:
                mine.grad = mine.grad * 0.5 + theirs.grad * 0.5
        stepper.step()
        schedule.step()
    for mine, plain in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, plain)
    told = [
        {
            name: values.tolist()
            for name, values in net.state_dict().items()
            if how == "wrapper" or "running" not in name
        },
        [{name: values.tolist() for name, values in optimizer.state[one].items()} for one in net[:4].parameters()],
        [group["lr"] for group in optimizer.param_groups],
        (scheduler.last_epoch, position.samples, bagua.regroup_step()),
    ]
    assert scheduler.last_epoch == position.samples == bagua.regroup_step()
    if how == "wrapper":
        model.eval()
        model(torch.ones(2, 8))  # ranks broadcast buffers
        told[0] = {name: values.tolist() for name, values in net.state_dict().items()}
    everybody: list[Any] = [None, None]
    dist.all_gather_object(everybody, told)
    assert everybody[0] == everybody[1]


@pytest.mark.parametrize("how", ["with_bagua", "wrapper"])
def test_one_that_joins_trains_as_if_it_had_been_there_from_that_step_on(how: str) -> None:
    run_job(2, _join_the_last_one, how, joiners=1, expect_death={1})


# --- who is refused --------------------------------------------------------------------------------------------------


def _train_until(store: dist.Store, key: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Ranks end together: at the step that the first one says that sees the key."""
    while True:
        step = bagua.regroup_step()
        if store.check([key]):
            store.compare_set(f"{key} end", "", str(step + 2))
        if store.check([f"{key} end"]) and step >= int(store.get(f"{key} end")):
            return step
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        store.set("steps", b"")
        total = torch.ones(1)
        dist.all_reduce(total)  # of the program; where ranks join, it raises nothing
        assert total.item() == dist.get_world_size()
        time.sleep(0.02)  # leaves the processors to those that join


def _refusals() -> tuple[int, int]:
    store, is_new = job_store(), os.environ["WORLD_SIZE"] == "3"
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    if not is_new:
        join_job(min_ranks=1)
        model = bagua.with_bagua(net, [optimizer])
        changes: list[WorldChange] = []
        model.on_regroup(changes.append)
        _train_until(store, "joined", model, optimizer)
        assert [one.joined_ranks for one in changes] == [(2,)]
        assert not model.step_was_dropped
        return dist.get_world_size(), bagua.regroup_step()
    store.wait(["steps"])
    with pytest.raises(RuntimeError, match=r"this process has min_ranks=2, .* and rank 0 has min_ranks=1"):
        bagua.init_process_group(regroup=bagua.Regroup(min_ranks=2), timeout=60, backend="gloo")
    with pytest.raises(RuntimeError, match=r"on_loss='repeat', .* and rank 0 has .* on_loss='drop'"):
        bagua.init_process_group(regroup=bagua.Regroup(min_ranks=1, on_loss="repeat"), timeout=60, backend="gloo")
    bagua.init_process_group(regroup=bagua.Regroup(min_ranks=1), timeout=60, backend="gloo")
    wide = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False))
    for other, given, text in (
        (wide, torch.optim.SGD(wide.parameters(), 0.1), r"At position 0, rank 0 has '0.weight' \(float32 \[4, 4\].*"),
        (plain, torch.optim.SGD(plain.parameters(), 0.1), "different frozen parameters and buffers. At position 0"),
        (net, torch.optim.Adam(net.parameters(), 0.1), "rank 2 has torch.optim.adam.Adam"),
        (net, torch.optim.SGD([{"params": [one]} for one in net.parameters()], 0.1), "4 param_groups, rank 0 has 1"),
    ):
        with pytest.raises(RuntimeError, match=f"This process cannot join the job, as rank 2.\n.*{text}"):
            bagua.with_bagua(other, [given])
    with pytest.raises(RuntimeError, match="the algorithm gradient_allreduce; rank 2 has the algorithm bytegrad"):
        bagua.with_bagua(net, [optimizer], "bytegrad")
    model = bagua.with_bagua(net, [optimizer])
    for call in (dist.barrier, bagua.barrier, lambda: load_checkpoint("nowhere", net)):
        with pytest.raises(RuntimeError, match=r"joined the job as rank 2, and calls a collective before the forward"):
            call()
    store.set("joined", b"")
    _train_until(store, "joined", model, optimizer)
    return dist.get_world_size(), bagua.regroup_step()


@on_cpus("its processes ask for gloo")
def test_one_that_differs_is_refused_and_the_others_train_on() -> None:
    results = run_job(2, _refusals, joiners=1)
    assert results == [(3, results[0][1])] * 3


def _ends_meanwhile() -> str:
    store, is_new = job_store(), os.environ["WORLD_SIZE"] == "2"
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    original = Following.run

    def run(self: Following, *arguments: Any) -> bool:
        store.set("follows", b"")
        return original(self, *arguments)

    Following.run = run  # type: ignore[method-assign]
    if is_new:
        store.wait(["step"])
    bagua.init_process_group(regroup=bagua.Regroup(), timeout=60, backend="gloo")
    if is_new:
        with pytest.raises(RuntimeError) as caught:
            bagua.with_bagua(net, [optimizer])
        return str(caught.value)
    model = bagua.with_bagua(net, [optimizer])
    while not store.check(["follows"]):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        store.set("step", b"")
    bagua.destroy_process_group()
    return ""


def test_a_job_that_ends_while_one_follows_it_is_not_waited_for() -> None:
    _, text = run_job(1, _ends_meanwhile, joiners=1)
    assert text.startswith("The job at this store has ended: all ranks of epoch 0 are gone.")


def _with_scaler() -> tuple[int, list[float], float]:
    """Each third step has infinities."""
    store, is_new = job_store(), os.environ["WORLD_SIZE"] == "2"
    net = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    fetches: list[Fetch] = []
    original = Fetch.run

    def run(fetch: Fetch, *arguments: Any) -> bool:
        fetches.append(fetch)
        return original(fetch, *arguments)

    Fetch.run = run  # type: ignore[method-assign]
    if is_new:
        store.wait(["step 10"])
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=2)
    bagua.init_process_group(regroup=bagua.Regroup(state={"scaler": scaler}), timeout=60, backend="gloo")
    model = bagua.with_bagua(net, [optimizer])
    if is_new:
        store.set("end", str(bagua.regroup_step() + 5))
        (fetch,) = fetches
        assert (fetch.differing, fetch.received) == (0, 0)
    while not store.check(["end"]) or bagua.regroup_step() < int(store.get("end")):
        step = bagua.regroup_step()
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4) * (step % 7)).square().sum()
        scaler.scale(loss * (float("inf") if step % 3 == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        store.set(f"step {step}", b"")
    return bagua.regroup_step(), net.weight.flatten().tolist(), scaler.get_scale()


def test_one_that_joins_follows_steps_that_a_scaler_leaves_out() -> None:
    first, second = run_job(1, _with_scaler, joiners=1)
    assert first == second


def _all_are_killed() -> str:
    store, number = job_store(), int(os.environ["RANK"])
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    if number < 2:
        join_job()
        bagua.with_bagua(net, [optimizer])
        store.add("wrapped", 1)
        die()
    wait_until(lambda: store.add("wrapped", 0) == 2, "both have wrapped", 60)
    bagua.init_process_group(regroup=bagua.Regroup(), timeout=60, backend="gloo")
    joining.CONFIRM_S = 0.2
    with pytest.raises(RuntimeError) as caught:
        bagua.with_bagua(net, [optimizer])
    return str(caught.value)


@on_cpus("its processes ask for gloo")
def test_a_job_whose_ranks_were_all_killed_is_not_waited_for() -> None:
    *_, text = run_job(2, _all_are_killed, joiners=1, expect_death={0, 1})
    assert text.startswith("The job at this store has ended: all ranks of epoch 0 are gone.")


def _too_late() -> str:
    store, is_new = job_store(), os.environ["WORLD_SIZE"] == "2"
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    if not is_new:
        join_job()
        bagua.with_bagua(net, [optimizer])
        bagua.destroy_process_group()
        store.set("ended", b"")
        return ""
    store.wait(["ended"])
    bagua.init_process_group(regroup=bagua.Regroup(), timeout=60, backend="gloo")
    with pytest.raises(RuntimeError) as caught:
        bagua.with_bagua(net, [optimizer])
    return str(caught.value)


@on_cpus("its processes ask for gloo")
def test_a_job_that_has_ended_is_not_joined() -> None:
    _, text = run_job(1, _too_late, joiners=1)
    assert text.startswith("The job at this store has ended: all ranks of epoch 0 are gone.")


# --- who is waited for -----------------------------------------------------------------------------------------------


def _slow_ones(pid: str) -> tuple[int, str]:
    """Process 2 is stopped while it joins, process 3 hangs, and process 4 cannot be connected."""
    store, number = job_store(), int(os.environ["RANK"])
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    if number < 2:
        join_job()
        model = bagua.with_bagua(net, [optimizer])
        _train_until(store, "stopped one", model, optimizer)
        assert not model.step_was_dropped
        joining.STALL_S = 2.0
        _train_until(store, "hanging one", model, optimizer)
        assert not model.step_was_dropped
        groups.CONNECT_TIMEOUT = coordinator.CONNECT_TIMEOUT = datetime.timedelta(seconds=2)
        _train_until(store, "unconnected one", model, optimizer)
        assert not model.step_was_dropped
        return dist.get_world_size(), ""
    store.wait([{2: "steps", 3: "stopped one", 4: "hanging one"}[number]])
    bagua.init_process_group(regroup=bagua.Regroup(), timeout=60, backend="gloo")
    original = Fetch.run

    def run(self: Fetch, *arguments: Any) -> bool:
        if number == 2:
            Path(pid).write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            return original(self, *arguments)
        if number == 3:
            wait_until_left_out()
            return False
        groups.Connecting._run = lambda _: None  # type: ignore[method-assign]
        groups.Connecting.result = lambda *_: wait_until_left_out()  # type: ignore[method-assign,assignment]
        return original(self, *arguments)

    def wait_until_left_out() -> None:
        current = coordinator.current()
        assert current is not None
        wait_until(lambda: current.is_pending, "the others have lost patience", 60)

    Fetch.run = run  # type: ignore[method-assign]
    text = ""
    try:
        model = bagua.with_bagua(net, [optimizer])
    except RuntimeError as error:
        text = str(error)
    names = ("stopped one", "hanging one", "unconnected one")
    store.set(names[number - 2], b"")
    if number == 2:
        for name in names:
            _train_until(store, name, model, optimizer)
    return dist.get_world_size(), text


@on_cpus("its processes ask for gloo")
def test_one_that_is_stopped_while_it_joins_is_waited_for_and_one_that_hangs_is_not(tmp_path: Path) -> None:
    pid, done = tmp_path / "pid", threading.Event()

    def wake() -> None:
        while not done.wait(0.1):
            text = pid.read_text() if pid.exists() else ""
            if text and Path(f"/proc/{text}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                done.wait(1.5)
                os.kill(int(text), signal.SIGCONT)
                return

    thread = threading.Thread(target=wake)
    thread.start()
    try:
        *joined, (_, hanging), (_, unconnected) = run_job(2, _slow_ones, str(pid), joiners=3)
    finally:
        done.set()
        thread.join()
    assert joined == [(3, "")] * 3
    assert hanging.startswith("The other ranks have taken this one for lost")
    assert unconnected.startswith("The other ranks have taken this one for lost")
