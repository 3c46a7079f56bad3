"""Low-precision decentralized training as a formula, with the reference quantizer: all ranks in one process."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch
from support import decentralized
from support.replicas import Replicas, flat_weights, gathered
from torch import Tensor, nn

from bagua.kernels import minmax_uint8_reference
from bagua.kernels.minmax_uint8 import BLOCK_ELEMENTS
from bagua.kernels.minmax_uint8_layout import chunk_layout
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.decentralized import LowPrecisionDecentralizedAlgorithm


def quantised(difference: Tensor) -> Tensor:
    """What the neighbours understand of it, by the plain torch code."""
    source = difference.float().view(1, -1)
    layout = chunk_layout(source.numel(), BLOCK_ELEMENTS)
    message = torch.empty(1, layout.total_bytes, dtype=torch.uint8, device=source.device)
    minmax_uint8_reference.compress(source, layout, message)
    decoded = torch.empty_like(source)
    minmax_uint8_reference.decompress(message, decoded, False, layout)
    return decoded.view(-1)


class Ring(Replicas):
    """Replicas in a ring. As each rank knows its neighbours' weights exactly, W of all ranks is all that there is.

    Args:
        buckets: the names of the parameters in each.
        nodes: which ranks share one; None: no hierarchy.
    """

    def __init__(self, net: nn.Module, ranks: int, make: Any, buckets: Sequence[Sequence[str]], nodes: Any) -> None:
        super().__init__(net, ranks, make)
        self.nodes = nodes if nodes is not None else [[rank] for rank in range(ranks)]
        self.seed(buckets)

    def seed(self, buckets: Sequence[Sequence[str]]) -> None:
        self.buckets = [list(names) for names in buckets]
        self.replicas = [[self.weights(names)[node[0]].clone() for node in self.nodes] for names in self.buckets]

    def exchange(self) -> None:
        for names, replicas in zip(self.buckets, self.replicas, strict=True):
            now = [torch.stack([self.weights(names)[rank].double() for rank in node]).mean(0) for node in self.nodes]
            last = [replica.double() for replica in replicas]
            count = len(self.nodes)
            for place in range(count):
                left, right = last[(place - 1) % count], last[(place + 1) % count]
                difference = now[place] + left / 3 + right / 3 - 5 / 3 * last[place]
                dtype = replicas[place].dtype
                replicas[place] = (replicas[place].float() + quantised(difference)).to(dtype)
            every = [replicas[place] for rank in range(len(self.nets)) for place in [self.place_of(rank)]]
            self.set_weights(every, names)

    def place_of(self, rank: int) -> int:
        return next(place for place, node in enumerate(self.nodes) if rank in node)

    def update(self, exchange: bool = True, skip: Collection[int] = ()) -> None:
        self.step(skip)
        if exchange:
            self.exchange()

    def check(self, net: nn.Module, rank: int, what: str) -> None:
        """Where a difference lies between two levels, rounding decides; that is rare, and no more than a level."""
        ours, theirs = flat_weights(net).float(), flat_weights(self.nets[rank]).float()
        distance = (ours - theirs).abs()
        short = next(net.parameters()).dtype != torch.float32
        close = distance <= (2e-2 if short else 1e-5)
        assert torch.isfinite(ours).all(), what
        assert close.float().mean() > 0.9, f"{what}: {int((~close).sum())} of {close.numel()} are away on rank {rank}"
        assert distance.max() < (4e-2 if short else 2e-3), f"{what}: {float(distance.max()):.2e} away on rank {rank}"


class Case(decentralized.Case):
    wrapper_options: ClassVar[dict[str, Any]] = {"bucket_cap_mb": 1e-3}

    def algorithm(self) -> Algorithm:
        return LowPrecisionDecentralizedAlgorithm(self.hierarchical, self.interval)

    def reference(self, start: nn.Module, ranks: int, net: Any) -> Ring:
        return Ring(start, ranks, self.make_optimizers, bucket_names(net), self.nodes)

    def check_exchange(self, net: Any, reference: Any, rank: int) -> None:
        check_replicas(net, reference.nodes, f"{self}")


def bucket_names(net: Any) -> list[list[str]]:
    return [[record.name for record in bucket.records] for bucket in net.bagua_buckets]


def check_replicas(net: Any, nodes: Sequence[Sequence[int]], what: str) -> None:
    """W is the weights, the left neighbour's R and the right neighbour's L, to the bit, on all ranks of a node."""
    for bucket in net.bagua_buckets:
        for tensor, view in zip(bucket.tensors, bucket.views, strict=True):
            begin = view.storage_offset()
            assert torch.equal(tensor.detach().reshape(-1), bucket._weight[begin : begin + tensor.numel()]), what
        weights, lefts, rights = map(gathered, (bucket._weight, bucket._left_peer_weight, bucket._right_peer_weight))
        for place, node in enumerate(nodes):
            left, right = nodes[place - 1][0], nodes[(place + 1) % len(nodes)][0]
            for rank in node:
                assert torch.equal(weights[rank], weights[node[0]]), (what, rank)
                assert torch.equal(lefts[rank], weights[left]), (what, rank)
                assert torch.equal(rights[rank], weights[right]), (what, rank)


class Job(decentralized.Job):
    def __init__(self, rank: int, device: torch.device, **options: Any) -> None:
        super().__init__(rank, device, Case, **options)

    def check(self, what: str) -> None:
        super().check(what)
        check_replicas(self.net, self.reference.nodes, what)
