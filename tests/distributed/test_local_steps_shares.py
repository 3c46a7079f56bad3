"""Local steps in proportion to speed: how many each rank makes in a round, and what its replica counts for."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.local_steps import RATE, batch, loss_of, make_step, model_of
from support.rank_tests import on_ranks
from support.training import message_of
from torch import Tensor, nn

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.data_parallel import DistributedDataParallel

PLAIN = functools.partial(torch.optim.SGD, lr=1.0)  # an outer optimizer that takes the mean as it is
ROUNDS = 7

# name, options; steps and delay of a round of the fastest rank, and the share of itself that a rank keeps
CASES: list[tuple[str, dict[str, Any], int, int, float]] = [
    ("local_sgd", {"sync_every": 4}, 4, 0, 0.0),
    ("diloco", {"sync_every": 5, "outer_optimizer": PLAIN}, 5, 0, 0.0),
    ("streaming_diloco", {"sync_every": 8, "delay": 2, "alpha": 0.25, "outer_optimizer": PLAIN}, 4, 2, 0.25),
]


def _trained(rank: int, device: torch.device, name: str, options: dict[str, Any]) -> tuple[Any, torch.optim.Optimizer]:
    model = model_of(rank).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return bagua.with_bagua(model, [optimizer], Algorithm.init(name, **options)), optimizer


def _train(model: Any, optimizer: torch.optim.Optimizer, rank: int, rounds: int, first: int = 0) -> list[int]:
    """Until so many rounds are over. Returns how many steps each of them had."""
    steps, before = [0], model.bagua_algorithm.rounds
    while model.bagua_algorithm.rounds < rounds:
        make_step(model, [optimizer], first, rank)
        first += 1
        steps[-1] += 1
        if model.bagua_algorithm.rounds != before:
            before = model.bagua_algorithm.rounds
            steps.append(0)
    return steps[:-1]


def _by_hand(steps: list[int], delays: list[int], fragments: list[list[str]], alpha: float) -> list[nn.Module]:
    """All replicas after ROUNDS rounds, in one process; exchanges add what has moved, by steps since the last one."""
    replicas = [model_of(0) for _ in steps]
    optimizers = [torch.optim.SGD(one.parameters(), lr=RATE) for one in replicas]
    outer = {name: one.detach().clone() for name, one in replicas[0].named_parameters()}
    made = [0] * len(steps)
    counted = [[0] * len(steps) for _ in fragments]

    def train(replica: int, count: int) -> None:
        for _ in range(count):
            optimizers[replica].zero_grad()
            loss_of(replicas[replica], batch(made[replica], replica)).backward()
            optimizers[replica].step()
            made[replica] += 1

    for number in range(ROUNDS):
        place = number % len(fragments)
        for replica, (all_of_them, delay) in enumerate(zip(steps, delays, strict=True)):
            train(replica, all_of_them - delay)
        since = [now - then for now, then in zip(made, counted[place], strict=True)]
        counted[place] = list(made)
        means = {
            name: sum(
                share / sum(since) * dict(one.named_parameters())[name].detach()
                for share, one in zip(since, replicas, strict=True)
            )
            for name in fragments[place]
        }
        for replica, delay in enumerate(delays):
            train(replica, delay)
            with torch.no_grad():
                for name, parameter in replicas[replica].named_parameters():
                    if name in means:
                        outer[name] = means[name]
                        parameter.copy_(outer[name] + alpha * (parameter - outer[name]))
    return replicas


def _fragments_of(model: Any) -> list[list[str]]:
    found: dict[str, list[str]] = {}
    for bucket in model.bagua_buckets:
        found.setdefault(bucket.name.partition(".")[0], []).extend(record.name for record in bucket.records)
    return [found[number] for number in sorted(found)]


@on_ranks(2)
def test_replicas_count_by_their_steps_since_the_last_exchange(rank: int, device: torch.device) -> None:
    for name, options, interval, delay, alpha in CASES:
        for shares in ([2, 1], [0.1, 30]):
            steps = [max(1, round(interval * one / max(shares))) for one in shares]
            delays = [min(round(delay * one / interval), one - 1) for one in steps]
            model, optimizer = _trained(rank, device, name, {**options, "shares": shares})
            assert _train(model, optimizer, rank, ROUNDS) == [steps[rank]] * ROUNDS
            wanted = _by_hand(steps, delays, _fragments_of(model), alpha)[rank]
            for (key, mine), theirs in zip(model.named_parameters(), wanted.parameters(), strict=True):
                torch.testing.assert_close(
                    mine.detach().cpu(), theirs, atol=2e-5, rtol=0, msg=lambda said, of=(name, key): f"{of}: {said}"
                )


class Clock:
    """In place of the recorder's, on the CPU: goes on by what a step of this rank takes."""

    def __init__(self, model: Any) -> None:
        self.now = 0.0
        self.step_s = 1.0
        self.evaluation_s = 0.0  # between two rounds
        self._algorithm, self._rounds = model.bagua_algorithm, 0
        self.slow: set[int] = set()  # steps that take as long as many
        self.steps = 0
        model.bagua_ddp.recorder._clock = lambda: self.now
        model.register_forward_pre_hook(self._go_on)

    def _go_on(self, *_: object) -> None:
        self.now += 60.0 if self.steps in self.slow else self.step_s
        if self._rounds != self._algorithm.rounds:
            self._rounds = self._algorithm.rounds
            self.now += self.evaluation_s
        self.steps += 1


@on_ranks(2)
def test_steps_follow_the_speeds_of_the_rounds_before(rank: int) -> None:
    cpu = torch.device("cpu")
    model, optimizer = _trained(rank, cpu, "diloco", {"sync_every": 20, "shares": "auto"})
    clock = Clock(model)
    clock.evaluation_s = (30.0, 0.0)[rank]
    # Equal ranks stay equal, whatever one of them does once, or between two rounds; so they do with noise.
    clock.slow, clock.step_s = {7} if rank else set(), (1.0, 1.04)[rank]
    assert _train(model, optimizer, rank, 3) == [20, 20, 20]
    # A rank becomes slower.
    clock.step_s = (1.0, 2.0)[rank]
    steps = _train(model, optimizer, rank, 12)
    assert steps[0] == 20
    assert steps[-3:] == [(20, 10)[rank]] * 3
    clock.slow = {clock.steps + 3} if rank else set()
    assert _train(model, optimizer, rank, 14) == [(20, 10)[rank]] * 2
    # The other one becomes the slowest, by more than the steps of a round; and less so.
    clock.step_s, clock.evaluation_s = (50.0, 1.0)[rank], 0.0
    assert _train(model, optimizer, rank, 22)[-1] == (1, 20)[rank]
    clock.step_s = (4.0, 1.0)[rank]
    assert _train(model, optimizer, rank, 34)[-1] == (5, 20)[rank]
    assert _steps(model) == [5, 20]
    # Saved where a round begins, and in one: both go on with the steps of the state.
    for extra in ((0, 0), (2, 7)):
        for number in range(extra[rank]):
            make_step(model, [optimizer], number, rank)
        state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), model.bagua_ddp.state_dict()))
        rounds = model.bagua_algorithm.rounds
        went_on = _train(model, optimizer, rank, rounds + 1, first=500)
        other, its_optimizer = _trained(rank + 5, cpu, "diloco", {"sync_every": 20, "shares": "auto"})
        other.load_state_dict(state[0])
        its_optimizer.load_state_dict(state[1])
        other.bagua_ddp.load_state_dict(state[2])
        assert _train(other, its_optimizer, rank, rounds + 1, first=500) == went_on
        for one, resumed in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, resumed)
    # By hand, and without shares, they are not those of a state; with a shorter round they are in proportion.
    for options, wanted in (
        ({"shares": [3, 1], "sync_every": 6}, (6, 2)),
        ({"sync_every": 6}, (6, 6)),
        ({"shares": "auto", "sync_every": 10}, tuple(round(one / 2) for one in _steps(model))),
    ):
        other, its_optimizer = _trained(rank, cpu, "diloco", options)
        other.load_state_dict(model.state_dict())
        other.bagua_ddp.load_state_dict(copy.deepcopy(model.bagua_ddp.state_dict()))
        rounds = model.bagua_algorithm.rounds
        assert _train(other, its_optimizer, rank, rounds + 1) == [max(1, wanted[rank])], options


def _steps(model: Any) -> list[int]:
    found: list[int] = model.bagua_algorithm.state_dict()["shares"]["steps"]
    return found


@on_ranks(2)
def test_a_warm_up_and_fragments_have_shares_and_samples_count_with_batch_weights(rank: int) -> None:
    cpu = torch.device("cpu")
    options = {"sync_every": 16, "fragments": 2, "delay": 3, "codec": "int8", "warmup_steps": 3, "shares": "auto"}
    model, optimizer = _trained(rank, cpu, "streaming_diloco", options)
    clock = Clock(model)
    clock.step_s = (3.0, 1.0)[rank]
    for number in range(3):
        make_step(model, [optimizer], number, rank)
    assert _train(model, optimizer, rank, 4) == [8, *[(3, 8)[rank]] * 3]
    # A state with an exchange under way has what was told in it.
    for number in range((2, 6)[rank]):
        make_step(model, [optimizer], number, rank)
    state = copy.deepcopy((model.state_dict(), model.bagua_ddp.state_dict()))
    assert state[1]["algorithm"]["under_way"]
    assert state[1]["algorithm"]["shares"]["told"] == [3.0, 1.0]
    other, its_optimizer = _trained(rank, cpu, "streaming_diloco", options)
    _train(model, optimizer, rank, 6, first=40)
    for _ in range(2):  # also where exchanges have told something else since then
        other.load_state_dict(state[0])
        other.bagua_ddp.load_state_dict(copy.deepcopy(state[1]))
        _train(other, its_optimizer, rank, 6, first=40)
        for mine, resumed in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, resumed)

    # The mean is by samples: each rank's weights are a number of its own.
    net = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    algorithm = Algorithm.init("local_sgd", sync_every=4, shares=[1, 2])
    weighted: Any = DistributedDataParallel(net, optimizers=[optimizer], algorithm=algorithm, count_batch=True)
    with torch.no_grad():
        net.weight.zero_()
    for _ in range((2, 4)[rank]):
        optimizer.zero_grad()
        weighted((rank + 1.0) * torch.ones((5, 1)[rank], 1)).mean().backward()
        optimizer.step()
    moved: Tensor = -(10 * 2 * 1.0 + 4 * 4 * 2.0) / torch.tensor(14.0)
    torch.testing.assert_close(net.weight.detach().view(()), moved)


@on_ranks(2, fresh=True)
def test_shares_that_no_rank_can_have_are_refused(rank: int) -> None:
    for shares, said in (("speed", "shares='speed' is unknown"), ([1, 0], r"shares=\[1, 0\] must be positive numbers")):
        with pytest.raises(ValueError, match=said):
            Algorithm.init("local_sgd", sync_every=4, shares=shares)
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    three = Algorithm.init("diloco", sync_every=4, shares=[1, 2, 3])
    assert "must be 2 positive numbers" in message_of(ValueError, lambda: bagua.with_bagua(net, [optimizer], three))
    different = Algorithm.init("diloco", sync_every=4, shares=[1, 2 + rank])
    said = message_of(RuntimeError, lambda: bagua.with_bagua(net, [optimizer], different))
    assert "shares=[1.0, 2.0]" in said
    # Of one rank's state alone.
    model, optimizer = _trained(rank, torch.device("cpu"), "local_sgd", {"sync_every": 2, "shares": "auto"})
    if rank:
        model.bagua_algorithm._shares.steps = [1, 2]
    dist.barrier()
    said = message_of(RuntimeError, lambda: _train(model, optimizer, rank, 1))
    assert f"Ranks [{1 - rank}] count on other numbers of steps in this round than this rank" in said
