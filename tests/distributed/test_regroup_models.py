"""Several models and optimizers in one job follow together when it loses ranks and when others join."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import wait_until
from support.regrouped import (
    LAYERS,
    Ledger,
    after_calls,
    device_type,
    die,
    job_store,
    join_job,
    on_cpus,
    run_job,
    start,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bagua.torch_api as bagua
from bagua.regroup import coordinator
from bagua.regroup.job_step import WorldChange
from bagua.regroup.transfer import Fetch
from bagua.regroup.watched_group import WatchedGroup, WatchedWork

NOISE, SAMPLE = 3, 5
Players = tuple[nn.Module, nn.Module, Sequence[torch.optim.Optimizer]]


def _players(seed: int) -> Players:
    """A generator with its optimizer, and a discriminator with two."""
    torch.manual_seed(seed)
    generator = nn.Sequential(nn.Linear(NOISE, 8), nn.Tanh(), nn.Linear(8, SAMPLE))
    discriminator = nn.Sequential(nn.Linear(SAMPLE, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizers = (
        torch.optim.Adam(generator.parameters(), 1e-2),
        torch.optim.Adam([one for one in discriminator.parameters() if one.dim() > 1], 1e-2),
        torch.optim.SGD([one for one in discriminator.parameters() if one.dim() == 1], 0.1, momentum=0.5),
    )
    return generator, discriminator, optimizers


def _losses(generator: Any, discriminator: Any, number: int, step: int) -> tuple[Any, Any]:
    """Of both, as functions."""
    torch.manual_seed(100 * number + step)
    noise, real = torch.randn(4, NOISE), torch.randn(4, SAMPLE)

    def of_discriminator() -> Tensor:
        return (discriminator(generator(noise).detach()) - discriminator(real)).square().mean()

    def of_generator() -> Tensor:
        return -discriminator(generator(noise)).mean()

    return of_discriminator, of_generator


def _replayed(players: Players, numbers: Sequence[int], begin: int, end: int) -> None:
    """The same steps by plain torch: means over replicas of these ranks."""
    generator, discriminator, (of_generator, *of_discriminator) = players
    for step in range(begin, end):
        for turn, (net, optimizers) in enumerate(((discriminator, of_discriminator), (generator, [of_generator]))):
            gradients: list[list[Tensor]] = []
            for number in numbers:
                net.zero_grad()
                _losses(generator, discriminator, number, step)[turn]().backward()
                gradients.append([one.grad.clone() for one in net.parameters() if one.grad is not None])
            for one, *parts in zip(net.parameters(), *gradients, strict=True):
                one.grad = sum((part / len(numbers) for part in parts[1:]), parts[0] / len(numbers))
            for optimizer in optimizers:
                optimizer.step()


def _wrap_players(players: Players) -> tuple[Any, Any]:
    generator, discriminator, (of_generator, *of_discriminator) = players
    return (
        bagua.with_bagua(generator, [of_generator]),
        bagua.data_parallel.DistributedDataParallel(discriminator, optimizers=of_discriminator),
    )


def _wrap_too_little_first(players: Players) -> tuple[Any, Any]:
    """Of a process that joins."""
    generator, _, (of_generator, *_) = players
    alone = bagua.with_bagua(generator, [of_generator])
    with pytest.raises(RuntimeError, match="has wrapped 1 models, and the job that it was to join has more"):
        alone(torch.ones(1, NOISE)).sum().backward()
    of_generator.zero_grad()
    other = nn.Linear(SAMPLE, 2)
    with pytest.raises(RuntimeError, match=r"cannot join the job, as rank 1.\n.*'0.weight'"):
        bagua.with_bagua(other, [torch.optim.SGD(other.parameters(), 0.1)])
    generator.bagua_ddp.detach()  # type: ignore[operator]
    return _wrap_players(players)


def _play(on_loss: str) -> None:
    """Of two ranks one dies in the generator's turn, and another process joins the other."""
    store, number, is_new = job_store(), int(os.environ["RANK"]), os.environ["WORLD_SIZE"] == "3"
    scaler = torch.amp.GradScaler(device_type(), init_scale=4.0)
    if is_new:
        store.wait(["lost"])
        start(min_ranks=1, on_loss=on_loss, state={"scaler": scaler})
    else:
        join_job(min_ranks=1, on_loss=on_loss, state={"scaler": scaler})
    players = _players(number)
    fetches: list[Fetch] = []
    original = Fetch.run

    def run(fetch: Fetch, *arguments: Any) -> bool:
        fetches.append(fetch)
        return original(fetch, *arguments)

    Fetch.run = run  # type: ignore[method-assign]
    generator, discriminator = (_wrap_too_little_first if is_new else _wrap_players)(players)
    of_generator, *of_discriminator = players[2]
    told: list[tuple[str, WorldChange]] = []
    joined: list[tuple[int, Players]] = []

    def keep() -> None:
        twins = _players(7)
        for twin, one in zip((*twins[:2], *twins[2]), (*players[:2], *players[2]), strict=True):
            twin.load_state_dict(copy.deepcopy(one.state_dict()))  # type: ignore[attr-defined]
        joined.append((bagua.regroup_step(), twins))

    def note(change: WorldChange) -> None:
        told.append(("generator", change))
        if change.joined_ranks:
            keep()

    generator.on_regroup(note)
    discriminator.on_regroup(lambda change: told.append(("discriminator", change)))
    if is_new:
        keep()
        (fetch,) = fetches
        assert (fetch.differing, fetch.received) == (0, 0)
    dropped = []
    while not joined or bagua.regroup_step() < joined[0][0] + 3:
        step = bagua.regroup_step()
        discriminator_loss, generator_loss = _losses(generator, discriminator, number, step)
        for one in players[2]:
            one.zero_grad()
        scaler.scale(discriminator_loss()).backward()
        for one in of_discriminator:
            scaler.step(one)
        # Two ways to say that its gradients are not wanted.
        players[1].requires_grad_(step % 2 == 1)
        with discriminator.no_sync() if step % 2 else contextlib.nullcontext():
            loss = scaler.scale(generator_loss())
            if number == 1 and step == 2:
                die()
            loss.backward()
        players[1].requires_grad_(True)
        assert generator.step_was_dropped == all(one.grad is None for one in players[0].parameters())
        scaler.step(of_generator)
        scaler.update()
        if generator.step_was_dropped:
            dropped.append((step, discriminator.step_was_dropped))
            store.set("lost", b"")
    begin, twins = joined[0]
    if not is_new:
        # The discriminator has made step 2, which counts, and the generator has not.
        assert dropped == [(2, False)]
        assert [(name, one.step, one.lost_ranks, one.joined_ranks) for name, one in told] == [
            (name, at, lost, new)
            for at, lost, new in ((3, (1,), ()), (begin, (), (1,)))
            for name in ("generator", "discriminator")
        ]
    _replayed(twins, (0, 2), begin, begin + 3)
    for plain, one in zip(twins[:2], players[:2], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), one.parameters(), strict=True))
    everybody: list[Any] = [None, None]
    state = [sorted(one.state_dict()["state"].items()) for one in players[2]]
    dist.all_gather_object(everybody, (repr(state), scaler.state_dict(), bagua.regroup_step()))
    assert everybody[0] == everybody[1]


@pytest.mark.parametrize("on_loss", ["drop", "repeat"])
def test_models_follow_together_and_one_that_joins_has_the_state_of_all(on_loss: str) -> None:
    """The rest of a step is dropped in which an optimizer has stepped, also where passes are repeated."""
    run_job(2, _play, on_loss, joiners=1, expect_death={1})


class _Counter(nn.Module):
    """Its weight says by what it was called in steps that were made."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))
        self.register_buffer("broadcast_before_each_pass", torch.zeros(1))

    def forward(self, amount: float) -> Tensor:
        return -(self.weight * amount).sum()


def _summed(net: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
    """Wrapped, with small buckets."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    algorithm = bagua.algorithms.Algorithm.init("gradient_allreduce", average=False)
    model = bagua.data_parallel.DistributedDataParallel(
        net, optimizers=[optimizer], algorithm=algorithm, bucket_cap_mb=128 / 2**20
    )
    return model, optimizer


def _two_broadcasts_in_a_step(on_loss: str, models: int) -> tuple[list[float], int]:
    """Rank 0 loses the second one of step 2, which rank 1 has got from it."""
    rank, store = join_job(timeout_s=20, on_loss=on_loss), job_store()
    current = coordinator.current()
    assert current is not None
    nets = [Ledger(has_buffer=True) for _ in range(models)]
    wrapped = [_summed(one) for one in nets]
    original, calls = WatchedGroup.broadcast, 0  # type: ignore[misc]

    def broadcast(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal calls
        work = original(self, *arguments, **named)
        calls += 1
        if (bagua.regroup_step(), calls, dist.get_world_size()) == (2, 2, 3):
            work.wait()
            if rank == 2:
                store.wait(["sent"])
                die()
            if rank == 0:
                store.set("sent", b"")
                wait_until(lambda: current.is_pending, "this rank is told of the loss", 60)
                return WatchedWork(None, dist.DistBackendError("Connection closed by peer"), self._on_failure)
        return work

    WatchedGroup.broadcast = broadcast  # type: ignore[assignment]
    dropped = 0
    amounts = torch.arange(1.0, 1 + LAYERS).view(LAYERS, 1)
    while bagua.regroup_step() < 5:
        calls = 0
        for _, optimizer in wrapped:
            optimizer.zero_grad()
        # Of two models, autograd comes to the last layers of both, and then to the first ones.
        first, last = range(2), range(2, LAYERS)
        loss = wrapped[0][0](amounts, 0, first) + wrapped[-1][0](amounts, 0, last if models == 1 else first)
        for one in nets if models > 1 else []:
            loss = loss + one.forward(amounts, 0, last)
        loss.backward()
        for model, optimizer in wrapped:
            optimizer.step()
            dropped += model.step_was_dropped
    return [one[0].item() for net in nets for one in net.layers], dropped


@pytest.mark.parametrize(("on_loss", "models"), [("drop", 1), ("repeat", 1), ("repeat", 2)])
def test_ranks_at_different_broadcasts_of_a_step_drop_it_or_repeat_what_some_lack(on_loss: str, models: int) -> None:
    """With two models, rank 1 repeats a pass that rank 0 makes for the first time."""
    first, second, _ = run_job(3, _two_broadcasts_in_a_step, on_loss, models, expect_death={2}, timeout=60)
    assert (
        first
        == second
        == ([layer * (3.0 * 2 + 2 * 3) for layer in range(1, 1 + LAYERS)] * models, int(on_loss == "drop"))
    )


def _losses_that_are_repeated() -> tuple[list[list[float]], int]:
    """Of six ranks two are left, with two models."""
    rank = join_job(timeout_s=20, on_loss="repeat", min_ranks=1)
    current = coordinator.current()
    assert current is not None
    nets = _Counter(), _Counter()
    (first, of_first), (second, of_second) = (_summed(one) for one in nets)
    optimizers = of_first, of_second

    def lose(victim: int) -> None:
        """The others go on when they are told."""
        if rank == victim:
            die()
        wait_until(lambda: current.is_pending, "this rank is told of the loss", 60)

    half_made: list[int] = []
    first.on_regroup(lambda _: half_made.append(current.epoch.made))
    dropped = 0
    while (step := bagua.regroup_step()) < 7:
        case = step, dist.get_world_size()
        for one in optimizers:
            one.zero_grad()
        if case == (1, 6):
            lose(5)  # in the forward pass, all have communicated nothing yet
        # And rank 4 in the pass of both that follows, when the first model of it has begun to communicate.
        with after_calls(WatchedGroup, "allreduce", 1) if (step, rank) == (1, 4) else contextlib.nullcontext():
            if step != 5:
                (first(1.0) + second(2.0)).backward()
        if step == 5:
            first(1.0).backward()
            assert nets[0].weight.grad is not None
            nets[0].weight.grad.mul_(3.0)  # which nobody could do again
            loss = second(2.0)
            with contextlib.ExitStack() as stack:
                if case == (5, 3):
                    # At its end, when this rank has all gradients.
                    original, current._wait_for_pass = current._wait_for_pass, lambda: lose(2)  # type: ignore[method-assign]
                    stack.callback(setattr, current, "_wait_for_pass", original)
                loss.backward()
        optimizers[0].step()
        if case == (3, 4):
            lose(3)  # between two steps of which all ranks have the gradients
        optimizers[1].step()
        dropped += first.step_was_dropped
        assert first.step_was_dropped == second.step_was_dropped
    assert half_made == [0] * 4
    return [one.weight.tolist() for one in nets], dropped


@on_cpus("it is told where the host waits for a pass")
def test_passes_of_two_models_are_repeated_until_a_program_has_their_gradients() -> None:
    one, other, *_ = run_job(6, _losses_that_are_repeated, expect_death={2, 3, 4, 5}, timeout=60)
    ranks = (6, 4, 4, 4, 3, 2, 2)  # of each step
    expected = [[float(sum(ranks) + 2 * ranks[5])] * 8, [2.0 * sum(ranks)] * 8]
    assert one == other == (expected, 1)  # the step of the two passes was dropped


def _repeat_of_two() -> str:
    log = io.StringIO()
    logging.getLogger("bagua").addHandler(logging.StreamHandler(log))
    join_job(on_loss="repeat")
    first, second = nn.Linear(3, 5), nn.Linear(2, 2)
    bagua.with_bagua(first, [torch.optim.SGD(first.parameters(), 0.1)])
    with pytest.raises(NotImplementedError, match="with batch weights is for one model, and Linear_1 is another"):
        bagua.with_bagua(second, [torch.optim.SGD(second.parameters(), 0.1)], batch_weights=True)
    bagua.with_bagua(second, [torch.optim.SGD(second.parameters(), 0.1)])
    return log.getvalue()


def test_a_model_whose_steps_are_repeated_says_at_which_cost_and_batch_weights_are_of_one_alone() -> None:
    (text,) = run_job(1, _repeat_of_two)
    assert 'Linear: on_loss="repeat" keeps copies of gradients, 80 B on each rank\n' in text


def _refusals() -> None:
    join_job()
    players = _players(0)
    with pytest.raises(NotImplementedError, match="a module without optimizers"):
        bagua.data_parallel.DistributedDataParallel(nn.Linear(2, 2))
    generator, discriminator = _wrap_players(players)
    of_generator, *of_discriminator = players[2]

    def play(is_careful: bool) -> None:
        of_both = _losses(generator, discriminator, 0, 0)
        of_both[0]().backward()
        for one in of_discriminator:
            one.step()
        if is_careful:
            with discriminator.no_sync():
                of_both[1]().backward()
            of_generator.step()
        else:
            of_both[1]().backward()

    play(True)
    late = nn.Linear(2, 2)
    with pytest.raises(NotImplementedError, match=r"Linear_\d is wrapped after training has begun \(step 1\)"):
        bagua.with_bagua(late, [torch.optim.SGD(late.parameters(), 0.1)])
    bagua.with_bagua(players[0], [of_generator])  # again
    play(True)
    stranger = torch.optim.SGD(players[0].parameters(), 0.1)
    with pytest.raises(NotImplementedError, match=r"SGD steps parameters of .*, which was wrapped without it"):
        stranger.step()
    with pytest.raises(NotImplementedError, match=r"a second backward pass, before Adam of Sequential_\d has stepped"):
        play(False)
    with pytest.raises(NotImplementedError, match="SGD steps a second time, before Adam of"):
        of_discriminator[1].step()
    # As the error says, of a step that leaves the generator out.
    before = bagua.regroup_step(), [one.clone() for one in players[0].parameters()]
    of_generator.zero_grad()
    of_generator.step()
    assert bagua.regroup_step() == before[0] + 1
    assert all(torch.equal(*one) for one in zip(players[0].parameters(), before[1], strict=True))
    loader = DataLoader(range(16), batch_size=2, sampler=bagua.contrib.RegroupSampler(range(16)))  # type: ignore[arg-type]
    batches = iter(loader)
    next(batches)
    play(True)
    next(batches)
    _losses(generator, discriminator, 0, 0)[0]().backward()
    for one in of_discriminator:
        one.step()
    next(batches)
    with pytest.raises(RuntimeError, match="batches were drawn between the optimizers' steps of one step of the job"):
        of_generator.step()


def test_what_does_not_fit_a_step_is_refused_by_name() -> None:
    run_job(2, _refusals)
