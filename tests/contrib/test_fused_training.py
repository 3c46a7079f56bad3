"""fuse_step() in with_bagua: the hooks of the engine run, and the memory of buckets is used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from support.rank_tests import on_ranks
from support.training import batches, begin, loss_of, message_of, mlp

from bagua.contrib.fuse.optimizer import fuse_optimizer
from bagua.torch_api.algorithms.base import Algorithm
from bagua.torch_api.algorithms.decentralized import DecentralizedAlgorithm, LowPrecisionDecentralizedAlgorithm
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer

STEPS = 5


def _adam(model: Any, make: Callable[..., Any] = torch.optim.Adam) -> torch.optim.Optimizer:
    layers = [list(model[position].parameters()) for position in (0, 2, 4)]
    optimizer: torch.optim.Optimizer = make([{"params": layers[0] + layers[1]}, {"params": layers[2], "lr": 0.02}])
    return optimizer


def _trained(
    algorithm_for: Callable[[Any], Algorithm],
    *,
    wraps_flat: bool,
    fuses_flat: bool | None,
    first: str = "fuse",
    make: Callable[..., Any] = torch.optim.Adam,
) -> Any:
    """The model and its optimizer. `fuses_flat` None: with plain steps."""
    rank, device = begin()
    model: Any = mlp(rank, device)
    optimizer = _adam(model, make)
    if fuses_flat is not None and first == "fuse":
        fuse_optimizer(optimizer, fuses_flat)
    model.with_bagua([optimizer], algorithm_for(optimizer), do_flatten=wraps_flat)
    if fuses_flat is not None and first == "wrap":
        fuse_optimizer(optimizer, fuses_flat)
    for step, batch in enumerate(batches(rank, STEPS, device)):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, batch).backward()
        if fuses_flat is None or step == 3:
            optimizer.step()
        else:
            optimizer.fuse_step()  # type: ignore[attr-defined]
    return model, optimizer


ALGORITHMS: dict[str, Callable[[Any], Algorithm]] = {
    "gradient_allreduce": lambda _: GradientAllReduceAlgorithm(),
    "decentralized": lambda _: DecentralizedAlgorithm(hierarchical=False),
    "low_precision_decentralized": lambda _: LowPrecisionDecentralizedAlgorithm(hierarchical=False),
}
FUSED = 2 * (STEPS - 1)  # in each of two groups


# Whether buckets and fuse_optimizer lay parameters out, which is called first, and how often steps are fused.
LAYOUTS = [
    (False, True, "fuse", FUSED),
    (False, True, "wrap", FUSED),
    (True, True, "fuse", 0),
    (True, False, "fuse", FUSED),
    (True, False, "wrap", FUSED),
]


@on_ranks(2)
def test_every_layout_trains_alike() -> None:
    for name, algorithm_for in ALGORITHMS.items():
        # Weights that are exchanged keep their memory, and neither they nor their gradients lie in a row for `fuse`.
        layouts = LAYOUTS if name == "gradient_allreduce" else [*LAYOUTS[1:3], (True, False, "fuse", 0)]
        expected, _ = _trained(algorithm_for, wraps_flat=True, fuses_flat=None)
        for wraps_flat, fuses_flat, first, count in layouts:
            model, optimizer = _trained(algorithm_for, wraps_flat=wraps_flat, fuses_flat=fuses_flat, first=first)
            what = f"{name}, {wraps_flat=}, {fuses_flat=}, {first} first"
            assert all(map(torch.equal, model.parameters(), expected.parameters())), what
            assert optimizer._bagua_fused_count == count, f"{what}: {optimizer._bagua_fused_count}"


@on_ranks(2)
def test_qadam_steps_as_it_does() -> None:
    """Bagua 0.9 fused it, too. Its step takes many parameters at a time, before and after its warm-up."""
    make = functools.partial(QAdamOptimizer, warmup_steps=2)
    expected, _ = _trained(QAdamAlgorithm, wraps_flat=True, fuses_flat=None, make=make)
    for wraps_flat, fuses_flat, first, _ in LAYOUTS:
        model, optimizer = _trained(
            QAdamAlgorithm, wraps_flat=wraps_flat, fuses_flat=fuses_flat, first=first, make=make
        )
        what = f"{wraps_flat=}, {fuses_flat=}, {first} first"
        assert all(map(torch.equal, model.parameters(), expected.parameters())), what
        assert optimizer._bagua_fused_count == FUSED, what


@on_ranks(2)
def test_gradients_stay_in_their_bucket(rank: int, device: torch.device) -> None:
    model: Any = mlp(rank, device)
    optimizer: Any = fuse_optimizer(_adam(model), do_flatten=False)
    model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    for batch in batches(rank, 2, device):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        before = {id(one): one.grad.data_ptr() for one in model.parameters()}
        optimizer.fuse_step()
        assert before == {id(one): one.grad.data_ptr() for one in model.parameters()}
    memory = {one.grad.untyped_storage().data_ptr() for one in model.parameters()}
    assert memory == {bucket.flattened_tensor().untyped_storage().data_ptr() for bucket in model.bagua_buckets}
    assert optimizer._bagua_fused_count == 4


@on_ranks(2)
def test_incomplete_gradients_are_refused(rank: int, device: torch.device) -> None:
    model: Any = mlp(rank, device)
    optimizer: Any = fuse_optimizer(_adam(model))
    model.with_bagua([optimizer], GradientAllReduceAlgorithm(), do_flatten=False)
    output = model(batches(rank, 1, device)[0][0])
    before = [one.clone() for one in model.parameters()]
    output[:, 0].sum().backward(inputs=[model[0].weight])
    assert "before optimizer.step()" in message_of(RuntimeError, optimizer.fuse_step)
    assert all(map(torch.equal, before, model.parameters()))
