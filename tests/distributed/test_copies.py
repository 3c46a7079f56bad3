"""Copies, pickles and files of wrapped modules, and wrapping them again."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from support.rank_tests import on_ranks
from support.training import (
    Batch,
    NormNet,
    batches,
    check_equal,
    check_ranks_equal,
    counted_all_reduces,
    message_of,
    momentum,
    pair,
    torch_ddp,
    train,
    with_algorithm,
)
from torch import nn

from bagua.torch_api.data_parallel import DistributedDataParallel

HOW = ("with_bagua", "wrapper")


def _compare(both: list[tuple[Any, Any]], what: str = "") -> None:
    check_equal(both[0][0], both[1][0], what)


@pytest.mark.parametrize("how", HOW)
@on_ranks(2)
def test_copies_of_a_wrapped_module_are_ordinary(rank: int, device: torch.device, how: str) -> None:
    both = pair(how, rank, device, NormNet)
    data = batches(rank, 6, device)
    for model, optimizer in both:
        train(model, optimizer, data[:2])
    ours, optimizer = both[0]
    inner = ours.module if how == "wrapper" else ours
    file = io.BytesIO()
    torch.save(inner, file)
    file.seek(0)
    for duplicate in (copy.deepcopy(inner), torch.load(file, weights_only=False), pickle.loads(pickle.dumps(inner))):
        check_equal(duplicate, inner)
        # An ordinary module: it trains alone, and neither disturbs nor is disturbed.
        alone = momentum(duplicate)
        with counted_all_reduces() as calls:
            train(duplicate, alone, batches(rank, 2, device, seed=7))
        assert not calls
        assert inner.bagua_train_step_counter == 2, inner.bagua_train_step_counter
        assert getattr(duplicate, "bagua_ddp", None) is None
        assert not hasattr(duplicate, "bagua_buckets")
        # It can be wrapped in its turn.
        with_algorithm(duplicate, alone)
        train(duplicate, alone, batches(rank, 2, device, seed=8))
        check_ranks_equal(nn.ParameterList(duplicate.parameters()))
    copied = copy.deepcopy(optimizer)
    assert not copied._optimizer_step_pre_hooks
    for model, one in both:
        train(model, one, data[2:])
    _compare(both) if how == "wrapper" else check_ranks_equal(nn.ParameterList(ours.parameters()))


@on_ranks(1)
def test_files_of_parameters_are_ordinary(rank: int, device: torch.device) -> None:
    net = NormNet().to(device)
    optimizer = momentum(net)
    with_algorithm(net, optimizer)
    train(net, optimizer, batches(rank, 2, device))
    file = io.BytesIO()
    for given in (dict(net.named_parameters()), net.state_dict(keep_vars=True)):
        file.seek(0)
        torch.save(given, file)
        assert b"bagua.engine" not in file.getvalue()  # it is read without Bagua, too
        file.seek(0)
        read = torch.load(file, weights_only=True)
        for name, tensor in given.items():
            assert torch.equal(read[name], tensor), name
            assert not read[name].is_bagua_tensor()
    loaded = NormNet().to(device)
    loaded.load_state_dict(read, assign=True)
    with_algorithm(loaded, momentum(loaded))
    assert loaded.first.weight.is_bagua_tensor()


@on_ranks(2)
def test_copies_do_not_collect_hooks(rank: int, device: torch.device) -> None:
    original = with_algorithm(NormNet().to(device), momentum(NormNet()))
    x = batches(rank, 1, device)[0][0]

    def hooks(module: nn.Module) -> int:
        return len(module._forward_hooks) + len(module._forward_pre_hooks)

    # Copies of copies do not collect them, wrapped or not, and a call leaves a module that can be scripted.
    net: Any = original
    for _ in range(3):
        net = copy.deepcopy(net)
        with_algorithm(net, momentum(net))
    assert hooks(net) == hooks(original)
    kept: list[int] = []
    for duplicate in (copy.deepcopy(copy.deepcopy(original)), pickle.loads(pickle.dumps(original))):
        kept.clear()
        duplicate.register_forward_hook(lambda *_: kept.append(1))
        expected = duplicate(x)
        assert hooks(duplicate) == 1
        duplicate.eval()(x)
        assert len(kept) == 2
        assert expected.shape == (4, 4)
    called = copy.deepcopy(original)
    called(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: scripting is deprecated
        torch.jit.script(called)
    assert [hook.__name__ for hook in original._forward_hooks.values()] == ["bagua_hook"]


@on_ranks(2)
def test_copies_of_a_wrapper_are_replicas_of_their_own(rank: int, device: torch.device) -> None:
    ((model, optimizer), _) = pair("wrapper", rank, device, NormNet)
    train(model, optimizer, batches(rank, 2, device))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for duplicate in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        twin = torch_ddp(copy.deepcopy(duplicate.module))
        ours, theirs = momentum(duplicate), momentum(twin)
        before = copy.deepcopy(model.state_dict())
        train(duplicate, ours, batches(rank, 3, device, seed=1))
        train(twin, theirs, batches(rank, 3, device, seed=1))
        check_equal(duplicate, twin)
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name


@on_ranks(2)
def test_one_rank_alone_may_copy_a_wrapper(rank: int, device: torch.device) -> None:
    """As rank 0 alone does it for an average of weights, which it evaluates, or for a file of the whole wrapper."""
    ((model, optimizer), (theirs, other)) = pair("wrapper", rank, device, NormNet)
    train(model, optimizer, batches(rank, 2, device))
    train(theirs, other, batches(rank, 2, device))
    if rank == 0:
        average = torch.optim.swa_utils.AveragedModel(model)
        average.update_parameters(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for duplicate in (average, torch.load(file, weights_only=False)):
            with torch.no_grad():
                assert torch.equal(
                    duplicate.eval()(torch.ones(3, 2, device=device)),
                    copy.deepcopy(model.module).eval()(torch.ones(3, 2, device=device)),
                )
    train(model, optimizer, batches(rank, 2, device, seed=1))
    train(theirs, other, batches(rank, 2, device, seed=1))
    check_equal(model, theirs)


@on_ranks(2)
def test_a_copy_begins_wherever_its_engine_is_needed(rank: int, device: torch.device) -> None:
    """By what needs the engine before a forward pass does."""
    ((model, _), _) = pair("wrapper", rank, device, NormNet)
    assert copy.deepcopy(model).will_sync_module_buffers()
    duplicate = copy.deepcopy(model)
    optimizer = momentum(duplicate)
    with duplicate.join():
        train(duplicate, optimizer, batches(rank, 2 + rank, device))
    check_ranks_equal(duplicate.module)
    another = copy.deepcopy(model)
    optimizer = momentum(another)
    with another.no_sync():
        train(another, optimizer, batches(rank, 1, device))
    assert another.bagua_train_step_counter == 1


@on_ranks(2)
def test_state_dicts_are_those_of_torch_ddp(rank: int, device: torch.device) -> None:
    both = pair("wrapper", rank, device, NormNet)
    (ours, optimizer), (theirs, _) = both
    for model, one in both:
        train(model, one, batches(rank, 2, device))
    state = ours.state_dict()
    assert all(name.startswith("module.") for name in state)
    theirs.load_state_dict(state)
    ours.load_state_dict(theirs.state_dict())
    plain = NormNet().to(device)
    plain.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _compare(both)
    for model, one in both:
        train(model, one, batches(rank, 2, device, seed=1))
    _compare(both)


@on_ranks(2)
def test_a_module_can_be_wrapped_again(rank: int, device: torch.device) -> None:
    both = pair("wrapper", rank, device)
    (ours, optimizer), (theirs, other) = both
    data: list[Batch] = batches(rank, 6, device)
    train(ours, optimizer, data[:2])
    again = DistributedDataParallel(ours.module, find_unused_parameters=True, optimizers=[optimizer])
    with counted_all_reduces() as calls:
        train(again, optimizer, data[2:4])
    assert len(calls) == 4, "a bucket and the agreement on what was used, in each step"
    message = message_of(RuntimeError, lambda: ours(data[4][0]))
    last = with_algorithm(again.module, optimizer)
    train(last, optimizer, data[4:])
    train(theirs, other, data)
    check_equal(last, theirs)
    assert "wrapped again" in message
