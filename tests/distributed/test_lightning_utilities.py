"""The collectives of bagua.lightning.utilities."""

from __future__ import annotations

import importlib.util
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.training import message_of, mlp, torch_ddp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

if importlib.util.find_spec("lightning") is None:
    pytest.skip("needs lightning: pip install lightning", allow_module_level=True)


def _utilities() -> Any:
    """Imported in ranks only: `bagua.lightning` imports Lightning."""
    return importlib.import_module("bagua.lightning.utilities")


@on_ranks(3, lightning=True)
def test_collectives(rank: int, device: torch.device) -> None:
    utilities = _utilities()
    ranks = dist.get_world_size()
    own = torch.arange(6.0, device=device).view(2, 3) + 10 * rank
    expected = torch.stack([torch.arange(6.0, device=device).view(2, 3) + 10 * other for other in range(ranks)])
    plain = utilities.all_gather_ddp_if_available(own.clone().requires_grad_())
    assert torch.equal(plain, expected)
    assert not plain.requires_grad
    # The gradient of a function of what all have, against finite differences, by one rank's input at a time.
    weights = torch.randn(ranks, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).to(device)

    def loss_of(inputs: torch.Tensor) -> torch.Tensor:
        return (utilities.all_gather_ddp_if_available(inputs, sync_grads=True) ** 2 * weights).sum()

    inputs = own.double().requires_grad_()
    loss_of(inputs).backward()
    # All ranks differentiate their own copy of the same loss: each input counts as often as there are ranks.
    step = 1e-5
    for index in range(own.numel()):
        for mover in range(ranks):
            moved = own.double().clone()
            moved.view(-1)[index] += step * (rank == mover)
            difference = (loss_of(moved) - loss_of(own.double())) / step
            if rank == mover:
                assert inputs.grad is not None
                torch.testing.assert_close(
                    inputs.grad.view(-1)[index], ranks * difference.detach(), rtol=1e-3, atol=1e-3
                )
    uneven = utilities.gather_all_tensors(torch.full((rank, 2), float(rank), device=device))
    assert [tuple(one.shape) for one in uneven] == [(other, 2) for other in range(ranks)]
    assert all((one == other).all() for other, one in enumerate(uneven))
    scalars = utilities.gather_all_tensors(torch.tensor(rank, dtype=torch.bool, device=device))
    assert [bool(one) for one in scalars] == [bool(other) for other in range(ranks)]
    for wrong in (torch.ones(2, dtype=(torch.float32, torch.float64)[rank % 2]), torch.ones((1,) * (1 + rank % 2))):
        message_of(ValueError, lambda wrong=wrong: utilities.gather_all_tensors(wrong.to(device)), "rank 1 has")
    total = sum(range(1, ranks + 1))
    for operation, value in (
        (None, total),
        ("sum", total),
        ("mean", total / ranks),
        ("AVG", total / ranks),
        ("max", ranks),
    ):
        assert float(utilities.sync_ddp(torch.tensor(rank + 1.0, device=device), reduce_op=operation)) == value
        assert (
            float(utilities.sync_ddp_if_available(torch.tensor(rank + 1, device=device), reduce_op=operation)) == value
        )
        assert float(utilities.sync_ddp(rank + 1.0, reduce_op=operation)) == value
        assert float(utilities.sync_ddp_if_available(rank + 1, reduce_op=operation)) == value
    assert "'median' is unknown" in message_of(
        ValueError, lambda: utilities.sync_ddp(torch.ones(1, device=device), reduce_op="median")
    )
    assert utilities.distributed_available()
    utilities.init_dist_connection(SimpleNamespace(), "gloo")  # was done


@on_ranks(2, lightning=True)
def test_the_state_of_a_hook_by_its_other_name(device: torch.device) -> None:
    """As in an example of the old documentation."""
    utilities = _utilities()
    states: list[object] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are text
        states.append(state)
        return default_hooks.allreduce_hook(None, bucket)

    model = torch_ddp(mlp(dist.get_rank(), device))
    utilities.register_ddp_comm_hook(model=model, state="mine", ddp_comm_hook=hook)
    model(torch.ones(2, next(model.parameters()).shape[1], device=device)).sum().backward()
    assert set(states) == {"mine"}


@on_ranks(2, lightning=True)
def test_communication_hooks(rank: int, device: torch.device) -> None:
    utilities = _utilities()
    wrappers: list[Any] = []
    model = torch_ddp(mlp(rank, device))
    utilities.register_ddp_comm_hook(model)
    utilities.register_ddp_comm_hook(
        model,
        None,
        default_hooks.allreduce_hook,
        lambda hook: wrappers.append(hook) or default_hooks.fp16_compress_wrapper(hook),
    )
    assert wrappers == [default_hooks.allreduce_hook]
    with pytest.raises(TypeError, match="ddp_comm_state or state"):
        utilities.register_ddp_comm_hook(model, object(), default_hooks.allreduce_hook, state=object())
    model(torch.ones(2, next(model.parameters()).shape[1], device=device)).sum().backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    assert torch.equal(gradient, gradient.half().float()), "it went as fp16"


@on_ranks(1, lightning=True, joined=False)
def test_without_a_process_group() -> None:
    utilities = _utilities()
    one = torch.ones(2)
    assert not utilities.distributed_available()
    assert utilities.all_gather_ddp_if_available(one, sync_grads=True) is one
    assert utilities.sync_ddp_if_available(one) is one
    assert utilities.sync_ddp_if_available(1.5) == 1.5
    assert utilities.gather_all_tensors(one)[0] is one
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_available", lambda: False)
        with pytest.raises(RuntimeError, match="not available in this build"):
            utilities.init_dist_connection(SimpleNamespace(), "gloo")


def _connected(port: int) -> int:
    utilities = _utilities()
    environment = SimpleNamespace(
        main_address="127.0.0.1",
        main_port=port,
        global_rank=lambda: int(os.environ["RANK"]),
        world_size=lambda: int(os.environ["WORLD_SIZE"]),
    )
    del os.environ["MASTER_PORT"]
    utilities.init_dist_connection(environment, "gloo")
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("127.0.0.1", str(port))
    return int(utilities.sync_ddp(torch.tensor(dist.get_rank() + 1)))


def test_a_cluster_environment_connects() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    assert run_ranks(2, _connected, port, lightning=True) == [3, 3]
