"""QAdam against its formula: a reference in plain torch trains all ranks at once, from the same batches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.byte_reference import nodes_of
from support.ranks import run_ranks
from support.sweeps import each_value_once
from support.training import (
    NODES_OF_TWO_AND_ONE,
    TWO_NODES_OF_TWO,
    batches,
    begin,
    check_close,
    check_equal,
    check_ranks_equal,
    engine_of,
    loss_of,
    mlp,
    wrap_with,
)
from torch import Tensor, nn

from bagua.kernels.minmax_uint8 import compress, decompress, decompress_reduce_compress
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer

W = 5
STEPS = 3 * W


def wrap_qadam(net: Any, optimizer: QAdamOptimizer, how: str = "with_bagua", **options: Any) -> Any:
    return wrap_with(how, net, [optimizer], QAdamAlgorithm(optimizer, **options))


# --- the formula -----------------------------------------------------------------------------------------------------


def _groups(net: nn.Module) -> list[dict[str, Any]]:
    parameters = list(net.parameters())
    return [
        {
            "params": parameters[:3],
            "lr": 0.02,
            "betas": (0.8, 0.95),
            "weight_decay": 0.1,
            "freeze_bias_correction": False,
        },
        {"params": parameters[3:]},
    ]


def _compressed_mean(flats: list[Tensor], average: bool) -> Tensor:
    """What the peers end with: each sends bytes, each averages a chunk, and sends bytes again."""
    chunks = len(flats)
    sent = [compress(flat, chunks) for flat in flats]
    elements = flats[0].numel() // chunks
    owned = [
        decompress_reduce_compress(torch.stack([one[chunk] for one in sent]), elements, average)
        for chunk in range(chunks)
    ]
    return decompress(torch.stack(owned), torch.empty_like(flats[0]))


class Reference:
    """All ranks' training in one process. The first group's bias correction is not frozen. `nodes` are their ranks, if
    the algorithm is hierarchical; `length` is the number of elements in the bucket of momenta."""

    def __init__(self, net: nn.Module, nodes: list[list[int]] | None) -> None:
        self.net, self.nodes, self.length = net, nodes, 0
        self.options = {id(one): group for group in _groups(net) for one in group["params"]}
        self.m = [torch.zeros_like(one) for one in net.parameters()]
        self.v = [torch.zeros_like(one) for one in net.parameters()]
        self.t = 0

    def _option(self, parameter: Tensor, name: str) -> Any:
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0, "freeze_bias_correction": True}
        return self.options[id(parameter)].get(name, defaults[name])

    def _gradients(self, passes: list[Any]) -> list[Tensor]:
        parameters = list(self.net.parameters())
        of_passes = [torch.autograd.grad(loss_of(self.net, batch), parameters) for batch in passes]
        return [sum(same[1:], same[0]) for same in zip(*of_passes, strict=True)]

    def _mean_momenta(self, by_rank: list[list[Tensor]]) -> list[Tensor]:
        flats = []
        for momenta in by_rank:
            flat = torch.cat([one.reshape(-1) for one in reversed(momenta)])
            flats.append(nn.functional.pad(flat, (0, self.length - flat.numel())))
        if self.nodes is not None:
            shares = [flat * (1 / len(flats)) for flat in flats]
            flats = [torch.stack([shares[rank] for rank in node]).sum(dim=0) for node in self.nodes]
        flat = _compressed_mean(flats, average=self.nodes is None)
        means = []
        for one in reversed(self.m):
            means.append(flat[: one.numel()].view_as(one))
            flat = flat[one.numel() :]
        return means[::-1]

    @torch.no_grad()
    def step(self, passes_of_ranks: list[list[Any]]) -> None:
        """
        Args:
            passes_of_ranks: the batches of each rank, whose gradients are added.
        """
        self.t += 1
        parameters = list(self.net.parameters())
        with torch.enable_grad():
            by_rank = [self._gradients(passes) for passes in passes_of_ranks]
        ranks = len(by_rank)
        b1s = [self._option(one, "betas")[0] for one in parameters]

        def decayed(gradients: list[Tensor]) -> list[Tensor]:
            pairs = zip(gradients, parameters, strict=True)
            return [g.add(one, alpha=self._option(one, "weight_decay")) for g, one in pairs]

        if self.t <= W:
            means = [sum(one * (1 / ranks) for one in same) for same in zip(*by_rank, strict=True)]
            gradients = decayed(means)
            self.m = [m.lerp(g, 1 - b1) for m, g, b1 in zip(self.m, gradients, b1s, strict=True)]
            for index, (parameter, g) in enumerate(zip(parameters, gradients, strict=True)):
                b2 = self._option(parameter, "betas")[1]
                self.v[index] = (b2 * self.v[index]).addcmul(g, g, value=1 - b2)
        else:
            folded = [
                [m.lerp(g, 1 - b1) for m, g, b1 in zip(self.m, decayed(gradients), b1s, strict=True)]
                for gradients in by_rank
            ]
            self.m = self._mean_momenta(folded)
        for parameter, m, v, b1 in zip(parameters, self.m, self.v, b1s, strict=True):
            b2 = self._option(parameter, "betas")[1]
            learned = min(self.t, W) if self._option(parameter, "freeze_bias_correction") else self.t
            denominator = v.sqrt() / (1 - b2**learned) ** 0.5 + 1e-8
            parameter.addcdiv_(m, denominator, value=-self._option(parameter, "lr") / (1 - b1**self.t))
            if self.t == W:
                v[v == 0] = v.sum() / (v != 0).sum()


def _follows_formula(how: str, nodes: list[list[int]] | None) -> None:
    rank, device = begin()
    world = dist.get_world_size()
    net, theirs = mlp(3 if rank == 0 else 100, device), mlp(3, device)
    # The options of rank 0 hold.
    optimizer = QAdamOptimizer(_groups(net), warmup_steps=W, freeze_bias_correction=rank == 0)
    model = wrap_qadam(net, optimizer, how, hierarchical=nodes is not None)
    reference = Reference(theirs, nodes)
    for number in range(STEPS):
        data = [batches(other, 1 + number % 2, device, seed=number) for other in range(world)]
        if number == 2 * W:  # an optimizer that has warmed up
            model = wrap_qadam(net, optimizer, how, hierarchical=nodes is not None)
        before = [optimizer.state[one]["exp_avg"].clone() for one in net.parameters()] if number else []
        optimizer.zero_grad()
        *earlier, last = data[rank]
        for batch in earlier:  # after the warm-up, passes that communicate add up as well
            with engine_of(model).no_sync() if number <= W or number % 4 == 1 else nullcontext():
                loss_of(model, batch).backward()
        loss_of(model, last).backward()
        for one, momentum in zip(net.parameters(), before, strict=bool(number)):
            assert torch.equal(optimizer.state[one]["exp_avg"], momentum), "it changes in the step"
        optimizer.step()
        if number == W:
            (bucket,) = model.bagua_buckets
            assert not bucket.holds_gradients
            reference.length = bucket.flattened_tensor().numel()
        reference.step(data)
        check_ranks_equal(net, f"step {number}")
        # Sums of two have one order. More, and sums on GPUs, round otherwise, which moves some to the next level.
        if world <= 2 and device.type == "cpu":
            check_equal(net, theirs, f"step {number}")
            for one, m, v in zip(net.parameters(), reference.m, reference.v, strict=True):
                assert torch.equal(optimizer.state[one]["exp_avg"], m), number
                assert torch.equal(optimizer.state[one]["exp_avg_sq"], v), number
        else:
            check_close(net, theirs, f"step {number}", 1e-3)


HOWS = ["with_bagua", "with_bagua unflattened", "wrapper", "wrapper, finding unused"]


@pytest.mark.parametrize(("how", "ranks"), each_value_once(HOWS, [2, 1, 3, 4]))
def test_steps_follow_the_formula(how: str, ranks: int) -> None:
    run_ranks(ranks, _follows_formula, how, None)


@pytest.mark.parametrize("nodes", [TWO_NODES_OF_TWO, NODES_OF_TWO_AND_ONE], ids=["2+2", "2+1"])
def test_steps_on_nodes_follow_the_formula(nodes: list[dict[str, str]]) -> None:
    run_ranks(len(nodes), _follows_formula, "with_bagua", nodes_of(nodes), env=nodes)
