"""Batch weights: the gradient is that of the mean over the samples of all ranks, whatever the ranks' counts."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.logged import told_of
from support.rank_tests import on_ranks
from support.sweeps import rest_is_deep
from support.training import NODES_OF_TWO_AND_ONE, begin, message_of
from torch import Tensor, nn

import bagua.torch_api as bagua
from bagua.codecs import get_codec
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.q_adam import QAdamOptimizer
from bagua.torch_api.data_parallel import DistributedDataParallel

# A pass: the number of samples of each rank. A round: passes in no_sync, and a last one that communicates.
Pass = list[int]
Round = list[Pass]


class Net(nn.Module):
    """With a part that a pass may leave out, and one that has no samples in its gradient."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(5, 6, dtype=dtype), nn.Linear(6, 3, dtype=dtype)
        self.left_out = nn.Linear(6, 3, dtype=dtype)

    def forward(self, x: Tensor, uses_all: bool = True) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.second(hidden) + (self.left_out(hidden) if uses_all else 0)


class Integers(nn.Module):
    """Gradients of integers are integers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3, bias=False, dtype=dtype)
        nn.init.constant_(self.first.weight, 2.0)

    def forward(self, x: Tensor, uses_all: bool = True) -> Tensor:
        return self.first(x)


class Drawn:
    """What a seed says: alike on all ranks."""

    def __init__(self, seed: int, ranks: int) -> None:
        draw = random.Random(seed)
        self.is_integer = seed % 4 == 0
        self.dtype = torch.float64 if seed % 2 else torch.float32
        self.loss = draw.choice(["mean", "sum"])
        self.wrapper = draw.choice(["with_bagua", "ddp"])
        self.counts = draw.random() < 0.3
        self.sets_after_forward = draw.random() < 0.3
        self.views = draw.random() < 0.7
        self.finds_unused = draw.random() < 0.3
        self.hierarchical = draw.random() < 0.3
        self.zeroes = draw.random() < 0.7  # between rounds
        self.sets_to_none = draw.random() < 0.5
        self.rounds = [self._round(draw, ranks) for _ in range(2)]
        self.generator = torch.Generator().manual_seed(seed)

    def _round(self, draw: random.Random, ranks: int) -> Round:
        choices = [0, 1, 2, 4] if self.is_integer else [0, 1, 2, 3, 5, 8]
        passes = draw.choice([1, 1, 2, 3])
        while True:
            round_ = [[draw.choice(choices) for _ in range(ranks)] for _ in range(passes)]
            # The mean of so many integers is exact, here and there.
            if all(map(any, round_)) and (not self.is_integer or sum(map(sum, round_)).bit_count() == 1):
                return round_

    def batch(self, size: int) -> Tensor:
        if self.is_integer:
            return torch.randint(-9, 9, (size, 5), generator=self.generator).to(self.dtype)
        return torch.randn(size, 5, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def loss_of(self, output: Tensor) -> Tensor:
        each = output.sum(1) if self.is_integer else output.square().sum(1)
        return each.mean() if self.loss == "mean" else each.sum()


def _check(seed: int, rank: int, ranks: int) -> None:
    drawn = Drawn(seed, ranks)
    make = Integers if drawn.is_integer else Net
    model, alone = make(drawn.dtype), make(drawn.dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options: dict[str, Any] = {"find_unused_parameters": drawn.finds_unused, "loss": drawn.loss}
    options["count_batch" if drawn.counts else "batch_weights"] = True
    algorithm = Algorithm.init("gradient_allreduce", hierarchical=drawn.hierarchical)
    if drawn.wrapper == "ddp":
        wrapped: Any = DistributedDataParallel(
            model, gradient_as_bucket_view=drawn.views, algorithm=algorithm, optimizers=[optimizer], **options
        )
        engine = wrapped.inner
    else:
        wrapped = bagua.with_bagua(model, [optimizer], algorithm, do_flatten=drawn.views, **options)
        engine = wrapped.bagua_ddp
    uses_all = not drawn.finds_unused
    for round_ in drawn.rounds:
        everything = []
        for number, sizes in enumerate(round_):
            batches = [drawn.batch(size) for size in sizes]
            everything += batches
            # A rank without samples makes a pass of no worth.
            mine = batches[rank] if sizes[rank] else torch.full((1, 5), torch.nan, dtype=drawn.dtype)
            # Where the batch is counted, what is given before counts instead.
            is_given = not drawn.counts or sizes[rank] == 0
            is_late = drawn.sets_after_forward and not drawn.counts
            with contextlib.nullcontext() if number == len(round_) - 1 else engine.no_sync():
                if is_given and not is_late:
                    wrapped.set_batch_weight(sizes[rank])
                output = wrapped(mine, uses_all=uses_all)
                if is_late:
                    wrapped.set_batch_weight(sizes[rank])
                drawn.loss_of(output).backward()
        whole = torch.cat(everything)
        total = alone(whole, uses_all=uses_all)
        (drawn.loss_of(total) / (len(whole) if drawn.loss == "sum" else 1)).backward()
        for (name, one), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), (seed, name)
            if one.grad is None or other.grad is None:
                continue
            if drawn.is_integer:
                assert torch.equal(one.grad, other.grad), (seed, name, one.grad, other.grad)
            else:
                limit = {torch.float64: 1e-12, torch.float32: 5e-6}[drawn.dtype]
                off = (one.grad - other.grad).abs().max() / other.grad.abs().max()
                assert off <= limit, (seed, name, off)
        if drawn.zeroes:
            for one in (model, alone):
                one.zero_grad(set_to_none=drawn.sets_to_none)
    engine.detach()


SEEDS = [range(20), *(range(first, min(first + 50, 1000)) for first in range(20, 1000, 50))]


@pytest.mark.parametrize("ranks", rest_is_deep([1, 2, 3, 4], 0, 2))
@pytest.mark.parametrize("seeds", rest_is_deep([(one,) for one in SEEDS], 0))
@on_ranks()
def test_the_gradient_is_that_of_one_process_with_the_whole_batch(rank: int, ranks: int, seeds: range) -> None:
    for seed in seeds:
        _check(seed, rank, ranks)


# --- algorithms that compress ----------------------------------------------------------------------------------------

SIZES = (1, 6, 3)


def _gradients(algorithm: Any, weights: tuple[int, ...], rank: int, steps: int = 1, lr: float = 0.0) -> Any:
    """Of all parameters, in a row; and those of the exact mean over all samples."""
    net, exact = Net(torch.float32), Net(torch.float32)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr)
    if algorithm == "qadam":
        optimizer = QAdamOptimizer(net.parameters(), lr=0.05, warmup_steps=2)
    model = bagua.with_bagua(net, [optimizer], algorithm, batch_weights=True)
    other: Any = torch.optim.SGD(exact.parameters(), lr)
    if algorithm == "qadam":
        other = QAdamOptimizer(exact.parameters(), lr=0.05, warmup_steps=2)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        samples = torch.randn(sum(SIZES), 5, generator=generator).split(SIZES)
        optimizer.zero_grad()
        other.zero_grad()
        model.set_batch_weight(weights[rank])
        model(samples[rank]).square().sum(1).mean().backward()
        exact(torch.cat(samples)).square().sum(1).mean().backward()
        optimizer.step()
        other.step()
    model.bagua_ddp.detach()
    return net, exact


def _largest_of_a_sample() -> float:
    net = Net(torch.float32)
    largest = 0.0
    for sample in torch.randn(sum(SIZES), 5, generator=torch.Generator().manual_seed(0)):
        net.zero_grad()
        net(sample).square().sum().backward()
        largest = max(largest, *(float(one.grad.abs().max()) for one in net.parameters() if one.grad is not None))
    return largest


@on_ranks(3, env=NODES_OF_TWO_AND_ONE)
def test_what_is_compressed_is_weighted(rank: int) -> None:
    for codec in ("int8", "fp8_e4m3", "bf16"):
        for hierarchical in (False, True):
            net, exact = _gradients(Algorithm.init("bytegrad", codec=codec, hierarchical=hierarchical), SIZES, rank)
            ours = torch.cat([one.grad.flatten() for one in net.parameters()])
            wanted = torch.cat([one.grad.flatten() for one in exact.parameters()])
            # What a rank sends is at most three times as large as the largest gradient of a sample.
            ends = torch.tensor([-1.0, 1.0]).repeat(64) * 3 * _largest_of_a_sample()
            assert (ours - wanted).abs().max() <= 2 * get_codec(codec).error_bound(ends).max(), codec
            assert (ours - wanted).abs().max() > 0
    # Of full rank nothing is lost.
    net, exact = _gradients(Algorithm.init("powersgd", rank=3), SIZES, rank)
    for one, other in zip(net.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-5)
    # Two steps of warm-up, then momenta.
    net, exact = _gradients("qadam", SIZES, rank, steps=5)
    for one, other in zip(net.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.01)
    unweighted, _ = _gradients("qadam", (1, 1, 1), rank, steps=5)
    pairs = zip(unweighted.parameters(), exact.parameters(), strict=True)
    off = max((one.detach() - other.detach()).abs().max().item() for one, other in pairs)
    assert off > 0.02, "this test would see it"


# --- exchanges of replicas ------------------------------------------------------------------------------------------


def _local_steps(algorithm: Any, rank: int, steps: range, state: Any = None) -> Any:
    """Trains, with a step of two passes and one of a rank without a batch; and what was learned, and the state."""
    net = Net(torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    model = bagua.with_bagua(net, [optimizer], algorithm, batch_weights=True)
    if state is not None:
        net.load_state_dict(state[0])
        model.bagua_ddp.load_state_dict(state[1])
    for step in steps:
        optimizer.zero_grad()
        for number, (samples, size) in enumerate(_passes(rank, step)):
            with contextlib.nullcontext() if number == len(_passes(rank, step)) - 1 else model.bagua_ddp.no_sync():
                model.set_batch_weight(size)
                model(samples).square().sum(1).mean().backward()
        optimizer.step()
    result = copy.deepcopy((net.state_dict(), model.bagua_ddp.state_dict()))
    model.bagua_ddp.detach()
    return result


def _passes(rank: int, step: int) -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    sizes = [3, 5 + rank] if step % 4 == 1 else [0] if (rank, step) == (1, 2) else [1 + 2 * rank]
    return [(torch.randn(max(size, 1), 5, generator=generator, dtype=torch.float64), size) for size in sizes]


def _by_hand(rank: int, steps: int, sync_every: int) -> Net:
    """Local SGD: each rank steps with the mean over its samples; then the mean over ranks, by samples of the round."""
    net = Net(torch.float64)
    samples = torch.zeros((), dtype=torch.float64)
    for step in range(steps):
        net.zero_grad()
        passes = [one for one in _passes(rank, step) if one[1]]
        for batch, _ in passes:
            net(batch).square().sum().backward()
        total = sum(size for _, size in passes)
        samples += total
        with torch.no_grad():
            for one in net.parameters():
                if total:
                    assert one.grad is not None
                    one -= 0.05 * one.grad / total
            if (step + 1) % sync_every == 0:
                whole = samples.clone()
                dist.all_reduce(whole)
                for one in net.parameters():
                    one *= samples / whole
                    dist.all_reduce(one)
                samples.zero_()
    return net


@on_ranks(2)
def test_replicas_are_weighted_by_what_each_rank_has_trained_on(rank: int) -> None:
    local_sgd = Algorithm.init("local_sgd", sync_every=3)
    trained, _ = _local_steps(local_sgd, rank, range(9))
    for name, one in _by_hand(rank, 9, 3).state_dict().items():
        torch.testing.assert_close(trained[name], one, rtol=1e-12, atol=0)
    # An outer optimizer that takes the mean as it is, in fragments, and a training that was saved in a round.
    plain = functools.partial(torch.optim.SGD, lr=1.0)
    diloco = Algorithm.init("diloco", sync_every=3, outer_optimizer=plain)
    outer, _ = _local_steps(diloco, rank, range(9))
    for name, one in trained.items():
        torch.testing.assert_close(outer[name], one, rtol=1e-10, atol=1e-12)
    streaming = Algorithm.init("streaming_diloco", sync_every=4, fragments=2, delay=1, outer_optimizer=plain)
    whole, _ = _local_steps(streaming, rank, range(10))
    resumed, _ = _local_steps(streaming, rank, range(5, 10), _local_steps(streaming, rank, range(5)))
    for name, one in whole.items():
        assert torch.equal(resumed[name], one), name
    # A pass without a weight is an error on all ranks, when they exchange.
    net = Integers(torch.float32)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model = bagua.with_bagua(net, [optimizer], Algorithm.init("local_sgd", sync_every=2), batch_weights=True)
    _pass(model, None if rank else 1, 1.0)
    optimizer.step()
    _pass(model, 1, 1.0)
    said = message_of(RuntimeError, optimizer.step)
    assert said.startswith("The weights of batches are not complete: rank 1 gave no weight.")
    model.bagua_ddp.detach()


# --- what goes with them ---------------------------------------------------------------------------------------------


def _simple() -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    net = Integers(torch.float32)
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    return bagua.with_bagua(net, [optimizer], batch_weights=True), net, optimizer


def _pass(model: Any, weight: float | None, value: float) -> None:
    if weight is not None:
        model.set_batch_weight(weight)
    model(torch.full((1, 5), value)).sum().backward()


@on_ranks(2)
def test_steps_that_are_skipped_scalers_and_discarded_passes(rank: int) -> None:
    model, net, optimizer = _simple()
    parameter = net.first.weight  # type: ignore[union-attr]
    mean = (3 * 1.0 + 1 * 5.0) / 4
    # A scaler skips a step, and its user discards the gradients, in either way.
    for sets_to_none in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with model.bagua_ddp.no_sync():
            model.set_batch_weight(7)
            scaler.scale(model(torch.full((1, 5), torch.inf)).sum()).backward()
        optimizer.zero_grad(set_to_none=sets_to_none)
        model.set_batch_weight((3, 1)[rank])
        scaler.scale(model(torch.full((1, 5), (1.0, 5.0)[rank])).sum()).backward()
        scaler.unscale_(optimizer)
        assert parameter.grad is not None
        assert (parameter.grad == mean).all(), parameter.grad
        optimizer.zero_grad(set_to_none=sets_to_none)
    # Set again, the last one counts. Evaluation needs none, and takes none.
    model.set_batch_weight(100)
    model.set_batch_weight((3, 1)[rank])
    with torch.no_grad():
        model.eval()
        model(torch.ones(1, 5))
        model.train()
    _pass(model, None, (1.0, 5.0)[rank])
    assert (parameter.grad == mean).all()
    # Passes that all communicate: each its own mean, added. One beside that is accumulated counts with the next.
    with model.bagua_ddp.no_sync():
        _pass(model, (1, 2)[rank], (2.0, 8.0)[rank])
    _pass(model, (2, 3)[rank], (1.0, 2.0)[rank])
    assert (parameter.grad == mean + (1 * 2.0 + 2 * 8.0 + 2 * 1.0 + 3 * 2.0) / 8).all()
    optimizer.step()
    optimizer.zero_grad()
    # A rank that starts later has set its weight before the others, or after them: the order of messages is the same.
    if rank == 0:
        model.set_batch_weight(1)
    output = model(torch.full((1, 5), (2.0, 4.0)[rank]))
    if rank == 1:
        model.set_batch_weight(torch.tensor(3))
    output.sum().backward()
    assert (parameter.grad == 3.5).all()
    # Set before the step and the zeros of the pass before; and what was accumulated is discarded then.
    model.set_batch_weight((3, 1)[rank])
    optimizer.step()
    optimizer.zero_grad()
    _pass(model, None, (1.0, 5.0)[rank])
    assert (parameter.grad == mean).all()
    optimizer.zero_grad()
    with model.bagua_ddp.no_sync():
        _pass(model, 9, torch.inf)
    model.set_batch_weight((3, 1)[rank])
    optimizer.zero_grad()
    _pass(model, None, (1.0, 5.0)[rank])
    assert (parameter.grad == mean).all()
    model.bagua_ddp.detach()
    # Batches are counted in evaluation mode, too, where layers are frozen in it.
    optimizer.zero_grad()
    counted = bagua.with_bagua(net, [optimizer], count_batch=True).eval()
    counted(torch.full(((3, 1)[rank], 5), (1.0, 5.0)[rank])).sum(1).mean().backward()
    assert (parameter.grad == mean).all()


@on_ranks(2)
def test_an_optimizer_that_steps_after_a_refused_pass_changes_nothing(rank: int) -> None:
    for wraps in (True, False):
        net = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
        optimizer = torch.optim.SGD(net.parameters(), 0.5)
        if wraps:
            model: Any = DistributedDataParallel(net, optimizers=[optimizer], batch_weights=True)
        else:
            model = bagua.with_bagua(net, [optimizer], batch_weights=True)
        before = [one.detach().clone() for one in net.parameters()]
        for accumulates in (False, True):
            if accumulates:
                with model.no_sync() if wraps else model.bagua_ddp.no_sync():
                    _pass(model, 2, 3.0)
            said = message_of(RuntimeError, lambda model=model: _pass(model, None if rank else 1, 1.0))
            assert "rank 1 gave no weight" in said
            assert [one.grad for one in net.parameters()] == [None] * 4
            optimizer.step()
        assert all(map(torch.equal, net.parameters(), before))
        _pass(model, 1, float(rank))
        assert net[1].bias.grad is not None
        assert (net[1].bias.grad == 1.0).all()
        net.bagua_ddp.detach()  # type: ignore[operator]


@on_ranks(2)
def test_gradients_are_dropped_wherever_the_program_does_it(rank: int) -> None:
    """No optimizer steps in between, as when a scaler has skipped one."""
    net = Net(torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    batches = [torch.full((size, 5), size, dtype=torch.float64) for size in (3, 1)]

    def check() -> None:
        alone = Net(torch.float64)
        alone(torch.cat(batches)).square().sum(1).mean().backward()
        for one, other in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)

    model: Any = bagua.with_bagua(net, [optimizer], batch_weights=True)
    model.set_batch_weight(100)  # of a pass that was left out: there is no gradient
    for sets_to_none in (True, False):
        model.set_batch_weight(len(batches[rank]))
        optimizer.zero_grad(set_to_none=sets_to_none)
        model(batches[rank]).square().sum(1).mean().backward()
        check()
    # What was sent does not change with a weight that is replaced.
    model.set_batch_weight(100)
    model.set_batch_weight(len(batches[rank]))
    (0.0 * model(batches[rank]).square().sum(1).mean()).backward()
    check()
    # Sums are set aside in the forward pass, until others are added.
    model = bagua.with_bagua(net, [optimizer], batch_weights=True, loss="sum")
    for value in (torch.nan, 1.0):
        model.set_batch_weight(len(batches[rank]))
        loss = model(batches[rank]).square().sum()
        optimizer.zero_grad()
        (loss * value).backward()
    check()


@on_ranks(2)
def test_where_no_rank_has_a_batch_gradients_are_zeros_and_a_line_says_so_once() -> None:
    model, net, _ = _simple()

    def train() -> None:
        for _ in range(2):
            _pass(model, 0, torch.nan)
            assert (net.first.weight.grad == 0).all()  # type: ignore[union-attr]

    (line,) = told_of(train)
    assert "all ranks gave batch weight 0" in line


@on_ranks(3)
def test_a_rank_that_has_run_out_of_batches_counts_for_nothing(rank: int) -> None:
    for by_initial_size in (True, False):
        net = Integers(torch.float32)
        wrapped = DistributedDataParallel(net, batch_weights=True)
        with wrapped.join(divide_by_initial_world_size=by_initial_size):
            for step in range(rank + 1):
                net.zero_grad()
                _pass(wrapped, rank + 1, float(10 * rank))
                ranks = range(step, 3)
                wanted = sum((one + 1) * 10.0 * one for one in ranks) / sum(one + 1 for one in ranks)
                torch.testing.assert_close(net.first.weight.grad[0, 0].item(), wanted)  # type: ignore[index]


# --- what is refused -------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_weights_that_are_none_are_an_error_on_all_ranks_and_the_next_pass_is_right(rank: int) -> None:
    model, net, _ = _simple()
    for weight, said in ((-1.5, "gave -1.5"), (torch.nan, "gave nan"), (10**400, "gave inf"), (None, "gave no weig")):
        for is_accumulated in (False, True):
            with contextlib.ExitStack() as stack:
                if is_accumulated:
                    stack.enter_context(model.bagua_ddp.no_sync())
                    _pass(model, weight if rank else 1, 1.0)
                    stack.close()
                    weight = 1
                said_now = message_of(RuntimeError, lambda weight=weight: _pass(model, weight if rank else 1, 1.0))
            assert said in said_now.splitlines()[0], said_now
            assert "rank 1" in said_now
            assert "rank 0" not in said_now
            net.zero_grad()
            _pass(model, rank + 1, rank + 1.0)
            torch.testing.assert_close(net.first.weight.grad, torch.full((3, 5), 5 / 3))  # type: ignore[union-attr]
            net.zero_grad()
    # Of replicas the exchange tells, whatever was dropped before it.
    for weight, said in ((-1.5, "rank 1 gave -1.5"), (None, "rank 1 gave no weight")):
        optimizer = torch.optim.SGD(net.parameters(), 0.5)
        algorithm = Algorithm.init("local_sgd", sync_every=2)
        model = bagua.with_bagua(net, [optimizer], algorithm, batch_weights=True)
        _pass(model, weight if rank else 1, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        _pass(model, 1, 1.0)
        assert said in message_of(RuntimeError, optimizer.step)
        model.bagua_ddp.detach()


def _other_settings() -> None:
    rank, _ = begin()
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    said = message_of(RuntimeError, lambda: bagua.with_bagua(net, [optimizer], batch_weights=rank == 1))
    assert "batch weights of losses that are a mean" in said


@on_ranks(2)
def test_what_has_no_weights_is_refused_by_name(rank: int) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for name in ("decentralized", "low_precision_decentralized", "async"):
        said = message_of(
            NotImplementedError, lambda name=name: bagua.with_bagua(net, [optimizer], name, batch_weights=True)
        )
        assert said.startswith(f"batch weights: the algorithm {name} does not support them")
    summed = Algorithm.init("gradient_allreduce", average=False)
    with pytest.raises(NotImplementedError, match="average=False adds"):
        bagua.with_bagua(net, [optimizer], summed, count_batch=True)
    with pytest.raises(ValueError, match="loss='max' is unknown"):
        bagua.with_bagua(net, [optimizer], batch_weights=True, loss="max")
    with pytest.raises(ValueError, match="loss='sum' has no effect without batch weights"):
        DistributedDataParallel(net, loss="sum")
    _other_settings()
    counted = bagua.with_bagua(net, [optimizer], count_batch=True)
    with pytest.raises(ValueError, match="count_batch=True: the first tensor"):
        counted(torch.tensor(1.0))
    with pytest.raises(TypeError, match="'8' is not a number"):
        counted.set_batch_weight("8")
    plain = bagua.with_bagua(net, [optimizer])
    with pytest.raises(RuntimeError, match="was wrapped without batch weights"):
        plain.set_batch_weight(1)
    parts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    both: Any = _Parts(parts)
    model = bagua.with_bagua(both, [torch.optim.SGD(both.parameters(), 0.1)], batch_weights=True)
    model.set_batch_weight(rank)
    with pytest.raises(NotImplementedError, match="has reached only some of the parameters"):
        model(torch.ones(1, 2), 0).sum().backward()
    assert dist.get_world_size() == 2


class _Parts(nn.Module):
    def __init__(self, parts: nn.ModuleList) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor, which: int) -> Tensor:
        output: Tensor = self.parts[which](x)
        return output
