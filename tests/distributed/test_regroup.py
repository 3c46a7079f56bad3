"""The job goes on without ranks that it loses: what is trained, who takes whose state, and what raises."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import wait_until
from support.ranks import run_ranks
from support.regrouped import (
    SMALL_BUCKETS,
    Kill,
    check_ledgers,
    device_type,
    die,
    die_before_second_total,
    drawn_kills,
    ends_early,
    join_job,
    keep_ledger,
    on_cpus,
    run_job,
)
from support.sweeps import rest_is_deep
from torch import nn

import bagua.torch_api as bagua
from bagua.engine import regrouping
from bagua.fsdp import compress_communication
from bagua.job.torch_internals import default_store
from bagua.regroup import coordinator, detection
from bagua.regroup.groups import abort
from bagua.regroup.job_step import WorldChange
from bagua.torch_api import checkpoint

STEPS = 8


# --- what is trained -------------------------------------------------------------------------------------------------


# Twenty kills of five jobs; a thousand in `make deep`.
@pytest.mark.parametrize("seed", rest_is_deep(range(250), *range(5)))
def test_each_step_of_each_rank_is_trained_once(seed: int) -> None:
    how = ("with_bagua", "wrapper")[seed % 2]
    codec = "bf16" if seed % 7 == 6 else None
    # One model, two with a pass each, two with one pass.
    models, on_loss = 1 + (seed % 5 > 1), "repeat" if seed % 5 in (1, 3, 4) else "drop"
    has_one_pass = seed % 5 == 4
    kills = drawn_kills(seed, 6, 4, STEPS, models)
    dead = {one.rank for one in kills}
    results = run_job(
        *(6, keep_ledger, kills, STEPS, how, codec, 1, (), True, models, on_loss, has_one_pass),
        env=SMALL_BUCKETS if codec is None else {},
        expect_death=dead,
    )
    check_ledgers(results, STEPS, dead, has_one_pass)


@pytest.mark.parametrize(
    ("point", "codec", "on_loss"),
    rest_is_deep([("connected", "bf16", "drop"), ("told", None, "drop"), ("repeating", "bf16", "repeat")], 1, 2),
)
def test_ranks_that_follow_each_other_die_at_once_or_while_others_regroup(
    point: str, codec: str | None, on_loss: str
) -> None:
    kills = [Kill(0, 3, "gradient 2"), Kill(1, 3, "gradient 2"), Kill(2, 3, point)]
    results = run_job(
        *(5, keep_ledger, kills, STEPS, "with_bagua", codec, 1, (), True, 1, on_loss),
        env=SMALL_BUCKETS,
        expect_death={0, 1, 2},
    )
    check_ledgers(results, STEPS, {0, 1, 2})
    assert results[3]["phases"][-1] == (3, [3, 4])
    assert on_loss == "drop" or results[3]["dropped"] == results[4]["dropped"] == 0


# --- a run that had that membership from that step on ----------------------------------------------------------------


def _mlp(device: torch.device | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)).to(device)


def _loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    torch.manual_seed(100 * rank + step)
    return model(torch.randn(16, 8)).square().mean()


def _train_and_replay(how: str, on_loss: str) -> None:
    rank = join_job(on_loss=on_loss)
    net = _mlp()
    parts = [net[:3], net[3]] if how == "two models" else [net]
    optimizers = [torch.optim.Adam(one.parameters(), 1e-2) for one in parts]
    optimizer, model = optimizers[0], net
    if how == "wrapper":
        views = on_loss == "drop"
        model = bagua.data_parallel.DistributedDataParallel(
            net, optimizers=[optimizer], gradient_as_bucket_view=views, find_unused_parameters=not views
        )
    elif how.startswith("two models"):
        model = bagua.with_bagua(net[:3], [optimizer])
        bagua.with_bagua(net[3], optimizers[-1:])
    else:
        bagua.with_bagua(net, [optimizer])
    after: list[Any] = []

    def keep(change: WorldChange) -> None:
        # Where autograd has another thread for a GPU, this is that thread, which has no default device.
        device = net[0].weight.device
        twins = [_mlp(device), _mlp(device)]
        for twin in twins:
            twin.load_state_dict(net.state_dict())
        parts = [twins[0][:3], twins[0][3]] if how == "two models" else twins[:1]
        steppers = [torch.optim.Adam(one.parameters(), 1e-2) for one in parts]
        for stepper, one in zip(steppers, optimizers, strict=True):
            stepper.load_state_dict(copy.deepcopy(one.state_dict()))
        after.append((change, twins, steppers))

    model.on_regroup(keep)
    passes = 0
    while (step := bagua.regroup_step()) < STEPS:
        net.zero_grad()
        loss = _loss(nn.Sequential(model, net[3]) if how.startswith("two") else model, rank, step)
        if rank == 1 and step == 4:
            net[0].weight.register_hook(die)  # others have its first gradients
        loss.backward()
        for one in optimizers:
            one.step()
        passes += 1
    assert passes == STEPS + (on_loss == "drop")
    ((change, twins, steppers),) = after
    assert (change.step, change.lost_ranks, change.previous_world_size) == (4, (1,), 3)
    # Plain torch: the mean of two replicas' gradients.
    for step in range(4, STEPS):
        twins[1].load_state_dict({**twins[1].state_dict(), **dict(twins[0].named_parameters())})
        for twin, first_rank in zip(twins, (0, 2), strict=True):
            twin.zero_grad()
            _loss(twin, first_rank, step).backward()
        for one, other in zip(twins[0].parameters(), twins[1].parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            one.grad = one.grad * 0.5 + other.grad * 0.5
        for stepper in steppers:
            stepper.step()
    for one, other in zip(net.parameters(), twins[0].parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("how", "on_loss"),
    [
        ("with_bagua", "drop"),
        ("two models with one optimizer", "drop"),
        ("two models with one optimizer", "repeat"),
        ("two models", "repeat"),
        ("with_bagua", "repeat"),
        ("wrapper", "repeat"),
    ],
)
def test_survivors_train_as_if_they_had_been_two_from_that_step_on(how: str, on_loss: str) -> None:
    run_job(3, _train_and_replay, how, on_loss, env=SMALL_BUCKETS, expect_death={1})


def _batch(rank: int, step: int, number: int) -> torch.Tensor:
    """Of uneven sizes; for some there are no samples, and one that does not count."""
    count = (3 * rank + step + number) % 5
    generator = torch.Generator("cpu").manual_seed(100 * rank + 10 * step + number)
    return torch.randn(count, 5, dtype=torch.float64, generator=generator, device="cpu")


def _train_weighted(how: str, on_loss: str, has_told: bool) -> int:
    """Rank 1 dies when it has told the others what its batches count for, or before that."""
    rank = join_job(on_loss=on_loss)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).double()
    plain = copy.deepcopy(net)
    optimizer, of_plain = (torch.optim.SGD(one.parameters(), 0.5) for one in (net, plain))
    if how == "wrapper":
        model: Any = bagua.data_parallel.DistributedDataParallel(net, optimizers=[optimizer], batch_weights=True)
    else:
        model = bagua.with_bagua(net, [optimizer], count_batch=True)
    device, dropped = net[0].weight.device, 0
    no_sync = model.no_sync if how == "wrapper" else model.bagua_ddp.no_sync
    while (step := bagua.regroup_step()) < 5:
        optimizer.zero_grad()
        for number in range(2):
            batch = _batch(rank, step, number).to(device)
            if how == "wrapper":
                model.set_batch_weight(len(batch))
                batch = batch if len(batch) else torch.full((1, 5), torch.inf, dtype=torch.float64)
            elif not len(batch):
                batch = _batch(2, 1, 0).to(device)
            if rank == 1 and step == 2 and number == 1:
                net[0].weight.register_hook(die) if has_told else die()
            with no_sync() if number == 0 else contextlib.nullcontext():
                model(batch).square().mean().backward()
        optimizer.step()
        dropped += model.step_was_dropped
    # One process with the whole batch of those that were there.
    for step in range(5):
        batches = [_batch(one, step, number) for one in ((0, 1, 2) if step < 2 else (0, 2)) for number in range(2)]
        if how != "wrapper":
            batches = [one if len(one) else _batch(2, 1, 0) for one in batches]
        of_plain.zero_grad()
        plain(torch.cat(batches).to(device)).square().mean().backward()
        of_plain.step()
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    return dropped


@pytest.mark.parametrize(
    ("how", "on_loss", "has_told"),
    rest_is_deep(
        [
            ("with_bagua", "drop", False),
            ("wrapper", "repeat", True),
            ("with_bagua", "drop", True),
            ("with_bagua", "repeat", False),
        ],
        *range(2),
    ),
)
def test_batches_of_those_that_are_left_count_by_their_samples(how: str, on_loss: str, has_told: bool) -> None:
    dropped = int(on_loss == "drop")
    assert run_job(3, _train_weighted, how, on_loss, has_told, expect_death={1}) == [dropped, None, dropped]


# --- a step that one survivor has made, and another has not -----------------------------------------------------------


class _Count:
    """Something that follows the steps, as a scheduler does."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def _wait_until_told() -> None:
    current = coordinator.current()
    assert current is not None
    wait_until(lambda: current.is_pending, "this rank is told of the loss", 60)


def _lose_one_that_has_told_half(flag: str, second_dies: bool, on_loss: str) -> tuple[str, float, int, int] | None:
    count = _Count()
    rank = join_job(state={"count": count}, min_ranks=1, on_loss=on_loss)
    torch.manual_seed(0)
    net = nn.Linear(1024, 512)  # 2 MiB: its sum goes by messages
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    model = bagua.with_bagua(net, [optimizer])
    store = default_store()
    dropped = []
    while (step := bagua.regroup_step()) < 5:
        if rank == 2 and step == 2:
            die_before_second_total(flag, store)
        if rank == 0 and step == 3 and second_dies:
            # It has the state that rank 1 lacks, and dies when that has taken the parameters.
            regrouping.broadcast_optimizer_state = die  # type: ignore[assignment]
        before = net.weight.detach().clone()
        optimizer.zero_grad()
        torch.manual_seed(10 * rank + step)
        model(torch.randn(4, 1024)).square().mean().backward()
        if rank == 0 and step == 2 and flag == "returned" and not dropped[2:]:
            store.set(flag, b"")
            _wait_until_told()
        optimizer.step()
        dropped.append(model.step_was_dropped)
        if model.step_was_dropped and dist.get_world_size() == 1:
            assert torch.equal(net.weight, before)
        if not model.step_was_dropped:
            count.steps += 1
        if rank == 0 and step == 2 and flag == "stepped":
            store.set(flag, b"")
    momentum = optimizer.state[net.weight]["momentum_buffer"]
    return (
        f"{net.weight.double().sum():.17g} {momentum.double().sum():.17g}",
        float(dist.get_world_size()),
        count.steps,
        sum(dropped),
    )


@on_cpus("it dies in a message between them")
@pytest.mark.parametrize("on_loss", ["drop", "repeat"])
def test_a_rank_that_is_behind_takes_parameters_momentum_and_state_of_one_that_has_made_the_step(on_loss: str) -> None:
    first, second, _ = run_job(3, _lose_one_that_has_told_half, "stepped", False, on_loss, expect_death={2})
    assert first[:3] == second[:3]
    # Rank 1 lost step 2, which counts, and rank 0 its pass of step 3, if that is not repeated.
    assert (first[1:], second[3]) == ((2, 5, int(on_loss == "drop")), 1)


@on_cpus("it dies in a message between them")
@pytest.mark.parametrize("on_loss", ["drop", "repeat"])
def test_a_rank_that_is_told_between_its_pass_and_its_step_drops_the_step_or_makes_it_for_all(on_loss: str) -> None:
    first, second, _ = run_job(3, _lose_one_that_has_told_half, "returned", False, on_loss, expect_death={2})
    assert first[:3] == second[:3]
    assert (first[1:], second[3]) == ((2, 5, int(on_loss == "drop")), 1)


@on_cpus("it dies in a message between them")
@pytest.mark.parametrize("on_loss", rest_is_deep(["drop", "repeat"], 0))
def test_a_rank_keeps_its_own_state_if_the_one_that_is_ahead_dies_as_well(on_loss: str) -> None:
    _, second, _ = run_job(3, _lose_one_that_has_told_half, "stepped", True, on_loss, expect_death={0, 2})
    # Step 2 was made again, or repeated.
    assert second[1:] == (1, 5, int(on_loss == "drop"))


def _lose_one_while_wrapping(how: str) -> tuple[int, float]:
    rank = join_job()
    torch.manual_seed(rank)
    net = nn.BatchNorm1d(4)
    net.weight.data.fill_(rank + 1.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    if rank == 0:
        die()
    if how == "wrapper":
        bagua.data_parallel.DistributedDataParallel(net, optimizers=[optimizer])
    else:
        bagua.with_bagua(net, [optimizer])
    return dist.get_world_size(), net.weight[0].item()


@pytest.mark.parametrize("how", ["with_bagua", "wrapper"])
def test_a_loss_while_a_model_is_wrapped_wraps_it_among_those_that_are_left(how: str) -> None:
    _, second, third = run_job(3, _lose_one_while_wrapping, how, expect_death={0})
    assert second == third == (2, 2.0)  # the values of the rank that is the first now


# --- a program's own collectives, scalers, accumulation ---------------------------------------------------------------


def _own_collectives() -> None:
    rank = join_job(min_ranks=2)
    current = coordinator.current()
    assert current is not None
    assert current._groups.default is not None
    gpu = current._groups.device or torch.device("cuda", 0)
    of_gpu = current._groups.default.get_global_communicator().on(gpu)  # as a module there has it
    if rank == 3:
        die()
    raised = []
    for call in (
        lambda: dist.all_reduce(torch.ones(1000), group=dist.group.WORLD),
        lambda: dist.all_gather_object([None] * dist.get_world_size(), rank),
        bagua.barrier,
    ):
        before = dist.get_world_size()
        try:
            call()
        except bagua.Regrouped as error:
            raised.append((before, dist.get_world_size(), error.lost_ranks, error.epoch))
    assert raised == [(4, 3, (3,), 1)]
    # One that is waited for only now, and one on another thread.
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    if rank == 2:
        die()
    others: list[BaseException] = []

    def elsewhere() -> None:
        try:
            work.wait()
        except bagua.Regrouped as error:
            others.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    with pytest.raises(bagua.Regrouped) as caught:
        bagua.allreduce_inplace(torch.ones(1000))
    assert caught.value.lost_ranks == (2,)
    thread.join()
    total = torch.ones(3)
    bagua.allreduce_inplace(total, bagua.ReduceOp.SUM)
    dist.barrier()
    assert total.tolist() == [2.0] * 3
    assert (of_gpu.torch_group, of_gpu.nranks(), of_gpu.rank()) == (dist.group.WORLD, 2, rank)
    assert dist.get_backend() == ("gloo" if device_type() == "cpu" else "cpu:gloo,cuda:nccl")


def test_collectives_of_the_program_raise_once_all_have_regrouped() -> None:
    run_job(4, _own_collectives, expect_death={2, 3})


def _own_collective_that_some_have_done(on_loss: str) -> int:
    rank = join_job(timeout_s=20, on_loss=on_loss)
    net = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model = bagua.with_bagua(net, [optimizer])
    while bagua.regroup_step() < 6:
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        total = torch.ones(1, device="cpu")
        try:
            if bagua.regroup_step() == 3 and dist.get_world_size() == 3:
                # As a broadcast from rank 2, which dies when rank 0 has it and rank 1 has not.
                if rank == 2:
                    dist.send(total, 0)
                    die()
                dist.recv(total, 2)
            else:
                dist.all_reduce(total)
        except bagua.Regrouped:
            continue
    return bagua.regroup_step()


@pytest.mark.parametrize("on_loss", rest_is_deep(["drop", "repeat"], 0))
def test_a_rank_that_was_in_the_next_pass_raises_too_and_all_go_on_with_the_same_step(on_loss: str) -> None:
    assert run_job(3, _own_collective_that_some_have_done, on_loss, expect_death={2}, timeout=60)[:2] == [6, 6]


def _own_collective_between_pass_and_step(on_loss: str) -> tuple[int, int, list[float]]:
    rank = join_job(on_loss=on_loss)
    net = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    model = bagua.with_bagua(net, [optimizer])
    raised = 0
    while (step := bagua.regroup_step()) < 4:
        optimizer.zero_grad()
        loss = -model(torch.full((1, 4), rank + 1.0)).sum()
        loss.backward()
        if rank == 2 and step == 2:
            die()
        try:
            dist.all_reduce(loss)
        except bagua.Regrouped:
            assert net.weight.grad is None
            raised += 1
            continue
        optimizer.step()
    return raised, step, net.weight[0].tolist()


@pytest.mark.parametrize("on_loss", rest_is_deep(["drop", "repeat"], 1))
def test_a_step_is_dropped_whose_collective_of_the_program_raises(on_loss: str) -> None:
    first, second, _ = run_job(3, _own_collective_between_pass_and_step, on_loss, expect_death={2})
    assert first == second == (1, 4, [2 * 2.0 + 2 * 1.5] * 4)


def _scaled(on_loss: str) -> tuple[list[float], int, list[float]]:
    scaler = torch.amp.GradScaler(device_type(), init_scale=4.0, growth_interval=2)
    rank = join_job(state={"scaler": scaler}, on_loss=on_loss)
    net = nn.Linear(4, 4)
    nn.init.zeros_(net.weight)
    net.unused = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    model = bagua.with_bagua(net, [optimizer], find_unused_parameters=True)
    scales: list[float] = []
    means: list[float] = []
    while (step := bagua.regroup_step()) < 5:
        optimizer.zero_grad()
        for last in (False, True):
            if not last:
                with model.bagua_ddp.no_sync():
                    scaler.scale(model(torch.ones(2, 4)).sum() * (rank + 1)).backward()
            else:
                loss = scaler.scale(model(torch.ones(2, 4)).sum() * (rank + 1))
                if rank == 2 and step == 2:
                    die()
                loss.backward()
        scaler.unscale_(optimizer)
        if net.weight.grad is not None:
            means.append(net.weight.grad[0, 0].item())
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert net.weight[0, 0].item() == pytest.approx(-0.25 * 5 / 20**0.5, rel=1e-5)  # of clipped gradients
    return scales, bagua.regroup_step(), means


def test_a_grad_scaler_does_nothing_in_a_dropped_step() -> None:
    first, second, _ = run_job(3, _scaled, "drop", expect_death={2})
    assert first == second == ([4.0, 8.0, 8.0, 8.0, 16.0, 16.0], 5, [8.0, 8.0, 6.0, 6.0, 6.0])


def test_a_step_that_is_repeated_has_its_accumulated_gradients_and_is_scaled_and_clipped() -> None:
    first, second, _ = run_job(3, _scaled, "repeat", expect_death={2})
    # Two passes of two samples each: of ranks 0 to 2, then of 0 and 1.
    assert first == second == ([4.0, 8.0, 8.0, 16.0, 16.0], 5, [8.0, 8.0, 6.0, 6.0, 6.0])


def _fork_after_regroup() -> int:
    join_job()
    group: Any = dist.group.WORLD
    assert (group.supports_reconfigure, group.supports_window) == (False, False)  # as torch 2.14 asks
    current = coordinator.current()
    assert current is not None
    before: list[Any] = [current._groups.made]
    before.append(before)
    dist.barrier()
    abort(current._groups.made)
    with pytest.raises(bagua.Regrouped):
        dist.all_reduce(torch.ones(1))
    gc.disable()
    del before, current  # groups of the epoch before are garbage
    child = os.fork()
    if child == 0:  # as a DataLoader's worker
        gc.collect()
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_process_frees_no_groups_whose_threads_it_has_not() -> None:
    assert run_job(2, _fork_after_regroup) == [7, 7]


# --- innocents -------------------------------------------------------------------------------------------------------


def _stopped_and_slow(pids: str) -> tuple[int, int]:
    rank = join_job()
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = bagua.with_bagua(net, [optimizer])
    if rank == 1:
        Path(pids).write_text(str(os.getpid()))
    while (step := bagua.regroup_step()) < 3:
        if rank == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 0 and step == 2:
            # It compiles, for longer than a connection is confirmed to be refused, and holds no GIL.
            assert torch.equal(torch.compile(nn.Identity(), backend="eager")(torch.ones(1)), torch.ones(1))
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    current = coordinator.current()
    assert current is not None
    return current.epoch.number, dist.get_world_size()


def test_a_rank_that_is_stopped_or_compiles_is_waited_for(tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    done = threading.Event()

    def wake() -> None:
        while not done.wait(0.1):
            text = pids.read_text() if pids.exists() else ""
            if text and Path(f"/proc/{text}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                done.wait(1.5)  # the others wait meanwhile; their watches are awake
                os.kill(int(text), signal.SIGCONT)
                return

    thread = threading.Thread(target=wake)
    thread.start()
    try:
        assert run_job(3, _stopped_and_slow, str(pids)) == [(0, 3)] * 3
    finally:
        done.set()
        thread.join()


def _falsely_refused() -> tuple[int, int]:
    rank = join_job()
    current = coordinator.current()
    assert current is not None
    if rank == 0:
        # A firewall resets the connection, and refuses new ones for a while.
        detection.CONFIRM_PAUSE_S = 0.01
        member = current.epoch.members[1]
        current._watch._found(member, "exited")
    dist.barrier()
    return current.epoch.number, dist.get_world_size()


def test_a_process_that_answers_again_is_not_lost() -> None:
    assert run_job(2, _falsely_refused) == [(0, 2)] * 2


def _network_away() -> tuple[int, int, tuple[int, ...]]:
    rank = join_job()
    current = coordinator.current()
    assert current is not None
    dist.barrier()
    if rank == 1:
        abort(current._groups.made)  # connections of living ranks are lost
    lost: tuple[int, ...] = (-1,)
    try:
        while True:
            dist.all_reduce(torch.ones(1))
    except bagua.Regrouped as error:
        lost = error.lost_ranks
    dist.barrier()
    return current.epoch.number, dist.get_world_size(), lost


def test_connections_that_are_lost_between_living_ranks_are_made_again() -> None:
    assert run_job(3, _network_away) == [(1, 3, ())] * 3


def _always_failing() -> int:
    join_job()
    current = coordinator.current()
    assert current is not None
    for _ in range(coordinator.MAX_IDLE_EPOCHS - 1):
        dist.barrier()
        abort(current._groups.made)
        with pytest.raises(bagua.Regrouped):
            dist.all_reduce(torch.ones(1))
    dist.barrier()
    abort(current._groups.made)
    with pytest.raises(RuntimeError, match="Collectives have failed 3 times in a row, although no rank is gone"):
        dist.all_reduce(torch.ones(1))
    return current.epoch.number


def test_a_collective_that_always_fails_ends_the_job() -> None:
    assert run_job(2, _always_failing) == [3, 3]


# --- when it cannot go on --------------------------------------------------------------------------------------------


def _too_few() -> str:
    rank = join_job()
    if rank != 0:
        die()
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(1))
    return str(caught.value)


def _without_store(folder: str) -> tuple[int, str]:
    rank = join_job()
    model = bagua.with_bagua(net := nn.Linear(4, 4), [optimizer := torch.optim.SGD(net.parameters(), lr=0.01)])
    text = ""
    while bagua.regroup_step() < 6 and not text:
        if bagua.regroup_step() == 2 and rank == 0:
            Path(folder, "end").touch()
            wait_until(Path(folder, "ended").exists, "the end of the store", 60)
        if bagua.regroup_step() == 4 and rank == 1:
            die()
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        try:
            loss.backward()
        except RuntimeError as error:
            text = str(error)
            break
        optimizer.step()
    return bagua.regroup_step(), text


@on_cpus("the error of a GPU comes later")
def test_without_its_store_a_job_trains_until_the_next_loss(tmp_path: Path) -> None:
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]  # type: ignore[attr-defined]
    port = stores[0].port

    def end_store() -> None:
        wait_until(Path(tmp_path, "end").exists, "the first steps", 120)
        stores.clear()
        Path(tmp_path, "ended").touch()

    thread = threading.Thread(target=end_store)
    thread.start()
    results = run_ranks(3, _without_store, str(tmp_path), env={"MASTER_PORT": str(port)}, expect_death={1})
    thread.join()
    for step, text in (results[0], results[2]):
        assert step == 4
        assert text.startswith("The job cannot regroup: its store is unreachable")


def test_fewer_than_half_do_not_go_on() -> None:
    text, *_ = run_job(3, _too_few, expect_death={1, 2})
    # The second one may have agreed on a job of two before it died.
    said = "The job cannot go on: 1 of {} ranks are left, and 2 are needed (more than half of them)."
    assert text.startswith((said.format(3), said.format(2)))


def _drop_what_is_not_synchronized() -> tuple[float, float]:
    rank = join_job()
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net._bagua_params_and_buffers_to_ignore = ["1.weight"]  # type: ignore[assignment]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    model = bagua.with_bagua(net, [optimizer])
    before = net[1].weight.detach().clone()
    if rank == 2:
        die()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert model.step_was_dropped
    return float((net[1].weight.detach() - before).abs().max()), bagua.regroup_step()


def test_a_dropped_step_changes_no_parameter_that_is_not_synchronized() -> None:
    assert run_job(3, _drop_what_is_not_synchronized, expect_death={2})[:2] == [(0.0, 0)] * 2


def test_others_go_on_without_a_rank_that_has_ended() -> None:
    assert run_job(3, ends_early) == [2, 3, 2]


def _refusals() -> None:
    os.environ.update(NODE_RANK=os.environ["RANK"], LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    rank = join_job()
    net, other, elsewhere = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, device="meta")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    wrapper = bagua.data_parallel.DistributedDataParallel
    local_sgd = bagua.algorithms.Algorithm.init("local_sgd", sync_every=2)
    by_node = bagua.algorithms.Algorithm.init("gradient_allreduce", hierarchical=True)
    for text, call in (
        ("the algorithm decentralized", lambda: bagua.with_bagua(net, [optimizer], "decentralized")),
        ("the algorithm async", lambda: bagua.with_bagua(net, [optimizer], "async")),
        ("the algorithm local_sgd", lambda: bagua.with_bagua(net, [optimizer], local_sgd)),
        ("gradient_allreduce with hierarchical=True", lambda: bagua.with_bagua(net, [optimizer], by_node)),
        ("a module on meta", lambda: bagua.with_bagua(elsewhere, [torch.optim.SGD(elsewhere.parameters(), 0.1)])),
        ("autotune=True", lambda: bagua.with_bagua(net, [optimizer], autotune=True)),
        ("static_graph=True", lambda: wrapper(net, optimizers=[optimizer], static_graph=True)),
        ("skip_all_reduce_unused_params=True", lambda: wrapper(net, skip_all_reduce_unused_params=True)),
        ("groups of some ranks", lambda: bagua.new_group([0, 1])),
        ("groups of some ranks", lambda: dist.new_group([0, 1])),
        ("groups of some ranks", lambda: dist.init_device_mesh("cpu", (2, 1))),
    ):
        with pytest.raises(NotImplementedError, match=text):
            call()
    model = wrapper(net, optimizers=[optimizer])
    with pytest.raises(NotImplementedError, match="join"), model.join():
        pass
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(NotImplementedError, match="closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(NotImplementedError, match="second backward pass communicates before"):
        model(torch.ones(1, 4)).sum().backward()
    # As the error says, of a step that is left out.
    before = net.weight.detach().clone()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(net.weight, before)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ValueError, match="GradScaler is not in Regroup"):
        torch.amp.GradScaler(device_type()).step(optimizer)
    with pytest.raises(NotImplementedError, match=r"compress_communication\(\) of FSDP2"):
        compress_communication(other)
    optimizer.step()
    net.bias.requires_grad_(False)
    with pytest.raises(NotImplementedError, match="frozen or unfrozen after the module was wrapped"):
        model(torch.ones(1, 4))
    assert rank == dist.get_rank()


def test_what_does_not_follow_is_refused_by_name() -> None:
    run_job(2, _refusals)


def _save(folder: Path) -> int:
    rank = join_job()
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    assert checkpoint.load_checkpoint(folder, net, optimizer) == 0  # nothing was saved
    bagua.with_bagua(net, [optimizer])
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(NotImplementedError, match=r"async_save_checkpoint\(\) is not supported under regroup"):
        checkpoint.async_save_checkpoint(1, folder, net, optimizer)
    with pytest.raises(NotImplementedError, match="statistics of SyncBatchNorm cannot be exchanged between 3 ranks"):
        bagua.contrib.SyncBatchNorm(4)(torch.ones(2, 4))
    checkpoint.save_checkpoint(1, folder, net, optimizer)
    if rank == 2:
        die()
    with pytest.raises(bagua.Regrouped):
        checkpoint.save_checkpoint(2, folder, net, optimizer)
    checkpoint.save_checkpoint(3, folder, net, optimizer, per_rank=True)
    saved = net.weight.detach().clone()
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    loaded = checkpoint.load_checkpoint(folder, net, optimizer)
    assert torch.equal(net.weight, saved)
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return loaded


def test_checkpoints_are_saved_by_whoever_is_there(tmp_path: Path) -> None:
    assert run_job(3, _save, tmp_path, expect_death={2})[:2] == [3, 3]
    assert not list(tmp_path.glob("*2*"))  # of which a rank was lost


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="min_ranks=0"):
        bagua.Regroup(min_ranks=0)
    with pytest.raises(TypeError, match="min_ranks"):
        bagua.Regroup(min_ranks="half")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_loss"):
        bagua.Regroup(on_loss="wait")
    with pytest.raises(TypeError, match=r"state\['lr'\]"):
        bagua.Regroup(state={"lr": 0.1})


def _not_here() -> list[str]:
    texts = []
    for environment, backend, error in (
        ({"TORCHELASTIC_RUN_ID": "x"}, None, ValueError),
        ({}, "nccl", (NotImplementedError, RuntimeError)),
    ):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            with pytest.raises(error) as caught:
                bagua.init_process_group(regroup=bagua.Regroup(), backend=backend)
        texts.append(str(caught.value).splitlines()[0])
    with pytest.raises(RuntimeError, match="does not regroup"):
        bagua.regroup_step()
    bagua.init_process_group()
    model = bagua.with_bagua(net := nn.Linear(2, 2), [torch.optim.SGD(net.parameters(), 0.1)])
    assert model.step_was_dropped is False
    with pytest.raises(RuntimeError, match="does not regroup"):
        model.on_regroup(print)
    return texts


@on_cpus("backend='nccl' is refused there")
def test_without_regroup_nothing_of_it_is_there() -> None:
    ((elastic, nccl),) = run_ranks(1, _not_here)
    assert "torchrun has started this process" in elastic
    assert "nccl" in nccl.lower()
