"""ByteGrad against its formula in plain torch, bit for bit, and what it promises beside that."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.byte_reference import CHOICES, EVERY_CHOICE, expected, nodes_of, of_all_ranks
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.training import (
    NODES,
    TWO_NODES_OF_TWO,
    Batch,
    MixedDtypes,
    Scaled,
    batches,
    begin,
    check_equal,
    check_ranks_equal,
    check_tensor_on_ranks,
    counted_all_reduces,
    loss_of,
    message_of,
    mlp,
    train,
    with_algorithm,
    wrap_with,
)
from torch import Tensor, nn

from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.bytegrad import ByteGradAlgorithm
from bagua.torch_api.bucket import BaguaBucket

Nodes = Sequence[Sequence[int]]


def _bytegrad(module: Any, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    return module.with_bagua([optimizer], ByteGradAlgorithm(**options))


class _Reference:
    """The same model in plain torch, whose gradients become what the formula says they become."""

    def __init__(self, wrapped: Any, average: bool, nodes: Nodes | None, **sgd: float) -> None:
        inner = getattr(wrapped, "module", wrapped)
        self.module = copy.deepcopy(inner)
        ours = {id(parameter): name for name, parameter in inner.named_parameters()}
        theirs = dict(self.module.named_parameters())
        self.groups = [[theirs[ours[id(tensor)]] for tensor in bucket.tensors] for bucket in wrapped.bagua_buckets]
        self.average, self.nodes = average, nodes
        self.optimizer = torch.optim.SGD(self.module.parameters(), **sgd)

    def backward(self, batch: Batch, scale: float = 1.0) -> None:
        self.optimizer.zero_grad()
        (loss_of(self.module, batch) * scale).backward()
        for group in self.groups:
            flats = of_all_ranks(torch.cat([parameter.grad.reshape(-1) for parameter in group]))
            result = expected(flats, self.average, self.nodes).to(group[0].device)
            for parameter, values in zip(group, result.split([one.numel() for one in group]), strict=True):
                parameter.grad.copy_(values.view_as(parameter))


# --- the formula -----------------------------------------------------------------------------------------------------

SGD = {"lr": 0.5, "momentum": 0.9}


def _against_the_formula(nodes: Nodes, how: str, choices: Sequence[tuple[bool, bool, torch.dtype]] = CHOICES) -> None:
    rank, device = begin()
    for hierarchical, average, dtype in choices:
        if hierarchical and max(map(len, nodes)) > 2:
            continue  # in which order a node adds up three is the backend's choice
        net = mlp(rank, device).to(dtype)
        optimizer = torch.optim.SGD(net.parameters(), **SGD)
        algorithm = Algorithm.init("bytegrad", hierarchical=hierarchical, average=average)
        wrapped = wrap_with(how, net, [optimizer], algorithm)
        reference = _Reference(wrapped, average, nodes if hierarchical else None, **SGD)
        for step, (x, y) in enumerate(batches(rank, 3, device)):
            optimizer.zero_grad()
            loss_of(wrapped, (x.to(dtype), y)).backward()
            optimizer.step()
            reference.backward((x.to(dtype), y))
            reference.optimizer.step()
            check_equal(net, reference.module, f"{hierarchical=} {average=} {dtype} step {step}")
        check_ranks_equal(net, f"{hierarchical=} {average=} {dtype}")
        # What is not finite on one rank makes its ranges NaN on all, so that a GradScaler skips the step.
        for bad in (torch.inf, torch.nan):
            scale = bad if rank == dist.get_world_size() - 1 else 1.0
            optimizer.zero_grad()
            (loss_of(wrapped, (x.to(dtype), y)) * scale).backward()
            reference.backward((x.to(dtype), y), scale)
            for one, other in zip(net.parameters(), reference.module.parameters(), strict=True):
                assert torch.equal(one.grad.isnan(), other.grad.isnan())
                assert torch.equal(one.grad.nan_to_num(), other.grad.nan_to_num())
                assert one.grad.isnan().any()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_weights_are_those_of_the_formula_on_one_node(ranks: int) -> None:
    run_ranks(ranks, _against_the_formula, [list(range(ranks))], "with_bagua")


@pytest.mark.parametrize(
    ("nodes", "how"), [("two nodes of two", "wrapper"), ("nodes of two and one", "with_bagua unflattened")]
)
def test_weights_are_those_of_the_formula_on_two_nodes(nodes: str, how: str) -> None:
    env = [{**place, "BAGUA_DEFAULT_BUCKET_SIZE": "600"} for place in NODES[nodes]]  # several buckets
    run_ranks(len(env), _against_the_formula, nodes_of(env), how, env=env)


@pytest.mark.deep
@pytest.mark.parametrize("nodes", NODES)
def test_every_combination_of_options_follows_the_formula(nodes: str) -> None:
    env = NODES[nodes]
    run_ranks(len(env), _against_the_formula, nodes_of(env), "with_bagua", EVERY_CHOICE, env=env)


# --- with what users do besides --------------------------------------------------------------------------------------


def _other_dtypes(make: Callable[[], nn.Module]) -> None:
    rank, device = begin()
    torch.manual_seed(rank)
    net = make().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    _bytegrad(net, optimizer)
    train(net, optimizer, batches(rank, 5, device))
    check_ranks_equal(net)


def _double_precision() -> None:
    rank, device = begin()
    nets = [nn.Linear(7, 3, dtype=torch.float64).to(device) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    _bytegrad(nets[0], optimizers[0], hierarchical=False)
    with_algorithm(nets[1], optimizers[1])
    for batch in batches(rank, 5, device, (4, 7)):
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            net(batch[0].double()).square().sum().backward()
            optimizer.step()
    check_equal(*nets)


def test_dtypes_that_are_not_compressed_are_sent_as_they_are() -> None:
    run_ranks(2, _other_dtypes, MixedDtypes, reuse=True)
    run_ranks(2, _double_precision, reuse=True)


def test_parameters_without_elements() -> None:
    run_ranks(2, _other_dtypes, Scaled, reuse=True)


# --- what travels ----------------------------------------------------------------------------------------------------


@contextmanager
def counted_bytes() -> Iterator[dict[str, int]]:
    """Bytes that this rank's calls of all-to-all and all-gather exchange with the group, its own included."""
    counts = {"all_to_all": 0, "all_gather": 0}
    names = {
        "all_to_all": ("all_to_all_single", "alltoall_base"),
        "all_gather": ("all_gather_single", "_allgather_base"),
    }
    group = dist.ProcessGroup
    originals = {name: group.__dict__[name] for both in names.values() for name in both if name in group.__dict__}

    def counting(kind: str, name: str) -> Callable[..., Any]:
        def call(self: dist.ProcessGroup, output: Tensor, *arguments: Any, **keywords: Any) -> Any:
            counts[kind] += output.nbytes
            return originals[name].__get__(self)(output, *arguments, **keywords)

        return call

    for kind, both in names.items():
        for name in set(both) & set(originals):
            setattr(group, name, counting(kind, name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(group, name, original)


def _traffic(hierarchical: bool) -> tuple[int, int]:
    rank, device = begin()
    net = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    _bytegrad(net, optimizer, hierarchical=hierarchical)
    data = batches(rank, 2, device, (4, 256))
    net(data[0][0]).sum().backward()
    with counted_all_reduces() as all_reduces, counted_bytes() as counts:
        net(data[1][0]).sum().backward()
    assert all_reduces == []
    elements = sum(parameter.numel() for parameter in net.parameters())
    return counts["all_to_all"] + counts["all_gather"], elements


def test_a_quarter_of_the_bytes_of_float32_travels() -> None:
    for exchanged, elements in run_ranks(2, _traffic, False, reuse=True):
        # A ring's all-reduce moves each element twice, in four bytes.
        assert 2 * elements < exchanged <= 0.26 * 2 * 4 * elements


def test_only_leaders_exchange_bytes_with_other_nodes() -> None:
    results = run_ranks(4, _traffic, True, env=TWO_NODES_OF_TWO, reuse=True)
    for (exchanged, elements), place in zip(results, TWO_NODES_OF_TWO, strict=True):
        if place["LOCAL_RANK"] == "0":
            assert 2 * elements < exchanged <= 0.26 * 2 * 4 * elements
        else:
            assert exchanged == 0


@on_ranks(3)
def test_one_node_adds_up_at_once_and_every_rank_rounds(rank: int, device: torch.device) -> None:
    net = mlp(rank, device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    _bytegrad(net, optimizer)
    data = batches(rank, 2, device)
    train(net, optimizer, data[:1])
    with counted_all_reduces() as all_reduces, counted_bytes() as counts:
        train(net, optimizer, data[1:])
    check_ranks_equal(net)
    assert (len(all_reduces), sum(counts.values())) == (1, 0)


# --- the operation ---------------------------------------------------------------------------------------------------


def _bucket(elements: int, dtype: torch.dtype, device: torch.device, alignment: int = 1) -> BaguaBucket:
    tensor = torch.ones(elements, dtype=dtype, device=device)
    tensor.ensure_bagua_tensor("x", "module")
    return BaguaBucket([tensor], "7", flatten=True, alignment=alignment)


@on_ranks(2)
def test_what_cannot_be_compressed_is_refused(device: torch.device) -> None:

    def append(elements: int, dtype: torch.dtype, **options: Any) -> None:
        _bucket(elements, dtype, device).append_centralized_synchronous_op(**options)

    text = message_of(ValueError, lambda: append(9, torch.float32, compression="MinMaxUInt8"))
    assert "'7' has 9 elements" in text
    assert "alignment=64" in text
    for dtype in (torch.float64, torch.int32, torch.complex64):
        text = message_of(TypeError, lambda dtype=dtype: append(8, dtype, compression="MinMaxUInt8"))
        assert str(dtype) in text
        assert "bfloat16, float16, float32" in text
    message_of(ValueError, lambda: append(8, torch.float32, compression="minmax"), "'minmax'", "int8")


@on_ranks(2)
def test_the_operation_as_a_method_of_buckets(rank: int, device: torch.device) -> None:
    """As an algorithm of old calls it, after another operation, and for parameters instead of gradients."""
    for average, hierarchical in itertools.product((True, False), (True, False)):
        bucket = _bucket(100, torch.float32, device, alignment=64)
        bucket.append_python_op(lambda _, bucket=bucket: bucket.flattened_tensor()[:100].mul_(rank + 1.0))
        bucket.append_centralized_synchronous_op(
            hierarchical=hierarchical, average=average, scattergather=True, compression="MinMaxUInt8"
        )
        bucket.run_ops()
        result = bucket.flattened_tensor()
        torch.testing.assert_close(result[:100], torch.full_like(result[:100], 1.5 if average else 3.0))
        assert torch.equal(result[100:], torch.zeros_like(result[100:]))
        check_tensor_on_ranks(result, "the bucket")


@on_ranks(2)
def test_an_overflow_is_gone_in_the_next_step(rank: int, device: torch.device) -> None:
    """Three parameters over two ranks: the bucket is padded, and what is not finite must not stay there."""
    net: Any = nn.Linear(2, 1).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.with_bagua([optimizer], ByteGradAlgorithm(hierarchical=False))
    (bucket,) = net.bagua_buckets
    assert bucket.padding_tensor is not None
    finite = []
    for factor in (torch.inf if rank else 1.0, 1.0, 1.0):
        optimizer.zero_grad()
        (net(batches(rank, 1, device)[0][0]).sum() * factor).backward()
        finite.append(all(bool(parameter.grad.isfinite().all()) for parameter in net.parameters()))
    assert finite == [False, True, True]
