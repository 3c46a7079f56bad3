"""The collectives of bagua.fsdp alone, against the same in floating point: every codec, dtype and reduction, and shards
of any size."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.training import TWO_NODES_OF_TWO, begin, check_tensor_on_ranks, message_of
from torch import Tensor

from bagua.codecs import Codec, codec_names, get_codec
from bagua.fsdp.nodes import Nodes, Traffic
from bagua.fsdp.reduce_scatter import CompressedReduceScatter, factor_of
from bagua.fsdp.replica_all_reduce import ReplicaAllReduce
from bagua.fsdp.residual import Residual
from bagua.job.places import place_of_this_process

SIZES = (0, 1, 3, 31, 64, 1023, 1025, 5000)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Each size with each codec, and each dtype with each of both.
CASES = [
    (name, DTYPES[number % len(DTYPES)], size)
    for number, (name, size) in enumerate(itertools.product(codec_names(), SIZES))
]
EVERY_CASE = list(itertools.product(codec_names(), DTYPES, SIZES))  # for `make deep`


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _of_all(tensor: Tensor) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return found


def _drawn(size: int, dtype: torch.dtype, seed: int, device: torch.device) -> Tensor:
    """Blocks of very different sizes, other ones on each rank."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    scale = 10.0 ** torch.randint(-4, 2, (size,), generator=generator)
    return (torch.randn(size, generator=generator) * scale).to(device, dtype)


def _after_codec(codec: Codec, source: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """In fp32: what comes out of the codec, and how far it may be away."""
    decoded = torch.empty_like(source, dtype=torch.float32)
    codec.decompress(codec.compress(source, chunks), decoded)
    return decoded, codec.error_bound(source.float(), chunks)


def _check_reduction(result: Tensor, parts: list[Tensor], own: int, codec: Codec, factor: float, what: str) -> None:
    """`result` is factor * the sum of what the codec makes of `parts`, but for this rank's own, which is exact."""
    rounded, exact = torch.zeros(result.numel()), torch.zeros(result.numel(), dtype=torch.float64)
    allowed = torch.zeros(result.numel())
    for rank, part in enumerate(parts):
        part = part.cpu()
        decoded, bound = _after_codec(codec, part, 1)
        rounded += part.float() if rank == own else decoded
        exact += part.double()
        allowed += 0 if rank == own else bound
    kind = torch.finfo(result.dtype)
    slack = kind.eps * (factor * (sum(part.cpu().float().abs() for part in parts) + allowed) + kind.smallest_normal)
    found = result.cpu().float()
    assert ((found - factor * rounded).abs() <= 2 * slack).all(), f"{what}: not the formula"
    assert ((found.double() - factor * exact).abs() <= factor * allowed + 2 * slack).all(), f"{what}: too far away"


def _reduce_scatter(reductions: list[str], cases: Sequence[tuple[str, torch.dtype, int]] = CASES) -> None:
    rank, device = begin()
    ranks = dist.get_world_size()
    for seed, (name, dtype, size) in enumerate(cases):
        op = getattr(dist.ReduceOp, reductions[seed % len(reductions)])
        codec = get_codec(name)
        what = f"{name} {dtype} {size} {op}"
        gradients = _drawn(ranks * size, dtype, seed, device)
        of_all = _of_all(gradients)
        traffic = Traffic()
        reduce = CompressedReduceScatter(codec, Nodes.unknown(_world()), traffic)
        output = reduce.allocate((size,), dtype=dtype, device=device)
        reduce(output, gradients, dist.group.WORLD, op)  # type: ignore[arg-type]
        if not size:
            assert traffic.as_dict() == {"sent": 0, "saved": 0}
            continue
        parts = [one.view(ranks, -1)[rank] for one in of_all]
        _check_reduction(output, parts, rank, codec, 1 / ranks if op == dist.ReduceOp.AVG else 1.0, what)
        sent = (ranks - 1) * codec.compressed_bytes(size)
        plain = (ranks - 1) * size * output.element_size()
        assert traffic.as_dict() == {"sent": sent, "saved": plain - sent}, what


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_reduce_scatter_is_the_sum_of_what_the_codec_makes(ranks: int) -> None:
    run_ranks(ranks, _reduce_scatter, ["AVG", "SUM"])


def _reduce_scatter_by_nodes(cases: Sequence[tuple[str, torch.dtype, int]] = CASES) -> None:
    rank, device = begin()
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, place_of_this_process())
    nodes = Nodes.of(_world(), dict(enumerate(places)))
    assert nodes.sizes == (2, 2)
    hops = nodes.hops(device)
    assert hops is not None
    assert hops is nodes.hops(device)
    own = next(index for index, node in enumerate(sorted(nodes.nodes)) if rank in node)
    for seed, (name, dtype, size) in enumerate(cases):
        codec, traffic, what = get_codec(name), Traffic(), f"{name} {dtype} {size}"
        gradients = _drawn(4 * size, dtype, seed, device)
        rows = [one.view(4, -1)[rank] for one in _of_all(gradients)]
        reduce = CompressedReduceScatter(codec, nodes, traffic, hops)
        output = reduce.allocate((size,), dtype=dtype, device=device)
        reduce(output, gradients, _world(), dist.ReduceOp.AVG)
        if not size:
            continue
        # What is compressed is the sum over a node, of fp16 the mean.
        share = 0.5 if dtype == torch.float16 else 1.0
        parts = [sum(share * rows[one] for one in node) for node in sorted(nodes.nodes)]
        _check_reduction(output, parts, own, codec, 0.25 / share, what)
        # Half of the ring's three quarters leave a node through this rank.
        sent, plain = codec.compressed_bytes(size), 3 * size * output.element_size() // 2
        assert traffic.as_dict() == {"sent": sent, "saved": plain - sent}, what


@pytest.mark.parametrize("numbered", ["node after node", "in turn"])
def test_over_two_nodes_what_is_compressed_is_the_sum_of_a_node(numbered: str) -> None:
    launched = TWO_NODES_OF_TWO if numbered == "node after node" else [TWO_NODES_OF_TWO[one] for one in (0, 2, 1, 3)]
    run_ranks(4, _reduce_scatter_by_nodes, env=launched)


def test_reductions_are_those_of_torch() -> None:
    assert factor_of(dist.ReduceOp.AVG, 4) == 0.25
    assert factor_of(dist.ReduceOp.SUM, 4) == 1.0
    assert factor_of(dist._make_nccl_premul_sum(0.125), 4) == 0.125
    told = message_of(ValueError, lambda: factor_of(dist.ReduceOp.MAX, 4))
    assert "MAX" in told
    assert "AVG, SUM or PREMUL_SUM" in told


def _all_reduce(cases: Sequence[tuple[str, torch.dtype, int]] = CASES) -> None:
    _, device = begin()
    ranks = dist.get_world_size()
    for seed, (name, dtype, size) in enumerate(cases):
        codec = get_codec(name)
        gradients = _drawn(size, dtype, seed, device)
        of_all = [one.cpu() for one in _of_all(gradients)]
        # The average and the sum, by turns.
        factor = (1.0, 1 / ranks)[seed % 2]
        reduction = ReplicaAllReduce(dist.group.WORLD, codec, Traffic())  # type: ignore[arg-type]
        reduction.reduce(gradients, factor)
        check_tensor_on_ranks(gradients, f"{name} {dtype} {size}")
        if not size:
            continue
        # As one chunk, whose ranges are at least as wide as those of its parts.
        exact = factor * sum(one.double() for one in of_all)
        largest = factor * ranks * float(max(one.float().abs().max() for one in of_all))
        widest = torch.tensor([largest, -largest] * 16)
        allowed = 2.1 * float(codec.error_bound(widest).max()) + 4 * torch.finfo(dtype).eps * largest
        assert float((gradients.cpu().double() - exact).abs().max()) <= allowed, f"{name} {dtype} {size}"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_all_reduce_between_replicas_gives_all_the_same_average(ranks: int) -> None:
    run_ranks(ranks, _all_reduce)


@pytest.mark.deep
def test_every_codec_with_every_dtype_and_size() -> None:
    run_ranks(2, _reduce_scatter, ["AVG", "SUM"], EVERY_CASE)
    run_ranks(4, _reduce_scatter_by_nodes, EVERY_CASE, env=TWO_NODES_OF_TWO)
    run_ranks(3, _all_reduce, EVERY_CASE)


@on_ranks(2)
def test_what_is_owed_follows_the_scale_of_the_loss(rank: int, device: torch.device) -> None:
    """Powers of two change no digit. What is owed is saved and loaded between two scales."""
    ranks, size = dist.get_world_size(), 2000
    for dtype in (torch.float32, torch.float16):
        constant = torch.randn(ranks * size, generator=torch.Generator().manual_seed(rank)).to(device, dtype)
        found = []
        for scales in ((256.0,) * 6, (256.0, 256.0, 128.0, 64.0, 64.0, 512.0)):
            scaler = torch.amp.GradScaler(device.type)
            scaler.scale(torch.ones((), device=device))
            residual = Residual("layer", None, scaler)
            means = []
            for step, scale in enumerate(scales):
                if step == 3:
                    stored, owed_in = residual.stored, residual.scale.value
                    residual = Residual("layer", None, scaler)
                    residual.load(stored, owed_in)
                scaler.update(scale)
                reduce = CompressedReduceScatter(
                    get_codec("int4"), Nodes.unknown(_world()), Traffic(), residual=residual
                )
                output = torch.empty(size, dtype=dtype, device=device)
                reduce(output, constant * scale, dist.group.WORLD, dist.ReduceOp.AVG)  # type: ignore[arg-type]
                means.append(output.float() / scale)
            found.append(torch.stack(means))
        assert torch.equal(*found), dtype


@on_ranks(2)
def test_error_feedback_sends_later_what_was_rounded_off(rank: int, device: torch.device) -> None:
    ranks = dist.get_world_size()
    nodes = Nodes.unknown(_world())
    for name, dtype in itertools.product(codec_names(), (torch.float32, torch.bfloat16)):
        codec = get_codec(name)
        for size in (1, 33, 2000):
            constant = _drawn(ranks * size, dtype, size, device)
            expected = torch.stack([one.view(ranks, -1)[rank] for one in _of_all(constant)]).float().mean(0)
            with_feedback: Any = CompressedReduceScatter(codec, nodes, Traffic(), residual=Residual("layer"))
            without: Any = CompressedReduceScatter(codec, nodes, Traffic())
            errors = []
            for reduce in (with_feedback, without):
                total = torch.zeros_like(expected)
                for _ in range(20):
                    output = torch.empty(size, dtype=dtype, device=device)
                    reduce(output, constant.clone(), dist.group.WORLD, dist.ReduceOp.AVG)
                    total += output.float()
                errors.append(float((total / 20 - expected).abs().max()))
            largest = float(expected.abs().max())
            slack = 2 * torch.finfo(dtype).eps * largest + 1e-12
            # The mean of 20 steps is off by no more than a twentieth of one step's rounding, and its dtype's.
            assert errors[0] <= errors[1] / 4 + slack, (name, dtype, size, errors)
    # What is not finite is not remembered, and another size begins anew.
    feedback = CompressedReduceScatter(get_codec("int8"), nodes, Traffic(), residual=(residual := Residual("layer")))
    broken = torch.full((ranks * 64,), float("inf"), device=device)
    feedback(torch.empty(64, device=device), broken, dist.group.WORLD, dist.ReduceOp.AVG)  # type: ignore[arg-type]
    assert residual.stored is not None
    ones = torch.ones(ranks * 64, device=device)
    output = torch.empty(64, device=device)
    feedback(output, ones, dist.group.WORLD, dist.ReduceOp.AVG)  # type: ignore[arg-type]
    assert torch.equal(output, torch.ones_like(output))
    output = torch.empty(65, device=device)
    with pytest.warns(RuntimeWarning, match="'layer' are of other parameters"):
        feedback(output, torch.ones(ranks * 65, device=device), dist.group.WORLD, dist.ReduceOp.AVG)  # type: ignore[arg-type]
    assert torch.equal(output, torch.ones_like(output))
