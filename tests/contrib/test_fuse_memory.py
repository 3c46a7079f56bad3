"""What fuse_optimizer() does with memory that is shared or laid out already, and the optimizers that it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch, whose optimizers are fused")
import torch
from torch import Tensor, nn, optim

from bagua.contrib.fuse.optimizer import calculate_mutual_groups, fuse_optimizer, fuse_step, is_fused_optimizer


def test_shared_memory_stays_shared() -> None:
    """Also such as is shared only later."""
    memory = torch.arange(8.0)
    first, second, third = nn.Parameter(memory[:4]), nn.Parameter(memory[2:6]), nn.Parameter(torch.ones(3))
    optimizer = fuse_optimizer(optim.SGD([first, second, third], lr=1.0))
    for one in (first, second, third):
        one.grad = torch.ones_like(one)
    expected = memory.clone()
    expected[:4] -= 1
    expected[2:6] -= 1
    optimizer.fuse_step()
    assert torch.equal(memory, expected)
    first, second, third = (nn.Parameter(torch.arange(4.0)) for _ in range(3))
    optimizer = fuse_optimizer(optim.SGD([first, second, third], lr=1.0))
    for _ in range(2):
        first.data = second.data
        expected = second.detach() - 2
        for one in (first, second, third):
            one.grad = torch.ones_like(one)
        optimizer.fuse_step()
        assert torch.equal(first, expected)
        assert torch.equal(second, expected)


def test_sparse_gradients_are_stepped_alone() -> None:
    models = [nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    first, second = (optim.SGD(one.parameters(), lr=0.1) for one in models)
    fuse_optimizer(first)
    for _ in range(2):
        for model, optimizer in zip(models, (first, second), strict=True):
            optimizer.zero_grad()
            model(torch.tensor([1, 3])).square().sum().backward()
        first.fuse_step()
        second.step()
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    assert first._bagua_fused_count == 2


def test_found_layouts_are_used_and_others_left_alone() -> None:
    flats = [torch.randn(10) for _ in range(2)]
    gradients = [torch.randn(10) for _ in range(2)]
    # Begins at an offset, in another order than the group's.
    parameters = [nn.Parameter(flats[0][6:10]), nn.Parameter(flats[0][2:6].view(2, 2))]
    parameters[0].grad, parameters[1].grad = gradients[0][5:9], gradients[0][1:5].view(2, 2)
    alone = nn.Parameter(torch.randn(3))
    alone.grad = torch.ones(3)
    expected = flats[0].clone()
    expected[2:10] -= gradients[0][1:9]
    optimizer = fuse_optimizer(optim.SGD([*parameters, alone], lr=1.0), do_flatten=False)
    address = alone.data_ptr()
    optimizer.fuse_step()
    assert optimizer._bagua_fused_count == 1
    assert torch.equal(flats[0], expected)
    assert parameters[0].grad.data_ptr() == gradients[0][5:].data_ptr()
    assert alone.data_ptr() == address
    others = fuse_optimizer(optim.SGD(nn.Linear(2, 3).parameters(), lr=1.0), do_flatten=False)
    others.fuse_step()
    assert others._bagua_fused_count == 0


class Normed(optim.SGD):
    """Scales each parameter's gradient by its norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.sub_(one.grad / one.grad.norm(), alpha=group["lr"])


class Lookahead(optim.SGD):
    """Steps with another optimizer."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        self.inner = optim.SGD(parameters, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class FusedLAMB(optim.SGD):
    """What matters is its name."""


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda parameters: FusedLAMB(parameters, lr=0.1), "FusedLAMB cannot be fused: it uses norms"),
        (optim.LBFGS, "LBFGS cannot be fused"),
        (optim.Adafactor, "Adafactor cannot be fused"),
        (optim.SparseAdam, "SparseAdam cannot be fused"),
        (lambda parameters: Normed(parameters, lr=0.1), "Normed cannot be fused: two small tensors"),
        (lambda parameters: Normed(parameters, lr=0.0), "Normed cannot be fused: two small tensors"),
        (Lookahead, "Lookahead cannot be fused: it steps with another optimizer"),
        (lambda parameters: optim.Adam(parameters, differentiable=True), "differentiable=True"),
    ],
)
def test_refused(make: Callable[[Sequence[nn.Parameter]], Any], told: str) -> None:
    parameters = list(nn.Linear(2, 3).parameters())
    before = [one.data_ptr() for one in parameters]
    with pytest.raises(ValueError, match=told):
        fuse_optimizer(make(parameters))
    assert [one.data_ptr() for one in parameters] == before


def test_fused_once_and_stepped_only_then() -> None:
    optimizer = optim.SGD(nn.Linear(2, 3).parameters(), lr=0.1)
    with pytest.raises(AssertionError, match="is not fused"):
        fuse_step(optimizer)
    assert fuse_optimizer(optimizer) is optimizer
    with pytest.raises(RuntimeError, match="is fused already"):
        fuse_optimizer(optimizer)
    who_knows_better = fuse_optimizer(FusedLAMB(nn.Linear(2, 3).parameters(), lr=0.1), elementwise=True)
    assert is_fused_optimizer(who_knows_better)


# --- which tensors lie one after another ---------------------------------------------------------------------------


def pieces(flat: Tensor, *bounds: tuple[int, int]) -> list[Tensor]:
    return [flat[begin:end] for begin, end in bounds]


ORDER = [(10, 14), (3, 5), (5, 10), (0, 3), (20, 22), (22, 23), (30, 31)]


def test_order_of_memory() -> None:
    weights, gradients = (pieces(torch.zeros(40), *ORDER) for _ in range(2))
    assert calculate_mutual_groups([weights, gradients]) == [[3, 1, 2, 0], [4, 5]]


def test_every_list_counts() -> None:
    weights = pieces(torch.zeros(40), *ORDER)
    moved = pieces(torch.zeros(50), *[(begin + 10 * (begin >= 5), end + 10 * (begin >= 5)) for begin, end in ORDER])
    assert calculate_mutual_groups([weights, moved]) == [[4, 5]]  # [3, 1, 2, 0] is two runs there


def test_neighbours_of_other_storages_and_dtypes_are_none() -> None:
    flat = torch.zeros(8)
    strided = torch.zeros(4, 4)
    assert calculate_mutual_groups([[flat[:4], flat[4:].view(torch.int32)]]) == []
    assert calculate_mutual_groups([[strided[:, :2], strided[:, 2:]]]) == []
    assert calculate_mutual_groups([[torch.zeros(0), torch.zeros(0)]]) == []
    assert calculate_mutual_groups([]) == []


def test_channels_last_is_dense() -> None:
    flat = torch.zeros(60)
    first = flat[:24].view(1, 3, 4, 2).permute(0, 3, 1, 2)
    assert calculate_mutual_groups([[flat[24:], first]]) == [[1, 0]]


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match=r"\[1, 2\] entries"):
        calculate_mutual_groups([[torch.zeros(1)], [torch.zeros(1), torch.zeros(1)]])
