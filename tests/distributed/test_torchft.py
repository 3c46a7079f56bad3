"""torchft's process group of Bagua: what is left of a quorum when a rank is lost, and torchft's Manager with it."""

from __future__ import annotations

import datetime
import gc
import importlib
import os
import sys
import threading
import warnings
from typing import Any

import pytest
import torch
from support.processes import wait_until
from support.regrouped import die, job_store, run_job

from bagua.job import presence

TORCHFT_IS_THERE = importlib.util.find_spec("torchft") is not None
needs_torchft = pytest.mark.skipif(not TORCHFT_IS_THERE, reason="needs torchft")
LONG = datetime.timedelta(minutes=10)  # of collectives that end otherwise


def test_without_torchft_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bagua.torchft", "torchft.process_group"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(
        ImportError,
        match=r"needs torchft, and torchft(\.process_group)? is not installed.\n.*pip install '\.\[torchft\]'",
    ):
        importlib.import_module("bagua.torchft")


@needs_torchft
def test_a_timeout_is_checked_where_it_is_given() -> None:
    from bagua.torchft import ProcessGroupBagua

    with pytest.raises(TypeError, match=r"timeout is 60\. Pass a datetime\.timedelta"):
        ProcessGroupBagua(60)  # type: ignore[arg-type]
    group = ProcessGroupBagua()
    with pytest.raises(ValueError, match=r"timeout is 0 s, and has to be longer than 0"):
        group.set_timeout(datetime.timedelta(0))


def _configure(group: Any, quorum: str, rank: int, ranks: int) -> None:
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    group.configure(f"{address}/{quorum}", "0", rank, ranks)


def _joined(quorum: str) -> tuple[int, Any]:
    from bagua.torchft import ProcessGroupBagua

    rank = int(os.environ["RANK"])
    group = ProcessGroupBagua(LONG)
    _configure(group, quorum, rank, int(os.environ["WORLD_SIZE"]))
    return rank, group


def _total(group: Any, value: float = 1) -> float:
    values = torch.full((1000,), float(value))
    group.allreduce([values], torch.distributed.ReduceOp.SUM).wait()
    return values[0].item()


def _check_collectives(rank: int, ranks: int, group: Any) -> None:
    """Those of torchft's interface."""
    from torch.distributed import distributed_c10d as c10d

    def done(work: Any) -> None:
        work.wait()
        work.get_future().wait()

    everybody = torch.arange(float(ranks))
    own, total, one = torch.tensor([float(rank)]), ranks * (ranks - 1) / 2, torch.zeros(1)
    assert (group.rank(), group.size()) == (rank, ranks)
    assert _total(group, rank) == total
    values = [own.clone(), own + 1]
    done(group.allreduce_coalesced(values, c10d.AllreduceCoalescedOptions()))
    assert torch.cat(values).tolist() == [total, total + ranks]
    parts = [torch.zeros(1) for _ in range(ranks)]
    done(group.allgather([parts], [own], c10d.AllgatherOptions()))
    assert torch.equal(torch.cat(parts), everybody)
    outputs = [torch.zeros(ranks), torch.zeros(ranks)]
    done(group.allgather_into_tensor_coalesced(outputs, [own, own + 1], c10d.AllgatherOptions()))
    assert torch.equal(torch.stack(outputs), torch.stack([everybody, everybody + 1]))
    output = torch.zeros(ranks)
    done(group.alltoall_base(output, everybody + 10 * rank, [1] * ranks, [1] * ranks, c10d.AllToAllOptions()))
    assert torch.equal(output, 10 * everybody + rank)
    done(group.barrier(c10d.BarrierOptions()))
    values = [own.clone()]
    done(group.broadcast_one(values[0], ranks - 1))
    assert values[0] == ranks - 1
    done(group.reduce_scatter([one], [list((everybody + rank).split(1))], c10d.ReduceScatterOptions()))
    assert one == ranks * rank + total
    outputs = [torch.zeros(1), torch.zeros(1)]
    inputs = [everybody + rank, everybody - rank]
    done(group.reduce_scatter_tensor_coalesced(outputs, inputs, c10d.ReduceScatterOptions()))
    assert torch.cat(outputs).tolist() == [ranks * rank + total, ranks * rank - total]
    if rank == 0:
        group.send([own + 5], 1, 0).wait()
    elif rank == 1:
        group.recv([one], 0, 0).wait()
        assert one == 5


def _goes_on_without_a_killed_rank() -> tuple[str, str]:
    rank, group = _joined("first")
    store = job_store()
    _check_collectives(rank, 5, group)
    assert group.errored() is None
    if rank == 2:
        die()
    if rank == 4:  # it lives, and others wait for it in vain
        store.wait([f"failed {other}" for other in (0, 1, 3)])
    with pytest.raises(RuntimeError, match="A collective was aborted") as caught:
        _total(group)
    store.set(f"failed {rank}", "")
    assert group.errored() is not None
    with pytest.raises(RuntimeError) as refused:
        group.barrier().get_future().wait()
    # Before any of them closes its connections for the next quorum.
    store.wait([f"failed {other}" for other in (0, 1, 3, 4)])
    _configure(group, "second", (0, 1, 3, 4).index(rank), 4)
    assert group.errored() is None
    assert _total(group) == 4
    return str(caught.value), str(refused.value)


@needs_torchft
def test_all_ranks_leave_a_collective_of_which_one_was_killed() -> None:
    results = run_job(5, _goes_on_without_a_killed_rank, expect_death={2})
    assert results.pop(2) is None
    for texts in results:
        for text in texts:
            assert "torchft drops the step, and makes a new group" in text


def _is_watched(group: Any, rank: int) -> bool:
    """Whether this rank would find out that the other one was killed."""
    quorum = group._quorum
    watch = quorum._watch._watches.get(quorum._epoch.tokens[rank])
    return watch is not None and watch._thread.is_alive()


def _ends_of_groups() -> None:
    from bagua import torchft

    rank, group = _joined("first")
    store = job_store()
    if rank == 2:
        store.wait(["waiting 0", "waiting 1"])
        group.abort()
        assert "abort() was called" not in str(group.errored())  # it has no group any more
        with pytest.raises(AssertionError, match="not initialized"):
            _total(group)
    else:
        store.set(f"waiting {rank}", "")
        with pytest.raises(RuntimeError, match=r"A collective was aborted: abort\(\) was called on rank 2"):
            _total(group)

    # Nobody is told of one that shuts down, and of what is left of its group.
    _configure(group, "second", rank, 3)
    assert _total(group) == 3
    threads = threading.active_count()
    if rank == 2:
        group.shutdown()
        store.set("shut down", "")
    else:
        store.wait(["shut down"])
        one = torch.ones(1)
        work = group.send([one], 1, 0) if rank == 0 else group.recv([one], 0, 0)
        work.wait()
        assert group.errored() is None
        with pytest.raises(RuntimeError, match=r"A collective was aborted: a collective of rank [01] failed"):
            _total(group)

    # Nor of one that nobody has any more, which frees what it has.
    _configure(group, "third", rank, 3)
    assert _total(group) == 3
    if rank == 2:
        quorum = group._quorum
        del group
        gc.collect()
        wait_until(quorum._is_over.is_set, "the end of a group that nobody has", 100)
        wait_until(lambda: threading.active_count() < threads, "the end of its threads", 100)
        group = torchft.ProcessGroupBagua(LONG)
    else:
        with pytest.raises(RuntimeError, match="A collective was aborted"):
            _total(group)

    # A rank that is told of a loss ends what it is in, as long as that can end, and begins nothing.
    _configure(group, "fourth", rank, 3)
    quorum = group._quorum
    values = torch.ones(1000)
    if rank == 0:
        torchft.GRACE_S = 1000
        work = group.allreduce([values], torch.distributed.ReduceOp.SUM)
        telling = threading.Thread(target=quorum._on_mail, args=(quorum._epoch, "rank 7 exited"), daemon=True)
        telling.start()
        wait_until(quorum._is_known.is_set, "the news", 100)
        store.set("told", "")
        work.wait()
        assert values[0] == 3
        with pytest.raises(RuntimeError, match=r"A collective was aborted: rank 7 exited"):
            _total(group)
    else:
        store.wait(["told"])
        assert _total(group) == 3
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(3)])

    # One that is killed while others connect, and one that ends as programs do.
    _configure(group, "fifth", rank, 3)
    assert _total(group) == 3
    if rank == 2:
        torchft.Connecting = die  # type: ignore[assignment,misc]
        _configure(group, "sixth", rank, 3)
    with pytest.raises(RuntimeError, match=r"could not be connected|could not connect"):
        _configure(group, "sixth", rank, 3)
    _configure(group, "seventh", rank, 2)
    assert _total(group) == 2
    if rank == 1:
        own = presence.own_presence()
        assert own is not None
        own.leave()
    else:
        wait_until(lambda: not _is_watched(group, 1), "the end of the other rank", 100)
        assert group._quorum._why is None


@needs_torchft
def test_the_ends_of_groups() -> None:
    run_job(3, _ends_of_groups, expect_death={2})


STEPS, KILLED_AT, JOINED_AT = 12, 4, 7


def _train(lighthouse: str) -> tuple[list[float], dict[int, int], int] | None:
    """Ranks 0 to 2, of which one is killed, and rank 3, which joins.

    Returns:
        the weights at the end, how many ranks made each step, and how many steps were dropped.
    """
    import torchft

    from bagua.torchft import ProcessGroupBagua

    warnings.simplefilter("ignore")  # of torchft
    rank, store = int(os.environ["RANK"]), job_store()
    if rank == 3:
        store.wait(["it may join"])
    torch.manual_seed(rank)
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    served = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = torchft.Manager(
        pg=ProcessGroupBagua(LONG),
        load_state_dict=net.load_state_dict,
        state_dict=net.state_dict,
        min_replica_size=2,
        replica_id=f"replica_{rank}",
        store_addr="127.0.0.1",
        store_port=served.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
    )
    model = torchft.DistributedDataParallel(manager, net, bucket_cap_mb=0.0001)
    optimizer = torchft.Optimizer(manager, torch.optim.SGD(net.parameters(), lr=0.01))
    ranks: dict[int, int] = {}
    dropped = 0
    # The Lighthouse waits for those that it knows.
    store.set(f"known {rank}", "")
    store.wait([f"known {other}" for other in range(3)])
    while (step := manager.current_step()) < STEPS:
        if step == JOINED_AT:
            store.set("it may join", "")
            store.wait(["known 3"])
        optimizer.zero_grad()
        manager.wait_quorum()
        if rank == 2 and step == KILLED_AT:
            die()
        model(torch.ones(2, 8) * (rank + 1)).sum().backward()
        optimizer.step()
        if manager.current_step() == step:
            dropped += 1
        else:
            ranks[manager.current_step() - 1] = manager.num_participants()
    manager.shutdown()
    return [one.sum().item() for one in net.parameters()], ranks, dropped


@needs_torchft
def test_replicas_of_torchft_drop_the_step_of_a_killed_one_and_go_on_and_another_one_joins() -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=60_000)
    try:
        address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
        first, second, killed, joined = run_job(4, _train, address, expect_death={2})
    finally:
        lighthouse.shutdown()
    assert killed is None
    assert first[0] == second[0] == joined[0]
    assert first[2] == second[2] == 1
    # When the Lighthouse knows of a replica depends on its heartbeat.
    for ranks in (first[1], second[1]):
        assert (ranks[KILLED_AT - 1], ranks[KILLED_AT], ranks[STEPS - 1]) == (3, 2, 3)
