"""A job that loses ranks at chosen points, and goes on without them, for use inside a rank (support.ranks).

The model is a ledger: its gradients are whole numbers that depend on the rank's first number and the step alone, and
its parameters their sum. So the parameters say exactly which steps of which ranks were trained, in any order of sums.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import Tensor, nn

import bagua.torch_api as bagua
from bagua.collectives import byte_transport
from bagua.job.torch_internals import default_store
from bagua.regroup import coordinator
from bagua.regroup.epochs import EpochStore
from bagua.regroup.groups import Groups
from bagua.regroup.watched_group import WatchedGroup

LAYERS, WIDTH = 6, 16
SMALL_BUCKETS = {"BAGUA_DEFAULT_BUCKET_SIZE": "128"}  # bytes: two layers each

# Of a step, in the order in which they come. "sent 2" is after the launch of the second bucket.
POINTS = ("forward", "gradient 5", "gradient 2", "sent 1", "sent 3", "returned", "stepping", "stepped")
# Of a regroup.
POINTS_OF_REGROUP = ("told", "reported", "ready", "connected")


class Kill(NamedTuple):
    """Of the rank that was this one at first, by its own hand: at a point of this step or of the next one, or of a
    regroup then, or else before what follows."""

    rank: int
    step: int
    point: str


def drawn_kills(seed: int, ranks: int, count: int, steps: int) -> list[Kill]:
    """At most one of a rank. Some come at the same step, some during a regroup."""
    draw = random.Random(seed)
    victims = draw.sample(range(ranks), count)
    kills: list[Kill] = []
    for victim in victims:
        if kills and draw.random() < 0.4:
            points = draw.choice((POINTS, POINTS_OF_REGROUP))
            kills.append(Kill(victim, kills[-1].step, draw.choice(points)))
        else:
            kills.append(Kill(victim, draw.randrange(1, steps - 2), draw.choice(POINTS)))
    return kills


def run_job(ranks: int, function: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
    """As `run_ranks`, with a store that none of them serves."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    env: Mapping[str, str] = named.pop("env", {})
    return run_ranks(ranks, function, *arguments, env={**env, "MASTER_PORT": str(store.port)}, **named)


def join_job(timeout_s: float = 60, **options: Any) -> int:
    """The rank of this process, among all that have joined."""
    rank = int(os.environ["RANK"])
    bagua.init_process_group(regroup=bagua.Regroup(**options), timeout=timeout_s, backend="gloo")
    # All of them have joined before one dies.
    store = default_store()
    store.set(f"joined {rank}", b"")
    store.wait([f"joined {other}" for other in range(dist.get_world_size())])
    return rank


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def amount(first_rank: int, step: int, layer: int) -> int:
    return 1 + first_rank + 2 * step + layer  # in sum below 256, so that bf16 is exact


class Ledger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(WIDTH)) for _ in range(LAYERS)])

    def forward(self, amounts: Tensor) -> Tensor:
        loss = amounts.new_zeros(())
        for layer, weight in zip(amounts, self.layers, strict=True):
            loss = loss - (weight * layer).sum()
        return loss


class History:
    """Which ranks, by their first numbers, trained from which step on."""

    def __init__(self, ranks: int) -> None:
        self.members = list(range(ranks))
        self.phases: list[tuple[int, list[int]]] = [(0, self.members)]

    def note(self, change: coordinator.WorldChange) -> None:
        regrouping = coordinator.current()
        assert regrouping is not None
        assert change.world_size == dist.get_world_size() == bagua.get_world_size() == len(regrouping.epoch.members)
        assert change.rank == dist.get_rank() == bagua.get_rank()
        if self.phases[-1][0] == change.step:
            self.phases.pop()  # in which no step was made: another rank may not even have come to it
        self.phases.append((change.step, [one.first_rank for one in regrouping.epoch.members]))

    def expected(self, layer: int, steps: int) -> int:
        """What the ledger has after so many steps."""
        total = 0
        for step in range(steps):
            members = next(members for begin, members in reversed(self.phases) if begin <= step)
            total += sum(amount(rank, step, layer) for rank in members)
        return total


def keep_ledger(kills: list[Kill], steps: int, how: str, codec: str | None, min_ranks: int) -> dict[str, Any]:
    """Trains a ledger until the job has made so many steps. Returns what this rank has seen."""
    rank = join_job(min_ranks=min_ranks)
    history = History(dist.get_world_size())
    net = Ledger()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    if how == "wrapper":
        model: Any = bagua.data_parallel.DistributedDataParallel(
            net, optimizers=[optimizer], algorithm=_algorithm(codec), bucket_cap_mb=128 / 2**20
        )
    else:
        model = bagua.with_bagua(net, [optimizer], _algorithm(codec))
    model.on_regroup(history.note)
    mine = next((one for one in kills if one.rank == rank), None)
    dropped = 0
    while (step := bagua.regroup_step()) < steps:
        with _dying(mine, step, net, optimizer):
            optimizer.zero_grad()
            loss = model(torch.tensor([[float(amount(rank, step, layer))] for layer in range(LAYERS)]))
            loss.backward()
            was_dropped = model.step_was_dropped
            if was_dropped:
                assert all(one.grad is None for one in net.parameters())
            _die_at(mine, step, "returned")
            optimizer.step()
            dropped += model.step_was_dropped
            _die_at(mine, step, "stepped")
    totals = [int(one[0]) for one in net.layers]
    assert all(bool((one == one[0]).all()) for one in net.layers)
    return {"totals": totals, "phases": history.phases, "dropped": dropped, "rank": dist.get_rank()}


def _algorithm(codec: str | None) -> Any:
    from bagua.torch_api.algorithms import Algorithm

    if codec is None:
        return Algorithm.init("gradient_allreduce", average=False)
    return Algorithm.init("bytegrad", average=False, codec=codec)


def _die_at(kill: Kill | None, step: int, point: str) -> None:
    if kill is not None and step >= kill.step and point == kill.point:
        die()


@contextlib.contextmanager
def _dying(kill: Kill | None, step: int, net: Ledger, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    if kill is None or step < kill.step:
        yield
        return
    with contextlib.ExitStack() as stack:
        kind, _, number = kill.point.partition(" ")
        if kind == "forward" or step > kill.step + 1:
            stack.callback(net.register_forward_pre_hook(die).remove)
        elif kind == "gradient":
            stack.callback(net.layers[int(number)].register_hook(die).remove)
        elif kind == "sent":
            stack.enter_context(after_calls(WatchedGroup, "allreduce", int(number)))
        elif kind == "stepping":
            stack.callback(optimizer.register_step_pre_hook(die).remove)
        elif kind == "told":
            stack.enter_context(after_calls(coordinator.Regrouping, "_reach_next", 0))
        elif kind == "reported":
            stack.enter_context(after_calls(EpochStore, "report", 1))
        elif kind == "ready":
            stack.enter_context(after_calls(EpochStore, "set_ready", 1))
        elif kind == "connected":
            stack.enter_context(after_calls(Groups, "install", 0))
        yield


@contextlib.contextmanager
def after_calls(owner: Any, name: str, count: int) -> Iterator[None]:
    """This process dies after the call of this number; 0: before the first."""
    original, calls = getattr(owner, name), 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        if count == 0:
            die()
        result = original(*arguments, **named)
        calls += 1
        if calls == count:
            die()
        return result

    setattr(owner, name, counted)
    try:
        yield
    finally:
        setattr(owner, name, original)


def check_ledgers(results: list[dict[str, Any] | None], steps: int, dead: set[int]) -> None:
    """Of all ranks: survivors have the same, and each step of each rank of its time exactly once."""
    left = {rank: one for rank, one in enumerate(results) if one is not None}
    assert set(left) == set(range(len(results))) - dead, (left.keys(), dead)
    some = next(iter(left.values()))
    for one in left.values():
        assert (one["totals"], one["phases"]) == (some["totals"], some["phases"]), (one, some)
    members = some["phases"][-1][1]
    assert {rank: one["rank"] for rank, one in left.items()} == {rank: members.index(rank) for rank in left}
    history = History(len(results))
    history.phases = some["phases"]
    assert some["totals"] == [history.expected(layer, steps) for layer in range(LAYERS)], some["phases"]


def die_before_second_total(flag: str, store: Any) -> None:
    """From now on, this rank, the last of three, dies in a sum over ranks after it has sent its part of the sum to rank
    0, and rank 0 has set the flag; rank 1 never gets that part."""
    original, sends = byte_transport.start_send, []

    def send(*arguments: Any) -> Any:
        if len(sends) == 3:
            sends[2].wait()
            store.wait([flag], datetime.timedelta(seconds=60))
            die()
        sends.append(original(*arguments))
        return sends[-1]

    byte_transport.start_send = send
