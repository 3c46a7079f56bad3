"""Buffers that are registered, replaced and deleted after a module was wrapped are broadcast, as by torch's DDP."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.training import NormNet, batches, begin, check_tensor_on_ranks, message_of, mlp, torch_ddp
from torch import Tensor, nn

from bagua.replicas.buffer_broadcast import ModuleBuffers
from bagua.torch_api.data_parallel import DistributedDataParallel


def _plain(size: int = 2) -> nn.Module:
    return nn.BatchNorm1d(size, affine=False)


class _Net(NormNet):
    def __init__(self) -> None:
        super().__init__()
        self.extras = nn.ModuleList([nn.Module(), nn.Module()])
        self.extras[0].register_buffer("moved", torch.zeros(2))
        self.register_buffer("none", None)
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("table", torch.zeros(2, 3))
        self.aside = _plain()
        self.twin = nn.Module()
        self.twin.register_buffer("table", self.table)


def _reset(net: Any) -> None:
    net._buffers["table"] = torch.zeros(2, 3)


def _move(net: Any) -> None:
    """The same entries in the same order, but of another module."""
    moved = net.extras[0].moved
    del net.extras[0].moved
    net.extras[1].register_buffer("moved", moved)


def _script(net: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        net.extras.append(torch.jit.script(_plain()))  # type: ignore[no-untyped-call]


def _reload(net: Any) -> None:
    net.__setstate__({**net.__dict__, "_buffers": dict(net._buffers, loaded=torch.zeros(2))})


CHANGES: dict[str, Callable[[Any], Any]] = {
    "registered": lambda net: net.register_buffer("mean", torch.zeros(3)),
    "not persistent, of integers": lambda net: net.register_buffer("count", torch.tensor(0), persistent=False),
    "None no more": lambda net: setattr(net, "none", torch.zeros(3, dtype=torch.float64)),
    "not empty any more": lambda net: setattr(net, "empty", torch.zeros(3)),
    "another length": lambda net: setattr(net, "table", torch.zeros(5)),
    "another dtype": lambda net: setattr(net, "table", net.table.double()),
    "other data": lambda net: setattr(net.table, "data", torch.ones(4, dtype=torch.int32)),
    "smaller in place": lambda net: net.table.resize_(2),
    "larger in place": lambda net: net.table.resize_(4096),
    "deleted": lambda net: delattr(net, "table"),
    "moved": _move,
    "of new dicts": _reload,
    "in the dict": lambda net: net._buffers.update(direct=torch.zeros(2)),
    "another module": lambda net: setattr(net, "aside", _plain(3)),
    "appended": lambda net: net.extras.append(nn.Sequential(_plain())),
    "reordered": lambda net: net._modules.update(extras=net._modules.pop("extras")),
    "lazy": lambda net: (net.extras.append(nn.LazyBatchNorm1d(affine=False)), net.extras[-1](torch.zeros(2, 5))),
    "shared": lambda net: net.twin.register_buffer("again", net.norm.running_var),
    "scripted": _script,
    "converted": lambda net: net.extras.double(),
    "of a whole module": lambda net: net.twin._buffers.clear(),
}


@on_ranks(2)
def test_changed_buffers_are_broadcast(rank: int, device: torch.device) -> None:
    names = list(CHANGES)
    torch.manual_seed(0)
    ours: Any = DistributedDataParallel(_Net().to(device))
    theirs: Any = torch_ddp(_Net().to(device))
    for name in names:
        for model in (ours, theirs):
            _reset(model.module.to(device))
            model.train()(batches(rank, 1, device)[0][0]).sum().backward()
            CHANGES[name](model.module)
            model.module.to(device)
            for _ in range(2):  # on GPUs, a new buffer comes with the second
                model.train()(batches(rank, 1, device)[0][0]).sum().backward()
                for buffer in model.module.buffers():
                    buffer.data.fill_(1 + rank)
                with torch.inference_mode():  # what is made here is used in later passes
                    model.eval()(batches(rank, 1, device)[0][0])
        found = dict(ours.module.named_buffers())
        assert list(found) == [key for key, _ in theirs.module.named_buffers()], name
        for key, theirs_ in theirs.module.named_buffers():
            assert torch.equal(found[key], theirs_), (name, key)
            check_tensor_on_ranks(found[key], f"{name}: {key}")
            assert found[key].eq(1).all(), (name, key, "rank 0's")


def test_what_changes_is_found() -> None:
    """Against torch's walk through all modules, after each change and in turns."""
    net: Any = _Net()
    buffers = ModuleBuffers(net, ["norm.running_var"])

    def expected() -> list[tuple[str, Tensor]]:
        return [(name, one) for name, one in net.named_buffers() if name != "norm.running_var"]

    for change in CHANGES.values():
        _reset(net)
        change(net)
        for _ in range(2):
            found = buffers.named()
            assert buffers.named() is found
            assert [name for name, _ in found] == [name for name, _ in expected()]
            assert all(one is other for (_, one), (_, other) in zip(found, expected(), strict=True))
    net.extras = nn.ModuleList()
    for module in net.modules():
        module._buffers.clear()
    assert buffers.named() == []


def _different(case: str) -> list[str]:
    rank, device = begin()
    model: Any = DistributedDataParallel(_Net().to(device))
    net = model.module
    model.forward_buffers.run(0)
    changed = {
        "on rank 0": (lambda: net.register_buffer("mean", torch.zeros(3, device=device))) if rank == 0 else None,
        "length": lambda: net.register_buffer("mean", torch.zeros(3 + rank, device=device)),
        "dtype": lambda: net.register_buffer(
            "mean", torch.zeros(2, device=device).to([torch.int32, torch.float][rank])
        ),
        "name": lambda: net.register_buffer(f"mean_of_{rank}", torch.zeros(3, device=device)),
        "on rank 1": (lambda: net.register_buffer("mean", torch.zeros(3, device=device))) if rank == 1 else None,
    }[case]
    if changed is not None:
        changed()
    messages = []
    for _ in range(1 if device.type == "cpu" else 2):
        try:
            model.forward_buffers.run(0)
        except RuntimeError as error:
            messages.append(str(error))
            break
    return messages


@pytest.mark.parametrize("case", ["on rank 0", "length", "dtype", "name", "on rank 1"])
def test_ranks_with_other_buffers_are_told_which(case: str) -> None:
    told = run_ranks(2, _different, case)
    mine = "mean_of_0" if case == "name" else "mean"
    if case == "on rank 1":
        assert told[0] == []  # the others notice that it is gone
        assert "rank 1 has 'mean' (float32 [3]" in told[1][0]
    else:
        assert told[0] == told[1]
        assert "The ranks have different buffers. At position" in told[0][0]
        assert f"rank 0 has {mine!r}" in told[0][0]
        assert "rank 1 has" in told[0][0]


@on_ranks(2)
def test_what_torch_leaves_alone(rank: int, device: torch.device) -> None:
    """As by torch: a module that had no buffers when it was wrapped; and ranks that do not use what they have."""
    warnings.simplefilter("ignore", FutureWarning)  # of torch's own argument
    for wrap in (DistributedDataParallel, torch_ddp):
        for net, options in ((mlp(rank, device), {}), (_Net().to(device), {"broadcast_buffers": False})):
            model: Any = wrap(copy.deepcopy(net), **options)
            model.module.register_buffer("mean", torch.full((1,), float(rank), device=device))
            for _ in range(3):
                model(batches(rank, 1, device)[0][0]).sum().backward()
            assert model.module.mean.item() == rank
    ignoring: Any = _Net().to(device)
    ignoring._ddp_params_and_buffers_to_ignore = ["mean"]
    ignoring.register_buffer("mean", None)
    model = DistributedDataParallel(ignoring)
    ignoring.mean = torch.full((1 + rank,), float(rank), device=device)
    for _ in range(3):
        model(batches(rank, 1, device)[0][0]).sum().backward()
    assert ignoring.mean.eq(rank).all()
    ignoring.table = torch.zeros(3, device=device).expand(2, 3)
    assert "buffer 'table' cannot be broadcast: it is expanded" in message_of(
        ValueError, lambda: model(batches(rank, 1, device)[0][0])
    )
