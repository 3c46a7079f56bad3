"""Checkpoints of models that are compiled, in other wrappers, or in other modules: all that trains is saved, under
names that do not depend on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.training import batches, mlp, momentum
from torch import Tensor, nn

from bagua.contrib.checkpoint import durable_files
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.checkpoint import load_checkpoint, save_checkpoint
from bagua.torch_api.data_parallel import DistributedDataParallel


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")  # nothing is compiled before the first call


def _algorithm() -> Algorithm:
    return Algorithm.init("low_precision_decentralized", hierarchical=False)


def _with_bagua(net: Any) -> Any:
    return net.with_bagua([momentum(net)], _algorithm())


def _parallel(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net, optimizers=[momentum(net)], algorithm=_algorithm())


def _with_compiled_child(net: Any) -> Any:
    net[0] = _compiled(net[0])
    return _with_bagua(net)


def _with_parallel_child(net: Any) -> nn.Module:
    return nn.ModuleDict({"net": _compiled(_parallel(net)), "head": nn.Linear(2, 2)})


def _compiled_in_place(net: Any) -> Any:
    net.compile(backend="eager")
    return _with_bagua(net)


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "compiled": lambda net: _compiled(_with_bagua(net)),
    "compiled first": lambda net: _with_bagua(_compiled(net)),
    "compiled in place": _compiled_in_place,
    "parallel": _parallel,
    "parallel of compiled": lambda net: _parallel(_compiled(net)),
    "compiled parallel": lambda net: _compiled(_parallel(net)),
    "compiled child": _with_compiled_child,
    "in another module": lambda net: nn.ModuleDict({"net": _with_bagua(net), "head": nn.Linear(2, 2)}),
    "parallel in another module": _with_parallel_child,
    "two of them": lambda net: nn.ModuleList([_with_bagua(net), _with_bagua(nn.Linear(2, 2).to(net[0].weight))]),
    "a part": lambda net: _with_bagua(net)[0],
}


def _engine(*models: nn.Module) -> Any:
    return next(one.__dict__["bagua_ddp"] for model in models for one in model.modules() if "bagua_ddp" in one.__dict__)


@on_ranks(2)
def test_what_trains_is_saved_whole(rank: int, device: torch.device, tmp_path: Path) -> None:
    folder = str(tmp_path)
    for name, wrap in WRAPPED.items():
        path = Path(folder, name)
        net = mlp(3, device)
        model = wrap(net)
        engine = _engine(net, model)
        for inputs, _ in batches(rank, 3, device):
            engine.module(inputs).square().mean().backward()
            engine.bagua_optimizers[0].step()
        save_checkpoint(3, path, model)
        again = mlp(5, device)
        other = wrap(again)
        assert load_checkpoint(path, other) == 3
        for one, loaded in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, loaded), name
        if name != "a part":
            replicas = [
                torch.cat(one.state_dict()["algorithm"]["replicas"][0]) for one in (engine, _engine(again, other))
            ]
            assert torch.equal(*replicas), name
        first = next(iter(net.parameters())).detach().cpu()
        differ: list[Any] = [None, None]
        dist.all_gather_object(differ, first)
        assert not torch.equal(*differ), "or the test shows nothing"
        written = torch.load(path / "iter_0000003" / durable_files.MODEL_FILE, weights_only=True)["model"]
        assert not [key for key in written if "_orig_mod" in key or "module" in key], name


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."])
def test_names_of_older_files(tmp_path: Path, prefix: str) -> None:
    torch.manual_seed(0)
    saved = mlp(0, torch.device("cpu"))
    folder = durable_files.folder_of(tmp_path, 1)
    folder.mkdir()
    (tmp_path / durable_files.LATEST_FILE).write_text("1")
    state: dict[str, Tensor] = {f"{prefix}{name}": value for name, value in saved.state_dict().items()}
    torch.save({"iteration": 1, "model": state}, folder / durable_files.MODEL_FILE)
    child = mlp(1, torch.device("cpu"))
    child[0] = _compiled(child[0])
    for model in (mlp(1, torch.device("cpu")), _compiled(mlp(1, torch.device("cpu"))), child):
        assert load_checkpoint(tmp_path, model) == 1
        assert all(map(torch.equal, model.parameters(), saved.parameters()))
