"""Two ranks that use the core of Bagua, and train with it, in processes where bagua.legacy cannot be imported.

    python core_alone.py FOLDER

They are forked once everything is imported, and share the folder, which is empty. bagua.torch_api and bagua.distributed
import bagua.legacy to install it, which fails here; then their modules are imported without what the packages
themselves do.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import signal
import sys
import traceback
import types
from pathlib import Path
from typing import Any

import pytest

RANKS = 2
STEPS = 3


class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith("bagua.legacy"):
            raise ImportError(f"{name} is blocked")


def forget_the_package(name: str) -> None:
    """`name` is importable as a package that does nothing, after its own import has failed loudly."""
    with pytest.raises(ImportError, match=r"bagua\.legacy is blocked"):
        importlib.import_module(name)
    spec = importlib.util.find_spec(name)
    assert spec is not None
    empty = types.ModuleType(name)
    empty.__path__ = list(spec.submodule_search_locations or ())
    sys.modules[name] = empty


sys.meta_path.insert(0, Blocked())
for package in ("bagua.torch_api", "bagua.distributed"):
    forget_the_package(package)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from bagua import comm_hooks  # noqa: E402
from bagua.distributed import launch, run  # noqa: E402
from bagua.torch_api import communication  # noqa: E402
from bagua.torch_api.algorithms import GlobalAlgorithmRegistry, q_adam  # noqa: E402
from bagua.torch_api.algorithms.base import resolve_algorithm  # noqa: E402
from bagua.torch_api.checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from bagua.torch_api.contrib import fuse_optimizer  # noqa: E402
from bagua.torch_api.data_parallel import DistributedDataParallel  # noqa: E402
from bagua.torch_api.distributed import BaguaModule  # noqa: E402
from bagua.torch_api.model_parallel.moe import MoE  # noqa: E402
from bagua.torch_api.wrapping import with_bagua  # noqa: E402


def make_net() -> nn.Module:
    torch.manual_seed(dist.get_rank())  # other weights on each rank, until they are broadcast
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(RANKS * seed + dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        net(torch.randn(5, 4, generator=generator)).square().mean().backward()
        optimizer.step()


def weights_of(net: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


def check_equal(net: nn.Module) -> None:
    mine = weights_of(net)
    every = torch.empty(RANKS * mine.numel())
    communication.allgather(mine, every)
    assert torch.equal(every[: mine.numel()], every[mine.numel() :])
    assert every.isfinite().all()


def train_with(name: str) -> None:
    """with_bagua; replicas that an algorithm keeps equal are equal after it."""
    net = make_net()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if name == "qadam":
        optimizer = q_adam.QAdamOptimizer(net.parameters(), lr=0.01, warmup_steps=2)
    options = {"sync_every": 2} if name in ("local_sgd", "diloco", "streaming_diloco") else {}
    with_bagua(net, [optimizer], resolve_algorithm(name, [optimizer], **options))
    before = weights_of(net)
    train(net, optimizer)
    assert not torch.equal(before, weights_of(net)), name
    algorithm: Any = net.bagua_algorithm
    if name == "async":
        algorithm.abort(net)
    if algorithm.keeps_replicas_equal:
        check_equal(net)
    engine: Any = net.bagua_ddp
    engine.detach()


def train_wrapped(folder: Path) -> None:
    """The wrapper, and a checkpoint of it that another one goes on from."""
    nets = [DistributedDataParallel(make_net(), algorithm="gradient_allreduce") for _ in range(2)]
    first, second = nets
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in nets]
    train(first, optimizers[0])
    check_equal(first)
    save_checkpoint(7, str(folder), first, optimizers[0])
    assert load_checkpoint(str(folder), second, optimizers[1]) == 7
    for net, optimizer in zip(nets, optimizers, strict=True):
        train(net, optimizer, seed=1)
    assert torch.equal(weights_of(first), weights_of(second))


def train_around() -> None:
    """torch's own wrapper with a hook, a fused optimizer, and a layer of experts."""
    hooked = nn.parallel.DistributedDataParallel(make_net())
    hooked.register_comm_hook(None, comm_hooks.bytegrad)
    optimizer: Any = fuse_optimizer(torch.optim.SGD(hooked.parameters(), lr=0.1), do_flatten=True)
    train(hooked, optimizer)
    check_equal(hooked)
    layer = MoE(4, nn.Linear(4, 4))
    output, *_ = layer(torch.randn(8, 4))
    output.sum().backward()


def main(rank: int, folder: Path) -> None:
    communication.init_process_group(dist.FileStore(str(folder / "store"), RANKS), rank, RANKS, RANKS)
    values = torch.full((3,), rank + 1.0)
    communication.allreduce_inplace(values)
    assert values.tolist() == [3, 3, 3]
    assert communication.broadcast_object(rank, 1) == 1
    for name in GlobalAlgorithmRegistry.available_algorithms():
        train_with(name)
    train_wrapped(folder / "checkpoints")
    train_around()
    options = launch.make_parser().parse_args(["--default_bucket_size", "4M", "train.py"])
    assert launch.variables(options) == {"NODE_RANK": "0", "BAGUA_DEFAULT_BUCKET_SIZE": "4M"}
    assert run.make_bagua_parser().parse_args([]).enable_bagua_net is False
    assert nn.Module.with_bagua is BaguaModule.with_bagua  # type: ignore[attr-defined]
    assert not hasattr(torch.Tensor, "ensure_bagua_tensor")
    assert not [name for name in sys.modules if name.startswith("bagua.legacy")]
    dist.destroy_process_group()


def start_rank(rank: int, folder: Path) -> int:
    if child := os.fork():
        return child
    status = 1
    try:
        main(rank, folder)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    children = [start_rank(rank, Path(sys.argv[1])) for rank in range(RANKS)]
    # The first that fails ends the program, and the other with it: a rank must not wait for one that is gone.
    while children:
        child, failed = os.wait()
        children.remove(child)
        if failed:
            for other in children:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)
