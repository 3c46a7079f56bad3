"""Communication hooks of torch's DDP: the formulas bit for bit, DDP's options, overlap, and what may go wrong."""

from __future__ import annotations

import contextlib
import datetime
import gc
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.byte_reference import CHOICES, expected, nodes_of, of_all_ranks
from support.dying_rank import VICTIM, begin_to_lose_one, die
from support.hooked_ddp import Hook, hooked
from support.rank_tests import on_ranks
from support.ranks import DEVICE_VARIABLE, device_for, run_ranks
from support.training import (
    NODES,
    Branches,
    ConvNet,
    MixedDtypes,
    batches,
    begin,
    check_equal,
    check_ranks_equal,
    check_tensor_on_ranks,
    loss_of,
    message_of,
    mlp,
    torch_ddp,
)
from torch import nn

import bagua
import bagua.torch_api as bagua_torch
from bagua.comm_hooks import (
    ByteGradState,
    ErrorFeedbackState,
    bytegrad,
    error_feedback_bytegrad,
    hierarchical_bytegrad,
)

SGD = {"lr": 0.3, "momentum": 0.9}


# --- the formula -----------------------------------------------------------------------------------------------------


def _against_the_formula(nodes: Sequence[Sequence[int]]) -> None:
    rank, device = begin()
    options = itertools.cycle([{"gradient_as_bucket_view": True}, {}, {"bucket_cap_mb": 0.0005}])
    for hierarchical, average, dtype in CHOICES:
        if hierarchical and max(map(len, nodes)) > 2:
            continue  # in which order a node adds up three is the backend's choice
        net = mlp(rank, device).to(dtype)
        hook = hierarchical_bytegrad if hierarchical else bytegrad
        model, recorder = hooked(net, ByteGradState(None, average, hierarchical), hook, **next(options))
        optimizer = torch.optim.SGD(net.parameters(), **SGD)
        # The hook has no state, and its memory is used again; what is not finite on one rank is so on all.
        for step, (x, y) in enumerate(batches(rank, 3, device)):
            optimizer.zero_grad()
            (loss_of(model, (x.to(dtype), y)) * (torch.inf if (step, rank) == (2, 0) else 1.0)).backward()
            for before, after in recorder.taken():
                result = expected(of_all_ranks(before), average, nodes if hierarchical else None)
                assert torch.equal(after.cpu().isnan(), result.isnan()), (hierarchical, average, dtype, step)
                assert torch.equal(after.cpu().nan_to_num(), result.nan_to_num()), (hierarchical, average, dtype, step)
                assert after.isnan().any() == (step == 2)
            if step < 2:
                optimizer.step()
        check_ranks_equal(net, f"{hierarchical=} {average=} {dtype}")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_are_those_of_the_formula_on_one_node(ranks: int) -> None:
    run_ranks(ranks, _against_the_formula, [list(range(ranks))])


@pytest.mark.parametrize("nodes", NODES)
def test_gradients_are_those_of_the_formula_on_two_nodes(nodes: str) -> None:
    env = NODES[nodes]
    run_ranks(len(env), _against_the_formula, nodes_of(env), env=env)


# --- groups, models, options of DDP ----------------------------------------------------------------------------------


@on_ranks(2)
def test_a_state_may_be_none_a_group_or_options(rank: int, device: torch.device) -> None:
    results = []
    given: list[Any] = [None, dist.group.WORLD, bagua_torch.communication.new_group(), ByteGradState()]
    for state in given:
        net = mlp(0, device)
        model = torch_ddp(net)
        model.register_comm_hook(state, bagua.comm_hooks.bytegrad)
        for batch in batches(rank, 3, device):
            loss_of(model, batch).backward()
        results.append(nn.ParameterList(nn.Parameter(one.grad) for one in net.parameters()))
    for result in results[1:]:
        check_equal(result, results[0])
    if device.type == "cpu":
        threads = [one for one in threading.enumerate() if one.name == "bagua-comm"]
        assert len(threads) == 2, "one for each torch group, not for each model"


@pytest.mark.parametrize("kind", ["torch", "bagua"])
@on_ranks(4)
def test_groups_train_apart(rank: int, device: torch.device, kind: str) -> None:
    make: Any = dist.new_group if kind == "torch" else bagua_torch.communication.new_group
    groups = [make([0, 1]), make([2, 3])]
    mine = groups[rank // 2]
    net = mlp(rank, device)
    model = torch_ddp(net, process_group=mine if kind == "torch" else mine.torch_group)
    model.register_comm_hook(mine, bytegrad)
    optimizer = torch.optim.SGD(net.parameters(), **SGD)
    for batch in batches(rank, 4, device):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    weights = of_all_ranks(torch.cat([one.detach().view(-1) for one in net.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[2], weights[3])
    assert not torch.equal(weights[0], weights[2])


@on_ranks(2)
def test_unused_parameters_and_two_models_by_turns(rank: int, device: torch.device) -> None:
    """Unused parameters, buffers, a bucket for every tensor: DDP's own collectives run in between."""
    torch.manual_seed(0)
    net = Branches().to(device)
    model, recorder = hooked(net, None, bytegrad, find_unused_parameters=True, bucket_cap_mb=1e-6)
    other = ConvNet().to(device)
    second, other_recorder = hooked(other, None, bytegrad, bucket_cap_mb=1e-4, gradient_as_bucket_view=True)
    data = zip(batches(rank, 6, device), batches(rank, 6, device, (2, 3, 8, 8)), strict=True)
    for step, (batch, images) in enumerate(data):
        for one in (net, other):
            one.zero_grad()
        take = ["left"] if (step + rank) % 2 else ["right"]
        loss_of(model, (batch[0], batch[1]), take=take).backward()
        loss_of(second, images).backward()
        for name in ("left", "right"):
            check_tensor_on_ranks(getattr(net, name).weight.grad, f"{name} in step {step}")
        assert net.never.weight.grad is None
        recorder.buckets.clear()
        for before, after in other_recorder.taken():
            assert torch.equal(after.cpu(), expected(of_all_ranks(before), average=True))


@on_ranks(2)
def test_uneven_inputs_and_static_graphs(rank: int, device: torch.device) -> None:
    for state, hook in ((lambda: None, bytegrad), (ErrorFeedbackState, error_feedback_bytegrad)):
        for static in (False, True):
            net = mlp(0, device)
            model = torch_ddp(net, static_graph=static)
            model.register_comm_hook(state(), hook)
            optimizer = torch.optim.SGD(net.parameters(), **SGD)
            with contextlib.nullcontext() if static else model.join():
                for batch in batches(rank, 4 if static else 3 + 2 * rank, device):
                    optimizer.zero_grad()
                    loss_of(model, batch).backward()
                    optimizer.step()
            check_ranks_equal(net, f"{hook.__name__} {static=}")


@on_ranks(2)
def test_dtypes_that_are_not_compressed_are_sent_as_they_are(rank: int, device: torch.device) -> None:
    torch.manual_seed(0)
    for state, hook in (
        (None, bytegrad),
        (None, hierarchical_bytegrad),
        (ErrorFeedbackState(), error_feedback_bytegrad),
    ):
        net = MixedDtypes().to(device)
        model, recorder = hooked(net, state, hook)
        for batch in batches(rank, 3, device):
            net.zero_grad()
            loss_of(model, batch).backward()
            for before, after in recorder.taken():
                check_tensor_on_ranks(after, str(after.dtype))
                if after.is_complex():  # DDP hands it over as twice as many real numbers
                    after = torch.view_as_real(after).view(-1)
                exact = sum(one * 0.5 for one in of_all_ranks(before))
                assert torch.equal(after.cpu(), exact) == (after.dtype == torch.float64), after.dtype


# --- overlap ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "hook"), [(None, bytegrad), (None, hierarchical_bytegrad), (ErrorFeedbackState, error_feedback_bytegrad)]
)
@on_ranks(2)
def test_hooks_do_not_wait_for_the_communication(rank: int, device: torch.device, state: Any, hook: Hook) -> None:
    """Rank 1 enters its second pass only when rank 0 has handed over the last bucket of its own: if a hook waited for
    the communication of its bucket, rank 0 would wait for rank 1, and rank 1 for rank 0."""
    net = mlp(0, device)
    model, recorder = hooked(net, state() if state else None, hook, bucket_cap_mb=1e-6)
    store = dist.distributed_c10d._get_default_store()
    inner, entered = recorder.hook, []

    def watched(state: Any, bucket: Any) -> Any:
        future = inner(state, bucket)
        entered.append(bucket.index())
        if bucket.is_last() and watching and rank == 0:
            store.set("handed over", "all")
        return future

    recorder.hook = watched
    watching = False
    data = batches(rank, 4, device)
    for batch in data[:3]:  # connections, and the buckets that DDP keeps
        loss_of(model, batch).backward()
    watching = True
    entered.clear()
    if rank == 1:
        store.wait(["handed over"], datetime.timedelta(seconds=20))
    loss_of(model, data[3]).backward()
    assert entered == list(range(6))
    recorder.buckets.clear()


@on_ranks(2)
def test_misuse_is_explained(rank: int, device: torch.device) -> None:
    data = batches(rank, 1, device)[0]

    models = []

    def backward(state: Any, hook: Hook) -> Callable[[], None]:
        model = torch_ddp(mlp(0, device))
        models.append(model)
        model.register_comm_hook(state, hook)
        loss_of(model, data).backward()
        return loss_of(model, data).backward

    message_of(TypeError, lambda: backward(None, error_feedback_bytegrad), "ErrorFeedbackState(process_group)")
    message_of(TypeError, lambda: backward("all", bytegrad), "process_group is 'all'")
    message_of(ValueError, lambda: backward(ByteGradState(), hierarchical_bytegrad), "hierarchical=False")
    state = ErrorFeedbackState()
    backward(state, error_feedback_bytegrad)()
    message_of(ValueError, lambda: backward(state, error_feedback_bytegrad), "two models")
    models.clear()
    gc.collect()
    backward(state, error_feedback_bytegrad)()


# --- the end ---------------------------------------------------------------------------------------------------------


def _interrupted() -> str:
    rank, device = begin_to_lose_one()
    model = torch_ddp(mlp(0, device), bucket_cap_mb=1e-6)
    model.register_comm_hook(None, hierarchical_bytegrad)
    data = batches(rank, 5, device)
    for batch in data[:3]:
        loss_of(model, batch).backward()
    loss = loss_of(model, data[3])
    if rank == VICTIM:
        die()
    return message_of(RuntimeError, loss.backward)


def test_survivors_name_the_rank_that_died() -> None:
    if os.environ.get(DEVICE_VARIABLE) == "cuda":
        pytest.skip("with NCCL torch's watchdog ends the process before Python can say anything")
    told = run_ranks(3, _interrupted, expect_death={VICTIM})
    for message in (told[0], told[2]):
        assert "the communication of a DDP bucket (group" in message
        assert f"Rank {VICTIM} (host " in message


@on_ranks(2, joined=False)
def test_nothing_is_left_of_a_group_that_was_destroyed(tmp_path: Path) -> None:
    """The thread ends with the torch group, and the next group has one of its own."""
    path = str(tmp_path / "store")
    rank = int(os.environ["RANK"])
    device = device_for(rank)
    for attempt in range(2):
        bagua_torch.init_process_group(dist.FileStore(f"{path}{attempt}", 2), rank, 2, 2)
        model = torch_ddp(mlp(0, device))
        model.register_comm_hook(None, bytegrad)
        loss_of(model, batches(rank, 1, device)[0]).backward()
        threads = [one for one in threading.enumerate() if one.name == "bagua-comm"]
        assert len(threads) == (1 if device.type == "cpu" else 0)
        del model
        dist.destroy_process_group()
        gc.collect()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
