"""Options that change nothing in combination with others are named once, in the log of rank 0; others are not."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from support.logged import told_of
from support.rank_tests import on_ranks
from support.training import TWO_NODES_OF_TWO, batches, loss_of, mlp, torch_ddp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import bagua.torch_api as bagua
from bagua.comm_hooks import ByteGradState, bytegrad, hierarchical_bytegrad
from bagua.fsdp import compress_communication
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer
from bagua.torch_api.sharded_replicas import exchange_shards


def wrap(net: nn.Module, name: str, **options: Any) -> None:
    if name == "qadam":
        qadam = QAdamOptimizer(net.parameters(), warmup_steps=2)
        bagua.with_bagua(net, [qadam], QAdamAlgorithm(qadam, **options))
        return
    bagua.with_bagua(net, [torch.optim.SGD(net.parameters(), lr=0.1)], Algorithm.init(name, **options))


@on_ranks(2)
def test_of_algorithms(rank: int, device: torch.device) -> None:
    def of(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> list[str]:
        lines = told_of(lambda: wrap(mlp(0, device).to(dtype), name, **options))
        assert rank == 0 or not lines
        return lines

    def of_hook(hook: Any) -> list[str]:
        def train() -> None:
            model = torch_ddp(mlp(0, device))
            model.register_comm_hook(ByteGradState(hierarchical=hook is hierarchical_bytegrad), hook)
            for batch in batches(rank, 2, device):
                loss_of(model, batch).backward()

        return told_of(train)

    between = "between nodes, and there is one: they are sent uncompressed. hierarchical=False compresses them"
    streaming = {"name": "streaming_diloco", "sync_every": 4}
    reason = "has no effect: parameters are float64, and it compresses bfloat16, float16, float32"
    for lines, expected in (
        (
            of("local_sgd", sync_every=2, warmup_codec="int4"),
            "warmup_codec='int4' has no effect without warmup_steps",
        ),
        (of(**streaming, alpha=1.0), "alpha=1 leaves each rank its own weights: exchanges have no effect on them"),
        (of(**streaming, codec="int4", dtype=torch.float64), f"codec='int4' {reason}"),
        (
            of("diloco", sync_every=2, warmup_steps=2, warmup_codec="int8", dtype=torch.float64),
            f"warmup_codec='int8' {reason}",
        ),
        (of("bytegrad", dtype=torch.float64), f"codec='int8' {reason}"),
        (
            of("decentralized", peer_selection_mode="shift_one"),
            "peer_selection_mode='shift_one' has no effect: with hierarchical=True nodes are paired",
        ),
        (of("gradient_allreduce", hierarchical=True), "hierarchical=True has no effect: there is one node"),
        (of("bytegrad"), f"hierarchical=True compresses gradients {between}"),
        (of("low_precision_decentralized"), f"hierarchical=True compresses weights {between}"),
        (of("qadam"), f"hierarchical=True compresses momenta {between}"),
        (of_hook(hierarchical_bytegrad), f"hierarchical=True compresses gradients {between}"),
    ):
        assert len(lines) == (rank == 0)
        assert all(line.startswith(expected) for line in lines), lines
    # The nearest with an effect.
    assert of(**streaming, alpha=0.99, codec="int4", dtype=torch.bfloat16) == []
    assert of("diloco", sync_every=2, warmup_steps=2, warmup_codec="int8", momentum_rounds=1) == []
    for name in ("bytegrad", "low_precision_decentralized", "qadam"):
        assert of(name, hierarchical=False) == []
    assert of_hook(bytegrad) == []
    assert of("gradient_allreduce") == []
    assert of("decentralized") == []
    assert of("decentralized", peer_selection_mode="shift_one", hierarchical=False) == []


@on_ranks(4, env=TWO_NODES_OF_TWO)
def test_of_several_nodes(device: torch.device) -> None:
    for name in ("gradient_allreduce", "bytegrad", "low_precision_decentralized"):
        assert told_of(partial(wrap, mlp(0, device), name, hierarchical=True)) == [], name


@on_ranks(2)
def test_of_exchanged_shards(rank: int, device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (2, 1), mesh_dim_names=("replicate", "shard"))
    for options, count in (({"warmup_codec": "int4"}, 1), ({}, 0)):
        model = nn.Sequential(nn.Linear(4, 4)).to(device)
        fully_shard(model, mesh=mesh["shard"])
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
        algorithm = Algorithm.init("local_sgd", sync_every=2, **options)
        group = mesh.get_group("replicate")
        lines = told_of(partial(exchange_shards, model, optimizers, algorithm, group))
        assert len(lines) == (count if rank == 0 else 0)
        assert all("exchange_shards: warmup_codec='int4' has no effect" in line for line in lines)


@on_ranks(2)
def test_of_compressed_communication(rank: int, device: torch.device) -> None:
    def of(policy: MixedPrecisionPolicy | None = None, replicas: int = 0, **options: Any) -> list[str]:
        names = ("replicate", "shard") if replicas else ("shard",)
        shape = (replicas, 2 // replicas) if replicas else (2,)
        model = nn.Sequential(nn.Linear(4, 4)).to(device)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        fully_shard(model, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
        lines = told_of(lambda: compress_communication(model, **options))
        assert rank == 0 or not lines
        return lines

    short = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for lines, expected in (
        (of(weights="int8", exact_weights_every=1), "weights='int8' has no effect: with exact_weights_every=1 all"),
        (of(policy=short, gradients="bf16"), "gradients='bf16' saves nothing: they are reduced in bfloat16"),
        (
            of(policy=short, gradients=None, weights="bf16"),
            "weights='bf16' saves nothing: they are gathered in bfloat16",
        ),
        (of(replicas=1), "gradients='int8' has no effect: without compress_shard they are compressed between replicas"),
    ):
        assert len(lines) == (rank == 0)
        assert all(line.startswith(f"compress_communication: {expected}") for line in lines), lines
    rounds = "weights='int4' without weight_differences rounds whole weights to 4 bits"
    assert sum(rounds in line for line in of(weights="int4")) == (rank == 0)
    assert not any(rounds in line for line in of(gradients="int4", weights="int8"))
    # The nearest with an effect.
    assert of(gradients="bf16", weights="bf16", exact_weights_every=2) == []
    assert of(policy=short, weights="int8") == []
    assert of(replicas=1, compress_shard=True) == []
    assert of(replicas=2) == []
    on_cpus = [f"compress_communication: {name} is not compiled for CPUs" for name in ("fp8_e4m3", "int4")]
    lines = of(gradients="int4", weights="fp8_e4m3")
    expected_lines = on_cpus if rank == 0 and device.type == "cpu" else []
    assert [line.partition(",")[0] for line in lines] == expected_lines
