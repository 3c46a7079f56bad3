"""Every algorithm with everything: what holds for gradient all-reduce around a module holds for all of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.algorithm_cases import (
    CASES,
    NAMES,
    Case,
    Loop,
    check_together,
    pulling,
    quiet,
    spread,
    step,
    train_with,
)
from support.ports import take_another_port
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.sweeps import each_value_once, rest_is_deep
from support.training import (
    NODES_OF_TWO_AND_ONE,
    TWO_NODES_OF_TWO,
    Batch,
    Branches,
    NormNet,
    begin,
    loss_of,
    mlp,
)
from torch import nn

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import GlobalAlgorithmRegistry
from bagua.torch_api.data_parallel import DistributedDataParallel

STEPS = 10

every_algorithm = pytest.mark.parametrize("case", CASES, ids=str)


def test_the_registry_has_all() -> None:
    assert set(NAMES) <= set(GlobalAlgorithmRegistry.available_algorithms())
    assert {case.name for case in CASES} == set(NAMES)
    assert all(GlobalAlgorithmRegistry.description(name) for name in NAMES)


# --- steps, by number of ranks ---------------------------------------------------------------------------------------


def _steps_of(data: list[Batch]) -> Loop:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for batch in data:
            step(model, optimizer, batch)

    return loop


def _many_steps(case: Case, count: int) -> None:
    rank, device = begin()
    train_with(case, rank, device, _steps_of(pulling(rank, count, device)))


@pytest.mark.parametrize(
    ("case", "ranks"), [(case, ranks) for ranks in (1, 3) for case in CASES if ranks == 1 or not case.even], ids=str
)
def test_one_rank_and_an_odd_number(case: Case, ranks: int) -> None:
    run_ranks(ranks, _many_steps, case, STEPS, reuse=True)


@pytest.mark.parametrize(
    ("case", "nodes"),
    each_value_once([case for case in CASES if case.on_nodes() != case], [TWO_NODES_OF_TWO, NODES_OF_TWO_AND_ONE]),
    ids=lambda one: str(one) if isinstance(one, Case) else f"{len(one)} ranks",
)
def test_emulated_nodes(case: Case, nodes: list[dict[str, str]]) -> None:
    run_ranks(len(nodes), _many_steps, case.on_nodes(), STEPS, env=nodes, reuse=True)


@on_ranks(4)
def test_process_groups(rank: int, device: torch.device) -> None:
    """Each pair of ranks trains a model of its own, with one algorithm after the other."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    loop = _steps_of(pulling(rank, STEPS, device))
    for case in CASES:
        model = train_with(case, rank, device, loop, group=groups[rank // 2])
        if case.name != "qadam":  # its steps have one size in the beginning, wherever they lead
            assert spread(model) > 0.01, f"{case}: the pairs have different data"


# --- what a loop may do ----------------------------------------------------------------------------------------------


def _accumulating(model: Any, optimizer: torch.optim.Optimizer, data: list[Any], silent: bool) -> None:
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        if silent:
            with quiet(model):
                loss_of(model, first).backward()
        else:
            loss_of(model, first).backward()
        loss_of(model, second).backward()
        optimizer.step()


def _clipping(model: Any, optimizer: torch.optim.Optimizer, data: list[Any]) -> None:
    for batch in data:
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


def _evaluating(model: Any, optimizer: torch.optim.Optimizer, data: list[Any]) -> None:
    """Forward passes without backward in between, as many as each rank likes."""
    extra = dist.get_rank() + 1
    for batch in data:
        step(model, optimizer, batch)
        model.eval()
        with torch.no_grad():
            for _ in range(extra):
                model(batch[0])
        with torch.inference_mode():
            model(batch[0])
        model(batch[0])
        model.train()
        with torch.no_grad():
            model(batch[0])


def _freezing(model: Any, optimizer: torch.optim.Optimizer, data: list[Any]) -> None:
    net = getattr(model, "module", model)
    for number, batch in enumerate(data):
        net[0].requires_grad_(not 4 <= number < 8)
        step(model, optimizer, batch)


def _autocasting(model: Any, optimizer: torch.optim.Optimizer, data: list[Any]) -> None:
    for batch in data:
        optimizer.zero_grad()
        with torch.autocast(batch[0].device.type, torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()


@every_algorithm
@on_ranks(2)
def test_accumulation_clipping_evaluation_freezing_and_autocast(rank: int, device: torch.device, case: Case) -> None:
    data = pulling(rank, STEPS, device)

    def silently(model: Any, optimizer: torch.optim.Optimizer, data: list[Any]) -> None:
        _accumulating(model, optimizer, data, True)

    def aloud(model: Any, optimizer: torch.optim.Optimizer, data: list[Any]) -> None:
        _accumulating(model, optimizer, data, False)

    # Each once: test_torch_features.py and test_no_sync.py have both ways to wrap.
    for how, loops in {
        "with_bagua": (silently, _clipping, _freezing),
        "wrapper": (aloud, _evaluating, _autocasting),
    }.items():
        for loop in loops:
            train_with(case, rank, device, lambda *both: loop(*both, data), how=how)  # noqa: B023
    # Whose gradients are no views of a bucket: what accumulates them, and what takes some away.
    unflattened = "with_bagua unflattened"
    train_with(case, rank, device, lambda *both: silently(*both, data), how=unflattened)
    train_with(case, rank, device, lambda *both: _freezing(*both, data), how=unflattened)


@every_algorithm
@on_ranks(2)
def test_a_gradient_scaler_and_an_overflow_on_one_rank(rank: int, device: torch.device, case: Case) -> None:
    """One rank overflows, before and after QAdam's warm-up."""
    data = pulling(rank, STEPS, device)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8, growth_interval=100)

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> None:
        mine = scaler if model is not alone else torch.amp.GradScaler(device.type, init_scale=2.0**8)
        for number, batch in enumerate(data):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            overflows = rank == 1 and number in (3, 8)
            mine.scale(loss * float("inf") if overflows else loss).backward()
            mine.step(optimizer)
            mine.update()

    net = mlp(rank, device)
    optimizer = case.optimizer(net)
    alone: Any = None
    model = case.wrap(net, optimizer, scaler=scaler)
    alone = copy.deepcopy(net)
    loop(model, optimizer)
    case.stop(model)
    check_together(case, net, alone, loop)
    scales: list[Any] = [None, None]
    dist.all_gather_object(scales, scaler.get_scale())
    # Where gradients are averaged, all ranks see the overflow; elsewhere it stays with the one that had it.
    assert scales == ([2.0**6] * 2 if case.equal and not case.is_async else [2.0**8, 2.0**6])


@every_algorithm
@on_ranks(2)
def test_unused_parameters(rank: int, device: torch.device, case: Case) -> None:
    data = pulling(rank, STEPS, device)

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for number, batch in enumerate(data):
            take = ("left", "right") if rank == 1 and number % 2 else ("left",)
            step(model, optimizer, batch, take=take)

    # What is exchanged after steps, or beside them, needs no gradient: then it is the same without looking for them.
    for how in ("wrapper, finding unused",) if case.equal else ("wrapper, finding unused", "wrapper", "with_bagua"):
        torch.manual_seed(rank)
        net: Any = Branches().to(device)
        optimizer = case.optimizer(net)
        model = case.wrap(net, optimizer, how)
        with torch.no_grad():  # weights that the loss never reaches are exchanged, too
            net.never.weight.add_(0 if case.equal else rank)
        alone = copy.deepcopy(net)
        loop(model, optimizer)
        case.stop(model)
        check_together(case, net, alone, loop)


def _copied(case: Case, model: Any) -> Any:
    if case.name == "low_precision_decentralized":
        # It needs the optimizers, which a copy of the wrapper does not have; one of the module can be wrapped again.
        return copy.deepcopy(model.module)
    return copy.deepcopy(model)


@every_algorithm
@on_ranks(2)
def test_buffers_and_copies_of_the_wrapper(rank: int, device: torch.device, case: Case) -> None:
    """Batch normalisation in the wrapper; a copy of it in the middle of training, which is then trained as well."""
    data = pulling(rank, STEPS, device)
    copies: list[Any] = []

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for batch in data[: STEPS // 2]:
            step(model, optimizer, batch)
        if isinstance(model, DistributedDataParallel):
            copies.append(_copied(case, model))
            before = copy.deepcopy(copies[0].state_dict())
        for batch in data[STEPS // 2 :]:
            step(model, optimizer, batch)
        if isinstance(model, DistributedDataParallel):
            for name, value in copies[0].state_dict().items():
                assert torch.equal(value, before[name]), f"{name} of the copy has changed"

    train_with(case, rank, device, loop, make=NormNet, how="wrapper")


@every_algorithm
@on_ranks(2)
def test_a_copy_of_the_module_is_wrapped_again(rank: int, device: torch.device, case: Case) -> None:
    loop = _steps_of(pulling(rank, STEPS, device))
    model = train_with(case, rank, device, loop)
    duplicate = copy.deepcopy(model)
    assert not duplicate.__dict__.get("bagua_ddp")
    before = [one.detach().clone() for one in model.parameters()]
    optimizer = case.optimizer(duplicate)
    alone = copy.deepcopy(duplicate)
    wrapped = case.wrap(duplicate, optimizer)
    loop(wrapped, optimizer)
    case.stop(wrapped)
    check_together(case, duplicate, alone, loop)
    for one, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(one, value), "the original shares nothing with its copy"


# --- algorithms together ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", rest_is_deep(["with_bagua", "with_bagua unflattened", "wrapper"], 1))
@on_ranks(2)
def test_switching_through_all_algorithms(rank: int, device: torch.device, how: str) -> None:
    """All algorithms on one model, one after the other, twice; without a word to the one before."""
    net = mlp(rank, device)
    loop = _steps_of(pulling(rank, 8, device))
    for case in (*CASES, *reversed(CASES)):
        optimizer = case.optimizer(net)
        model = case.wrap(net, optimizer, how)
        assert spread(net) == 0, f"{case} begins with the same weights everywhere"
        alone = copy.deepcopy(net)
        start = copy.deepcopy(net.state_dict())
        loop(model, optimizer)
        if not case.is_async:
            check_together(case, net, alone, loop, start)
    CASES[0].stop(model)


@on_ranks(2, fresh=True)
def test_torch_is_shut_down_and_set_up_again(rank: int, device: torch.device) -> None:
    """torch is shut down between a backward pass and its step, and set up again."""
    trained = []
    for case in CASES:
        net = mlp(rank, device)
        optimizer = case.optimizer(net)
        model = case.wrap(net, optimizer)
        *steps, last = pulling(rank, 4, device)
        for batch in steps:
            step(model, optimizer, batch)
        case.stop(model)
        loss_of(model, last).backward()
        trained.append((case, net, optimizer))
    take_another_port()
    dist.barrier()
    dist.destroy_process_group()
    bagua.init_process_group()
    for case, net, optimizer in trained:
        model = case.wrap(net, optimizer)
        assert spread(net) == 0, case
        for batch in pulling(rank, 4, device):
            step(model, optimizer, batch)
        case.stop(model)
        if case.equal:
            assert spread(net) == 0, case


def _several_models() -> None:
    """A model for each algorithm, their steps by turns."""
    rank, device = begin()
    nets, trained = [], []
    data = pulling(rank, STEPS, device)
    for number, case in enumerate(CASES):
        net = mlp(10 * number + rank, device)
        optimizer = case.optimizer(net)
        trained.append((case.wrap(net, optimizer), optimizer))
        nets.append((net, copy.deepcopy(net)))
    for batch in data:
        # All passes, then all steps: what one model communicates is under way while others do.
        for model, optimizer in trained:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
        for _, optimizer in trained:
            optimizer.step()
    for case, (model, _) in zip(CASES, trained, strict=True):
        case.stop(model)
    for case, both in zip(CASES, nets, strict=True):
        check_together(case, *both, _steps_of(data))


def test_several_models_with_different_algorithms() -> None:
    run_ranks(2, _several_models, reuse=True)


@pytest.mark.deep
def test_several_models_on_nodes() -> None:
    """Nodes are the algorithms' business, test_emulated_nodes; how models share ranks, that of the test above."""
    run_ranks(4, _several_models, env=TWO_NODES_OF_TWO, reuse=True)
