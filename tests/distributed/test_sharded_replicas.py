"""Local steps between replicas that FSDP2 shards, compared with those of whole replicas."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.local_steps import RATE, model_of
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.training import begin, message_of
from support.weight_exchanges import MOMENTUM, Case, Chain, backward, by_hand
from support.weight_exchanges import RATE as RATE_BY_HAND
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module

from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.sharded_replicas import exchange_shards

STEPS = 8

CASES: list[Case] = [
    ("local_sgd", {"sync_every": 3}),
    ("diloco", {"sync_every": 2}),
    ("streaming_diloco", {"sync_every": 3, "fragments": 1, "delay": 1, "alpha": 0.25}),
]


def _sharded(device: torch.device, mesh: Any, seed: int) -> tuple[Any, list[torch.optim.Optimizer]]:
    """Two optimizers, and layers of 5 and 1 rows, which two ranks share unevenly."""
    model: Any = model_of(seed).to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    parameters = list(model.parameters())
    return model, [torch.optim.SGD(parameters[:2], lr=RATE), torch.optim.SGD(parameters[2:], lr=RATE)]


def _chain(device: torch.device, mesh: Any, seed: int) -> tuple[Any, list[torch.optim.Optimizer]]:
    """Likewise, as the loops by hand have it, but for the weights."""
    model: Any = Chain().to(device)
    nn.init.constant_(model.last.weight, seed)
    for layer in model.children():
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    parameters = list(model.parameters())
    return model, [torch.optim.SGD(part, RATE_BY_HAND, MOMENTUM) for part in (parameters[:2], parameters[2:])]


def _step(model: Any, optimizers: list[torch.optim.Optimizer], number: int, replica: int) -> None:
    model.zero_grad()
    backward(model, number, replica, "plain")
    for optimizer in optimizers:
        optimizer.step()


def _weights(model: Any) -> list[torch.Tensor]:
    return [parameter.detach().full_tensor().cpu() for parameter in model.parameters()]


def _two_replicas_of_two(folder: str) -> None:
    rank, device = begin()
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    replica = mesh.get_local_rank("replicate")
    replicas = mesh.get_group("replicate")
    for name, options in CASES:
        algorithm, interval = Algorithm.init(name, **options), options["sync_every"]
        model, optimizers = _chain(device, mesh, seed=replica)
        hand: Any = by_hand((name, options), 2, torch.float32, None)
        for net in hand.nets:
            nn.init.constant_(net.last.weight, 0)
        if hand.outer_optimizers:
            nn.init.constant_(hand.outer["last.weight"], 0)
        hand.fragments = [[*hand.weights[0]]]
        exchange = exchange_shards(model, optimizers, algorithm, replicas)
        path = Path(folder, f"{name}.{rank}")
        for number in range(STEPS):
            if number == 5:
                states = (model.state_dict(), [one.state_dict() for one in optimizers], exchange.state_dict())
                saved = copy.deepcopy([{k: v.to_local() for k, v in states[0].items()}, *states[1:]])
                torch.save(saved, path)
            _step(model, optimizers, number, replica)
            hand.turn(number, [[*hand.weights[0]]] * 2, "plain")
            for mine, theirs in zip(_weights(model), hand.nets[replica].parameters(), strict=True):
                assert torch.allclose(mine, theirs, atol=2e-6), f"{name}, step {number}"
        assert exchange.rounds == exchange.stats().steps == hand.rounds == STEPS // interval

        # A training that was saved goes on bit for bit.
        resumed, others = _chain(device, mesh, seed=rank + 9)
        going_on = exchange_shards(resumed, others, algorithm, replicas)
        dist.barrier()
        weights, of_optimizers, rounds = torch.load(path, weights_only=True, map_location=device)
        # Those of two ranks: of the same replica with other shards, and of the other replica with the same shards.
        other, same = (torch.load(path.with_suffix(f".{rank ^ bit}"), weights_only=True)[2] for bit in (1, 2))
        told = message_of(ValueError, functools.partial(going_on.load_state_dict, other))
        assert f"that of rank {1 - rank % 2} of 2, and this is rank {rank % 2} of 2" in told
        going_on.load_state_dict({key: one for key, one in rounds.items() if key not in ("rank", "ranks")})
        with torch.no_grad():
            for key, parameter in resumed.named_parameters():
                parameter.to_local().copy_(weights[key])
        for one, state in zip(others, of_optimizers, strict=True):
            one.load_state_dict(state)
        going_on.load_state_dict(rounds)
        going_on.load_state_dict(same)
        for number in range(5, STEPS):
            _step(resumed, others, number, replica)
        assert all(torch.equal(one, other) for one, other in zip(_weights(model), _weights(resumed), strict=True)), name

        # After the end, replicas train alone.
        exchange.remove()
        for number in range(interval):
            _step(model, optimizers, number, replica)
        first = _weights(model)[0].to(device)
        found = [torch.empty_like(first) for _ in range(2)]
        dist.all_gather(found, first, group=replicas)
        assert not torch.equal(*found)
        exchange_shards(model, optimizers, algorithm, replicas).remove()  # may begin again

    model, optimizers = _sharded(device, mesh, seed=0)

    def refused(error: type[Exception], what: Any, algorithm: Algorithm, given: Any = None) -> str:
        return message_of(error, lambda: exchange_shards(what, given or optimizers, algorithm, replicas))

    diloco = Algorithm.init("diloco", sync_every=2)
    assert "bytegrad, which does not exchange shards" in refused(TypeError, model, Algorithm.init("bytegrad"))
    warm = Algorithm.init("diloco", sync_every=2, warmup_steps=1)
    assert "warmup_steps=1: FSDP makes the gradients" in refused(ValueError, model, warm)
    by_speed = Algorithm.init("diloco", sync_every=2, shares="auto")
    assert "ranks that hold shards of a replica cannot agree on steps" in refused(ValueError, model, by_speed)
    assert "'0.weight' is not sharded" in refused(ValueError, model_of(0).to(device), diloco)
    assert "2 of 6 parameters are in no optimizer" in refused(RuntimeError, model, diloco, optimizers[1:])
    other = Algorithm.init("diloco", sync_every=2 + replica)
    told = refused(ValueError, model, other)
    assert f"rank {rank} has sync_every={2 + replica}, rank " in told
    assert f"has sync_every={3 - replica}." in told
    within = Algorithm.init("diloco", sync_every=2 + (rank == 0))
    assert "rank 0" in refused(ValueError, model, within), "shards of one replica"
    shards = mesh.get_group("shard")
    told = message_of(ValueError, lambda: exchange_shards(model, optimizers, diloco, shards))
    members = [2 * replica, 2 * replica + 1]
    assert f"a mesh of ranks {members}, and replicas has ranks {members}" in told
    hybrid = nn.Linear(4, 4, device=device)
    fully_shard(hybrid, mesh=mesh)
    assert f"a mesh of ranks [0, 1, 2, 3], and replicas has ranks {[rank % 2, rank % 2 + 2]}" in refused(
        ValueError, hybrid, diloco
    )
    exchange_shards(model, optimizers, diloco, replicas)
    assert "is exchanged already" in refused(ValueError, model, diloco)


class _Delegating(torch.optim.Optimizer):
    """As wrappers of precision are: listed itself, and another one makes the steps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@on_ranks(2)
def test_shards_that_change_after_the_call(rank: int, device: torch.device) -> None:
    """Two replicas of one shard each, whose shards change between two steps."""
    mesh = init_device_mesh(device.type, (2, 1), mesh_dim_names=("replicate", "shard"))
    replicas = mesh.get_group("replicate")
    diloco = Algorithm.init("diloco", sync_every=2)

    def make(seed: int = 0, frozen: bool = False) -> Any:
        torch.manual_seed(seed)
        model: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)
        model[0].requires_grad_(not frozen)
        for part in (model[0], model[2]):
            fully_shard(part, mesh=mesh["shard"])
        return fully_shard(model, mesh=mesh["shard"], reshard_after_forward=False)

    def train(model: Any, optimizer: Any, steps: int, between: Any = None) -> None:
        dtype = next(model.parameters()).dtype
        for number in range(steps):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * number + rank)
            inputs = torch.randn(8, 8, generator=generator).to(device, dtype)
            model(inputs).square().mean().backward()
            if between is not None:
                between(inputs)
            optimizer.step()

    def are_alike(model: Any) -> bool:
        mine = torch.cat([one.full_tensor().detach().flatten().float() for one in model.parameters()])
        found = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(found, mine, group=replicas)
        return torch.equal(*found)

    # Frozen at first, from other seeds: broadcast, unfrozen, frozen again, loaded and converted.
    model = make(seed=rank, frozen=True)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    exchange = exchange_shards(model, [optimizer], diloco, replicas)
    assert are_alike(model)
    train(model, optimizer, 3)
    assert (exchange.rounds, are_alike(model)) == (1, False)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    before = model[0].weight.full_tensor().clone()
    train(model, optimizer, 1)
    assert (exchange.rounds, are_alike(model)) == (2, True)
    assert not torch.equal(before, model[0].weight.full_tensor())
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    del optimizer.param_groups[1:]
    train(model, optimizer, 2)
    assert (exchange.rounds, are_alike(model)) == (3, True)
    # Trained, and frozen before the round ends.
    train(model, optimizer, 1)
    model[0].requires_grad_(False)
    train(model, optimizer, 1)
    assert (exchange.rounds, are_alike(model)) == (4, True)
    # The state covers what is frozen now, in a program that has never trained it.
    saved = copy.deepcopy(exchange.state_dict())
    resumed = make(frozen=True)
    going_on = exchange_shards(resumed, [torch.optim.SGD(resumed.parameters(), lr=0.1)], diloco, replicas)
    going_on.load_state_dict(saved)
    assert going_on.state_dict()["names"] == saved["names"]
    assert going_on.rounds == 4
    going_on.remove()
    model[0].requires_grad_(True)

    # A forward pass leaves gathered weights in the module, which are no change.
    train(model, optimizer, 2, between=torch.no_grad()(model))
    assert (exchange.rounds, are_alike(model)) == (5, True)
    exchange.remove()

    # Converted; by torch only before the first forward pass.
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = exchange_shards(model, [optimizer], diloco, replicas)
    model.bfloat16()
    optimizer.param_groups[0]["params"] = list(model.parameters())
    train(model, optimizer, 2)
    assert (exchange.rounds, are_alike(model)) == (1, True)
    exchange.remove()

    # Parameters, and not objects, are exchanged once.
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = exchange_shards(model[2], [optimizer], diloco, replicas)
    for other in (model, torch.compile(model)):
        told = message_of(ValueError, lambda other=other: exchange_shards(other, [optimizer], diloco, replicas))
        assert "2.weight' of this" in told
        assert "is exchanged already, as 'weight' of a FSDPLinear" in told
    exchange.remove()

    # An optimizer that is not listed.
    listed = _Delegating(optimizer)
    exchange = exchange_shards(model, [listed], diloco, replicas)
    train(model, listed, 4)
    assert exchange.rounds == 2
    told = message_of(RuntimeError, lambda: train(model, torch.optim.Adam(model.parameters()), 2))
    assert "an optimizer that it was not given, Adam, steps parameters of FSDPSequential" in told


@on_ranks(4)
def test_tensor_parallel_replicas(rank: int, device: torch.device) -> None:
    """Norms are replicated over the dimension of tensor parallelism, which says nothing of replicas of the model."""
    mesh = init_device_mesh(device.type, (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model: Any = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4)).to(device)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=Shard(1)), "1": SequenceParallel()})
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(rank)
    algorithm = Algorithm.init("local_sgd", sync_every=1)
    exchange_shards(model, [optimizer], algorithm, mesh.get_group("replicate"))
    assert any(placement.is_replicate() for placement in model[1].weight.placements)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(mesh.get_local_rank("replicate")))
    optimizer.step()
    for parameter in model.parameters():  # from the first replica: this rank's number in it
        assert torch.allclose(parameter.to_local(), torch.full_like(parameter.to_local(), rank % 2 - 0.05))


def test_two_replicas_of_two_shards(tmp_path: Path) -> None:
    run_ranks(4, _two_replicas_of_two, str(tmp_path))
