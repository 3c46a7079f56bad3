"""A job that loses ranks at chosen points, and goes on without them, and that others join; for use inside a rank
(support.ranks).

The model is a ledger: its gradients are whole numbers that depend on the rank's first number and the step alone, and
its parameters their sums, for each step in another place. So the parameters say exactly which steps of which ranks were
trained, in any order of sums. Of several ledgers, each has a pass and an optimizer of its own in each step.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support import simulated_nccl
from support.processes import wait_until
from support.ranks import DEVICE_VARIABLE, RESOLVER, device_for, run_ranks
from torch import Tensor, nn

import bagua.torch_api as bagua
from bagua.collectives import byte_transport
from bagua.engine.backward_passes import BackwardPasses
from bagua.engine.state_feed import StateFollower
from bagua.job.failure_report import CollectiveError
from bagua.job.torch_internals import default_store
from bagua.regroup import coordinator, following, joining
from bagua.regroup.epochs import EpochStore
from bagua.regroup.following import Feed
from bagua.regroup.groups import Groups
from bagua.regroup.job_step import WorldChange
from bagua.regroup.transfer import Fetch, StateServer
from bagua.regroup.watched_group import WatchedGroup

LAYERS, WIDTH = 6, 16
_FIRST, _REST = range(2), range(2, LAYERS)
SMALL_BUCKETS = {"BAGUA_DEFAULT_BUCKET_SIZE": "128"}  # bytes: two layers each


# Of a step, in the order in which they come. "sent 2" is after the launch of the second bucket.
POINTS = ("forward", "gradient 5", "gradient 2", "sent 1", "sent 3", "returned", "stepping", "stepped")
# Of a regroup. "repeating" is within the second reduction of a step, if there is one.
POINTS_OF_REGROUP = ("told", "reported", "ready", "connected", "repeating")
# Of a process that joins, and of a rank that admits it.
POINTS_OF_JOIN = ("asked", "following", "fetched", "ready", "connected", "given")
POINTS_OF_ADMISSION = ("feeding", "reported", "offered", "ready", "connected", "handing")


class Kill(NamedTuple):
    """Of the rank that was this one at first, by its own hand: at a point of this step or of the next one, or of a
    regroup then, or else before what follows. One that is patient dies when it comes to the point, if ever. Of several
    models, in the turn of this one."""

    rank: int
    step: int
    point: str
    is_patient: bool = False
    model: int = 0


class Join(NamedTuple):
    """Of the process of this number, which is more than the ranks at first, when the job has come to this step."""

    rank: int
    step: int


def drawn_kills(seed: int, ranks: int, count: int, steps: int, models: int = 1) -> list[Kill]:
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
    return [one._replace(model=draw.randrange(models)) for one in kills]


def drawn_joins(seed: int, ranks: int, count: int, steps: int) -> tuple[list[Join], list[Kill]]:
    """Some join at the same step. Some of them die while they join, as some ranks do that admit them, but not all."""
    draw = random.Random(seed)
    joins: list[Join] = []
    kills: list[Kill] = []
    for rank in range(ranks, ranks + count):
        joins.append(Join(rank, joins[-1].step if joins and draw.random() < 0.3 else draw.randrange(1, steps)))
        if draw.random() < 0.35:
            kills.append(Kill(rank, 0, draw.choice(POINTS_OF_JOIN)))
    for victim in draw.sample(range(ranks), draw.randrange(ranks)):
        is_patient = draw.random() < 0.7
        point = draw.choice(POINTS_OF_ADMISSION if is_patient else POINTS)
        kills.append(Kill(victim, draw.choice(joins).step, point, is_patient))
    return joins, kills


def run_job(ranks: int, function: Callable[..., Any], *arguments: Any, joiners: int = 0, **named: Any) -> list[Any]:
    """As `run_ranks`, with a store that none of them serves.

    Args:
        joiners: processes that are started in addition, of no rank of the job's beginning.
    """
    os.environ.setdefault("RES_OPTIONS", RESOLVER)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    env = {"WORLD_SIZE": str(ranks), **named.pop("env", {}), "MASTER_PORT": str(store.port)}
    environments = [dict(env) for _ in range(ranks + joiners)]
    for number in range(ranks, ranks + joiners):
        environments[number]["WORLD_SIZE"] = str(number + 1)
    return run_ranks(ranks + joiners, function, *arguments, env=environments, **named)


def job_store() -> dist.Store:
    """Which is none of an epoch's."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    client = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
    return dist.PrefixStore("test", client)


def device_type() -> str:
    """On which the ranks of a job train."""
    return os.environ.get(DEVICE_VARIABLE, "cpu")


def on_cpus(why: str) -> pytest.MarkDecorator:
    """Not where the ranks of a job train on GPUs, and why."""
    return pytest.mark.skipif(device_type() != "cpu", reason=f"on CPUs alone: {why}")


def use_device() -> None:
    """Tensors of this process are made on the CPU or, with BAGUA_TEST_DEVICE=cuda, on its GPU from now on."""
    torch.set_default_device(device_for(int(os.environ["RANK"])))


def start(timeout_s: float = 60, **options: Any) -> None:
    """`init_process_group`, after `use_device`."""
    use_device()
    if simulated_nccl.SIMULATED in os.environ:
        simulated_nccl.install()
    backend = "gloo" if device_type() == "cpu" else None
    bagua.init_process_group(regroup=bagua.Regroup(**options), timeout=timeout_s, backend=backend)


def join_job(timeout_s: float = 60, **options: Any) -> int:
    """The number of this process. It is one of the first ranks."""
    rank = int(os.environ["RANK"])
    start(timeout_s, **options)
    # All of them have joined before one dies.
    store = default_store()
    store.set(f"joined {rank}", b"")
    store.wait([f"joined {other}" for other in range(dist.get_world_size())])
    return rank


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def amount(first_rank: int, step: int, layer: int) -> int:
    return 1 + first_rank + 2 * (step % 8) + layer  # in sum below 256, so that bf16 is exact


class Ledger(nn.Module):
    """
    Args:
        has_buffer: one, which the wrapper broadcasts in each forward pass.
    """

    def __init__(self, has_buffer: bool = False) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(WIDTH)) for _ in range(LAYERS)])
        if has_buffer:
            self.register_buffer("broadcast", torch.zeros(1))

    def forward(self, amounts: Tensor, step: int, layers: range = range(LAYERS)) -> Tensor:
        """The loss of these layers."""
        loss = amounts.new_zeros(())
        for layer in layers:
            loss = loss - self.layers[layer][step % WIDTH] * amounts[layer]
        return loss


class History:
    """Which ranks, by their first numbers, trained from which step on."""

    def __init__(self) -> None:
        self.phases: list[tuple[int, list[int]]] = [(bagua.regroup_step(), _members())]

    def note(self, change: WorldChange) -> None:
        regrouping = coordinator.current()
        assert regrouping is not None
        assert change.world_size == dist.get_world_size() == bagua.get_world_size() == len(regrouping.epoch.members)
        assert change.rank == dist.get_rank() == bagua.get_rank()
        if self.phases[-1][0] == change.step:
            self.phases.pop()  # in which no step was made: another rank may not even have come to it
        self.phases.append((change.step, _members()))


def _members() -> list[int]:
    regrouping = coordinator.current()
    assert regrouping is not None
    return [one.first_rank for one in regrouping.epoch.members]


def expected(phases: list[tuple[int, list[int]]], layer: int, steps: int) -> list[int]:
    """What a ledger has after so many steps."""
    totals = [0] * WIDTH
    for step in range(steps):
        members = next(members for begin, members in reversed(phases) if begin <= step)
        totals[step % WIDTH] += sum(amount(rank, step, layer) for rank in members)
    return totals


def keep_ledger(
    kills: list[Kill],
    steps: int,
    how: str,
    codec: str | None,
    min_ranks: int,
    joins: Sequence[Join] = (),
    follows: bool = True,
    models: int = 1,
    on_loss: str = "drop",
    has_one_pass: bool = False,
) -> dict[str, Any]:
    """Trains ledgers until the job has made so many steps, and all have joined that live. If none that join may follow
    the others, they are too slow. Several models have one backward pass each in a step, or one together. Returns what
    this rank has seen."""
    if not follows:
        following.MAX_STEPS = 0
    options: dict[str, Any] = {"min_ranks": min_ranks, "on_loss": on_loss}
    number, store = int(os.environ["RANK"]), job_store()
    join = next((one for one in joins if one.rank == number), None)
    mine = next((one for one in kills if one.rank == number), None)
    with contextlib.ExitStack() as stack:
        if join is None:
            join_job(**options)
        else:
            store.wait([f"step {join.step}"], datetime.timedelta(seconds=60))
            if mine is not None and mine.point in POINTS_OF_JOIN:
                _die_while_joining(mine, store, stack)
            start(**options)
            assert (dist.get_rank(), dist.get_world_size(), bagua.regroup_step()) == (0, 1, 0)
        trained = [_wrapped_ledger(how, codec, has_one_pass) for _ in range(models)]
    histories = [History() for _ in trained]
    for (_, _, model), history in zip(trained, histories, strict=True):
        model.on_regroup(history.note)
    if join is not None:
        store.set(f"settled {number}", b"")
    dropped = 0
    turns = [range(models)] if has_one_pass else [range(one, one + 1) for one in range(models)]
    while not _is_end(store, step := bagua.regroup_step(), steps, joins):
        store.set(f"step {step}", b"")
        for turn in turns:
            kill = mine if mine is not None and mine.model in turn else None
            with dying(kill, step, *trained[0 if kill is None else kill.model][:2]):
                amounts = torch.tensor([[float(amount(number, step, layer))] for layer in range(LAYERS)])
                losses = []
                for _, optimizer, model in (trained[one] for one in turn):
                    optimizer.zero_grad()
                    losses.append(model(amounts, step, *([_FIRST] if has_one_pass else [])))
                if has_one_pass:
                    # The backward pass goes through the rest of all, and then through the first layers.
                    losses += [trained[one][0].forward(amounts, step, _REST) for one in turn]
                torch.cat(losses).sum().backward()
                for net, _, model in (trained[one] for one in turn):
                    if model.step_was_dropped:
                        assert all(one.grad is None for one in net.parameters())
                _die_at(kill, step, "returned")
                for one in turn:
                    net, optimizer, model = trained[one]
                    optimizer.step()
                    dropped += model.step_was_dropped
                    _die_at(kill if kill is None or kill.model == one else None, step, "stepped")
                    if not model.step_was_dropped:
                        with torch.no_grad():
                            net.layers[0].add_(1)  # one that follows the optimizer's steps does not see it
        # Made, or taken from a rank that has.
        assert on_loss == "drop" or bagua.regroup_step() == step + 1
    assert all(one.phases == histories[0].phases for one in histories)
    return {
        "totals": [[one.int().tolist() for one in net.layers] for net, _, _ in trained],
        "phases": histories[0].phases,
        "dropped": dropped,
        "rank": dist.get_rank(),
        "steps": step,
    }


def _wrapped_ledger(how: str, codec: str | None, has_buffer: bool = False) -> tuple[Ledger, torch.optim.Optimizer, Any]:
    net = Ledger(has_buffer)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    if how == "wrapper":
        wrapper = bagua.data_parallel.DistributedDataParallel(
            net, optimizers=[optimizer], algorithm=_algorithm(codec), bucket_cap_mb=128 / 2**20
        )
        return net, optimizer, wrapper
    return net, optimizer, bagua.with_bagua(net, [optimizer], _algorithm(codec))


def _is_end(store: dist.Store, step: int, steps: int, joins: Sequence[Join]) -> bool:
    """Whether the job has made so many steps. They are more if some join late: the first that sees them all says when
    it ends, before the others can come to that step."""
    if not joins:
        return step >= steps
    if store.check([f"settled {one.rank}" for one in joins]):
        store.compare_set("end", "", str(max(steps, step + 2)))
    return store.check(["end"]) and step >= int(store.get("end"))


def _algorithm(codec: str | None) -> Any:
    from bagua.torch_api.algorithms import Algorithm

    if codec is None:
        return Algorithm.init("gradient_allreduce", average=False)
    return Algorithm.init("bytegrad", average=False, codec=codec)


def _die_at(kill: Kill | None, step: int, point: str) -> None:
    if kill is not None and step >= kill.step and point == kill.point:
        die()


def _die_while_joining(kill: Kill, store: dist.Store, stack: contextlib.ExitStack) -> None:
    """This process dies at a point of its join, and lets it be known that nobody is to wait for it."""
    owner, name = {
        "asked": (joining, "_ask_members"),
        "following": (StateFollower, "take"),
        "fetched": (Fetch, "run"),
        "ready": (EpochStore, "set_ready"),
        "connected": (Groups, "install"),
        "given": (coordinator.Regrouping, "_take_rest"),
    }[kill.point]

    def settled_and_dead() -> None:
        store.set(f"settled {kill.rank}", b"")
        die()

    # The first of these calls is that of the process alone.
    stack.enter_context(after_calls(owner, name, 2 if kill.point in ("ready", "connected") else 1, settled_and_dead))


@contextlib.contextmanager
def dying(kill: Kill | None, step: int, net: Ledger, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    if kill is None or step < kill.step:
        yield
        return
    with contextlib.ExitStack() as stack:
        kind, _, number = kill.point.partition(" ")
        if kind == "forward" or (step > kill.step + 1 and not kill.is_patient):
            stack.callback(net.register_forward_pre_hook(die).remove)
        elif kind == "gradient":
            stack.callback(net.layers[int(number)].register_hook(die).remove)
        elif kind == "sent":
            stack.enter_context(after_calls(WatchedGroup, "allreduce", int(number)))
        elif kind == "stepping":
            stack.callback(optimizer.register_step_pre_hook(die).remove)
        elif kind == "told":
            stack.enter_context(after_calls(coordinator.Regrouping, "_reach_next", 0))
        elif kind == "feeding":
            stack.enter_context(after_calls(Feed, "begin_step", 1))
        elif kind == "offered":
            stack.enter_context(after_calls(StateServer, "offer", 1))
        elif kind == "handing":
            stack.enter_context(after_calls(coordinator.Regrouping, "_hand_over", 0))
        elif kind == "reported":
            stack.enter_context(after_calls(EpochStore, "report", 1))
        elif kind == "ready":
            stack.enter_context(after_calls(EpochStore, "set_ready", 1))
        elif kind == "connected":
            stack.enter_context(after_calls(Groups, "install", 0))
        elif kind == "repeating":
            stack.enter_context(after_calls(BackwardPasses, "begin_again", 1))
        yield


@contextlib.contextmanager
def after_calls(owner: Any, name: str, count: int, die: Callable[[], None] = die) -> Iterator[None]:
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


def check_ledgers(results: list[dict[str, Any] | None], steps: int, dead: set[int], has_one_pass: bool = False) -> None:
    """Of all ranks: survivors have the same, and each step of each rank of its time exactly once. Of several models,
    those after the first one may lack the steps in which ranks were lost, unless they have had one pass, which was
    repeated."""
    left = {rank: one for rank, one in enumerate(results) if one is not None}
    assert set(left) == set(range(len(results))) - dead, (left.keys(), dead)
    some = next(iter(left.values()))  # it was there at first
    for one in left.values():
        begin = one["phases"][0][0]
        phases = [phase for phase in some["phases"] if phase[0] >= begin]
        assert (one["totals"], one["phases"][1:], one["steps"]) == (some["totals"], phases[1:], some["steps"]), left
        assert begin == 0 or one["phases"] == phases, (one, some)
    members = some["phases"][-1][1]
    assert {rank: one["rank"] for rank, one in left.items()} == {rank: members.index(rank) for rank in left}
    assert some["steps"] >= steps
    first, *others = some["totals"]
    whole = [expected(some["phases"], layer, some["steps"]) for layer in range(LAYERS)]
    assert first == [[total + some["steps"] for total in whole[0]], *whole[1:]], some["phases"]
    for totals in others:
        lacking = [place for place, total in enumerate(totals[-1]) if total != whole[-1][place]]
        for total, one in zip(totals, whole, strict=True):
            made = some["steps"] - len(lacking) if one is whole[0] else 0
            assert total == [made + (value if place not in lacking else 0) for place, value in enumerate(one)]
        assert len(lacking) <= (0 if has_one_pass else len(dead))


def _is_stopped_for_long(pids: str, timeout_s: float) -> str:
    rank = join_job(timeout_s=timeout_s)
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = bagua.with_bagua(net, [optimizer])
    while (step := bagua.regroup_step()) < 3:
        if rank == 1 and step == 1:
            Path(pids).write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            die()
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        try:
            optimizer.step()
        except CollectiveError as error:
            Path(pids).with_suffix(".done").touch()
            return str(error)
    return ""


def check_stopped_rank(pids: Path, timeout_s: float, env: Mapping[str, str]) -> None:
    """Of two ranks with NCCL, one is stopped: the other one raises after its timeout, where it waits for its GPU.

    Args:
        pids: a file that is not there yet.
    """

    def wake() -> None:
        wait_until(pids.with_suffix(".done").exists, "the end of the other rank's wait", 100)
        os.kill(int(pids.read_text()), signal.SIGCONT)

    thread = threading.Thread(target=wake)
    thread.start()
    text, _ = run_job(2, _is_stopped_for_long, str(pids), timeout_s, env=env, expect_death={1})
    thread.join()
    assert text.startswith("Rank 1 (host ")
    assert "timed out" in text  # as torch's watchdog says it, or Bagua's


def ends_early() -> int:
    """Of a job whose rank 1 leaves in an orderly way, after two steps of four: how many ranks this one ends with."""
    rank = join_job(min_ranks=1)
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = bagua.with_bagua(net, [optimizer])
    while bagua.regroup_step() < (2 if rank == 1 else 4):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    ranks = dist.get_world_size()
    bagua.destroy_process_group()
    assert not bagua.is_initialized()
    return ranks


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
