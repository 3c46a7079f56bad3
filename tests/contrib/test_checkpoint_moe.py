"""Checkpoints of mixtures of experts: a file per expert, for any number of ranks that divides the experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.training import begin, message_of
from torch import Tensor, nn

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.checkpoint import async_save_checkpoint, load_checkpoint, save_checkpoint
from bagua.torch_api.model_parallel.moe import MoE

EXPERTS = 4
HIDDEN = 3


class Net(nn.Module):
    """Experts, and parameters before and behind them in the optimizer's order."""

    def __init__(self, local: int) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.mixture = MoE(HIDDEN, nn.Linear(HIDDEN, HIDDEN), num_local_experts=local, k=2)
        self.last = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.mixture(self.first(x))[0])


def _made(experts: int = EXPERTS, seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    rank, device = begin()
    torch.manual_seed(seed)
    net = Net(experts // bagua.get_world_size()).to(device)
    torch.manual_seed(10 + rank + seed)
    for parameter in net.mixture.bagua_moe.experts.parameters():
        nn.init.normal_(parameter)
    first = [net.first.bias, net.last.bias]
    rest = [parameter for parameter in net.parameters() if all(parameter is not one for one in first)]
    return net, torch.optim.Adam([{"params": first, "lr": 0.02}, {"params": rest}], lr=0.01)


def _train(net: Net, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        torch.manual_seed(100 * bagua.get_rank() + seed)
        optimizer.zero_grad()
        net(torch.randn(16, HIDDEN, device=net.first.weight.device)).square().mean().backward()
        optimizer.step()


def _states(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, list[Tensor]]:
    """Each parameter with its momenta, under global names."""
    found = {}
    local = len(net.mixture.bagua_moe.experts.bagua_experts)  # type: ignore[union-attr, arg-type]
    for name, parameter in net.named_parameters():
        head, mark, tail = name.partition("bagua_experts.")
        if mark:
            number, _, tail = tail.partition(".")
            name = f"{head}{bagua.get_rank() * local + int(number)}.{tail}"
        state = optimizer.state[parameter]
        found[name] = [value.detach().cpu() for value in (parameter, state["exp_avg"], state["exp_avg_sq"])]
    return found


def _save(path: str) -> dict[str, list[Tensor]]:
    net, optimizer = _made()
    net.with_bagua([optimizer], GradientAllReduceAlgorithm())  # type: ignore[operator]
    _train(net, optimizer, range(3))
    pending = async_save_checkpoint(3, path, net, optimizer)
    expected = _states(net, optimizer)
    expected = {name: [value.clone() for value in values] for name, values in expected.items()}
    _train(net, optimizer, range(3, 5))
    pending.wait()
    after = net.mixture.bagua_moe.experts.state_dict()
    # On as many ranks, training goes on bit for bit.
    net, optimizer = _made(seed=50)
    net.with_bagua([optimizer], GradientAllReduceAlgorithm())  # type: ignore[operator]
    assert load_checkpoint(path, net, optimizer) == 3
    _train(net, optimizer, range(3, 5))
    for name, value in net.mixture.bagua_moe.experts.state_dict().items():
        assert torch.equal(value, after[name]), name
    return expected


def _load(path: str, is_wrapped_first: bool) -> dict[str, list[Tensor]]:
    net, optimizer = _made(seed=50)
    if is_wrapped_first:
        net.with_bagua([optimizer], GradientAllReduceAlgorithm())  # type: ignore[operator]
    assert load_checkpoint(path, net, optimizer) == 3
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.01]
    if not is_wrapped_first:
        net.with_bagua([optimizer], GradientAllReduceAlgorithm())  # type: ignore[operator]
    found = _states(net, optimizer)
    found = {name: [value.clone() for value in values] for name, values in found.items()}
    _train(net, optimizer, range(1))
    return found


def _refused(path: str) -> str:
    net, optimizer = _made(experts=3)
    return message_of(RuntimeError, lambda: load_checkpoint(path, net, optimizer))


def test_experts_go_where_they_belong(tmp_path: Path) -> None:
    path = str(tmp_path)
    saved = run_ranks(2, _save, path, reuse=True)
    assert sorted(one.name for one in (tmp_path / "iter_0000003").iterdir()) == [
        *(f"expert_{number}_mp_rank_00_model_states.pt" for number in range(EXPERTS)),
        *(f"expert_parallel_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)),
        "mp_rank_00_model_states.pt",
    ]
    main = torch.load(tmp_path / "iter_0000003" / "mp_rank_00_model_states.pt")
    assert not [name for name in main["model"] if "bagua_experts" in name]
    assert "optimizer" not in main
    expert = torch.load(tmp_path / "iter_0000003" / "expert_3_mp_rank_00_model_states.pt")
    assert list(expert) == [f"mixture.bagua_moe.experts.bagua_experts.3.{name}" for name in ("weight", "bias")]

    expected = {**saved[0], **saved[1]}
    for size, is_wrapped_first in ((1, False), (4, True)):
        loaded: dict[str, list[Tensor]] = {}
        for one in run_ranks(size, _load, path, is_wrapped_first, reuse=True):
            loaded |= one
        assert loaded.keys() == expected.keys()
        for name, values in loaded.items():
            for value, other in zip(values, expected[name], strict=True):
                assert torch.equal(value, other), f"{name} on {size} ranks"
    told = run_ranks(3, _refused, path, reuse=True)[2]
    assert "'mixture.bagua_moe.experts.bagua_experts.': 4}" in told, told
    assert "change num_local_experts" in told


@on_ranks(1)
def test_a_mixture_that_is_the_whole_model(tmp_path: Path) -> None:
    path = str(tmp_path)
    layer: Any = MoE(HIDDEN, nn.Linear(HIDDEN, HIDDEN), num_local_experts=EXPERTS)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    save_checkpoint(1, path, layer)  # whose names begin with those of the experts
    assert Path(path, "iter_0000001/expert_3_mp_rank_00_model_states.pt").exists()
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    assert load_checkpoint(path, layer) == 1
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    optimizer = torch.optim.SGD(layer.parameters())
    assert "saved without optimizer" in message_of(RuntimeError, lambda: load_checkpoint(path, layer, optimizer))
    assert load_checkpoint(path, layer, optimizer, strict=False) == 1
