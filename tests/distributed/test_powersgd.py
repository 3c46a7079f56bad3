"""powersgd, compared with torch's powerSGD_hook, and what it promises by itself.

That training is resumed bit for bit is tested with all algorithms (test_algorithms_resume).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.training import check_ranks_equal, check_tensor_on_ranks, message_of, torch_ddp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as judge

from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.data_parallel import DistributedDataParallel

RANK, STEPS = 2, 6


def _net(device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two matrices of different shapes, a convolution, and vectors; the first is too small to be compressed."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 6), nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 32), nn.Unflatten(1, (8, 2, 2)), nn.Conv2d(8, 12, 2)
    ).to(device, dtype)


def _loss(model: Any, rank: int, step: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 3, generator=generator).to(device, dtype)
    loss: Tensor = (model(x).float() - rank).square().sum()
    return loss


def _wrapped(net: Any, **options: Any) -> Any:
    # No step is made: all gradients are of the same weights.
    return net.with_bagua([torch.optim.SGD(net.parameters(), lr=0.0)], Algorithm.init("powersgd", **options))


def _gradients(model: Any) -> dict[str, Tensor]:
    return {name.removeprefix("module."): one.grad.clone() for name, one in model.named_parameters()}


@on_ranks(2)
def test_steps_are_those_of_torchs_hook(rank: int, device: torch.device) -> None:
    ranks = dist.get_world_size()
    theirs = torch_ddp(_net(device))
    state = judge.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2, min_compression_rate=2)
    order: list[Tensor] = []

    def watched(bucket: Any) -> Any:
        order[:] = bucket.parameters()
        return judge.powerSGD_hook(state, bucket)

    # DDP asks for a function whose annotations, if it has any, are its own.
    theirs.register_comm_hook(None, lambda _, bucket: watched(bucket))
    for step in range(3):
        theirs.zero_grad()
        _loss(theirs, rank, step, device).backward()
    # Their first factors are random, too: ours go on with what theirs are after the first compressed step.
    ours = _wrapped(_net(device), rank=RANK)
    saved = ours.bagua_ddp.state_dict()
    owed, factors = saved["algorithm"]["owed"], saved["algorithm"]["factors"]
    names = {id(one): name for name, one in theirs.module.named_parameters()}
    sizes = [one.numel() for one in order]
    compressed = [names[id(one)] for one in order if names[id(one)] in owed]
    assert sorted(compressed) == ["1.weight", "3.weight", "5.weight"]
    for one, error in zip(order, state.error_dict[0].split(sizes), strict=True):
        if names[id(one)] in owed:
            owed[names[id(one)]].copy_(error.view(owed[names[id(one)]].shape) / ranks)
    lengths = [factors[name].numel() for name in compressed]
    for name, factor in zip(compressed, state.q_memory_dict[0].split(lengths), strict=True):
        factors[name].copy_(factor.view(factors[name].shape))
    ours.bagua_ddp.load_state_dict(saved)
    for step in range(3, STEPS):
        for model in (ours, theirs):
            model.zero_grad()
            _loss(model, rank, step, device).backward()
        mine, reference = _gradients(ours), _gradients(theirs)
        for name, gradient in mine.items():
            check_tensor_on_ranks(gradient, name)
            distance = float((gradient - reference[name]).norm() / reference[name].norm())
            assert distance < 1e-4, (step, name, distance)


@on_ranks(2)
def test_what_is_left_out_comes_later(rank: int, device: torch.device) -> None:
    """Results and what is owed add up to the gradients; vectors and small matrices are exact."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        model, plain = _wrapped(_net(device, dtype), rank=1), _net(device, dtype)
        totals = {name: torch.zeros_like(one, dtype=torch.float32) for name, one in plain.named_parameters()}
        wanted = {name: one.clone() for name, one in totals.items()}
        for step in range(STEPS):
            for one in (model, plain):
                one.zero_grad()
                _loss(one, rank, step, device, dtype).backward()
            for name, gradient in _gradients(plain).items():
                mean = gradient.float()
                dist.all_reduce(mean)
                wanted[name] += mean / dist.get_world_size()
            for name, gradient in _gradients(model).items():
                check_tensor_on_ranks(gradient, name)
                totals[name] += gradient.float()
        owed = model.bagua_ddp.state_dict()["algorithm"]["owed"]
        for name, total in totals.items():
            scale = float(wanted[name].abs().max())
            if name in owed:
                assert float((total - wanted[name]).abs().max()) > 0.05 * scale, f"{name} is not compressed"
                rest = owed[name].clone()
                dist.all_reduce(rest)
                total += rest.view(total.shape)
            assert float((total - wanted[name]).abs().max()) < tolerance * scale, (dtype, name)


@on_ranks(2)
def test_what_is_owed_follows_the_scale_of_the_loss(rank: int, device: torch.device) -> None:
    """Powers of two change no digit of float32. The state is saved and loaded between two scales."""
    for dtype, tolerance in ((torch.float32, 0.0), (torch.float16, 0.01)):
        found = []
        for scales in ((16.0,) * 6, (16.0, 16.0, 8.0, 4.0, 4.0, 32.0)):
            scaler = torch.amp.GradScaler(device.type)
            scaler.scale(torch.ones((), device=device))
            model = _wrapped(_net(device, dtype), rank=1, grad_scaler=scaler)
            gradients = []
            for step, scale in enumerate(scales):
                if step == 3:
                    saved = copy.deepcopy(model.bagua_ddp.state_dict())
                    model = _wrapped(_net(device, dtype), rank=1, grad_scaler=scaler)
                    model.bagua_ddp.load_state_dict(saved)
                scaler.update(scale)
                model.zero_grad()
                scaler.scale(_loss(model, rank, step, device, dtype) / 16).backward()
                gradients.append(torch.cat([one.float().flatten() / scale for one in _gradients(model).values()]))
            found.append(torch.stack(gradients))
        difference = float((found[1] - found[0]).abs().max() / found[0].abs().max())
        assert difference <= tolerance, (dtype, difference)


@on_ranks(2)
def test_a_mean_of_low_rank_is_exact_and_an_overflow_is_forgotten(rank: int, device: torch.device) -> None:
    net = nn.Linear(40, 30, bias=False).to(device)
    model = _wrapped(net, rank=2)
    for step, factor in enumerate((1.0, float("inf") if rank == 1 else 1.0, 1.0, 1.0)):
        x = torch.randn(1, 40, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
        outer = torch.randn(1, 30, generator=torch.Generator().manual_seed(50 * step + rank)).to(device)
        model.zero_grad()
        (model(x) * outer * factor).sum().backward()
        mean = outer.T @ x * factor
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        got = net.weight.grad
        assert got is not None
        if step == 1:
            assert got.isnan().all(), "on all ranks"
        else:
            assert float((got - mean).abs().max()) < 1e-4 * float(mean.abs().max()), step
    check_ranks_equal(net)


@on_ranks(2)
def test_default_dtype_and_device_are_the_users(rank: int, device: torch.device) -> None:
    """Models are made under them, and often trained, too. "meta" stands for any device that is not the model's."""
    for dtype in (torch.float32, torch.bfloat16):
        found = []
        for default in (torch.float32, torch.bfloat16, torch.float64, torch.device("meta")):
            net = nn.Sequential(nn.Linear(40, 32), nn.Tanh(), nn.Linear(32, 40)).to(device, dtype)
            inputs = [torch.randn(8, 40, generator=torch.Generator().manual_seed(2 * n + rank)) for n in range(3)]
            torch.manual_seed(0)
            for one in net.parameters():
                nn.init.normal_(one, std=0.1)
            with _defaults(default):
                model = _wrapped(net, rank=RANK)
                for x in inputs:
                    model.zero_grad()
                    model(x.to(device, dtype)).square().sum().backward()
            state = model.bagua_ddp.state_dict()["algorithm"]
            memories = [*state["owed"].values(), *state["factors"].values()]
            assert [(one.dtype, one.device) for one in memories] == [(torch.float32, device)] * 4, default
            found.append([*_gradients(model).values(), *memories])
        for other in found[1:]:
            assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True)), dtype


@contextlib.contextmanager
def _defaults(default: torch.dtype | torch.device) -> Iterator[None]:
    if isinstance(default, torch.device):
        with default:
            yield
        return
    torch.set_default_dtype(default)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@on_ranks(2)
def test_a_rank_may_run_out_of_inputs(rank: int, device: torch.device) -> None:
    net = _net(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    model = DistributedDataParallel(net, optimizers=[optimizer], algorithm=Algorithm.init("powersgd", rank=1))
    with model.join():
        for step in range(2 + 3 * rank):
            optimizer.zero_grad()
            _loss(model, rank, step, device).backward()
            optimizer.step()
    check_ranks_equal(net)


@on_ranks(2)
def test_other_states_are_refused(rank: int, device: torch.device) -> None:
    state = _wrapped(_net(device), rank=2).bagua_ddp.state_dict()
    own = state["algorithm"].pop("rank")
    assert own == rank
    same = _wrapped(_net(device), rank=2).bagua_ddp
    same.load_state_dict(state)  # of an earlier version
    state["algorithm"]["rank"] = 1 - rank
    whose = f"that of rank {1 - rank} of 2, and this is rank {rank} of 2"
    message_of(ValueError, lambda: same.load_state_dict(state), whose)
    state["algorithm"]["rank"] = rank
    other = _wrapped(_net(device), rank=1).bagua_ddp
    message_of(ValueError, lambda: other.load_state_dict(state), "another rank than 1")
    state["algorithm"]["ranks"] = 3
    message_of(ValueError, lambda: other.load_state_dict(state), "one of 3 ranks, here are 2")


def test_the_rank_is_a_number() -> None:
    for rank in (0, 1.5, True):
        with pytest.raises(ValueError, match="must be a whole number of at least 1"):
            Algorithm.init("powersgd", rank=rank)
